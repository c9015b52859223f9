"""FLOPs of a decoder: sublayers, attention, head and mixing, each by hand."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import depthmix as dm
from depthmix.cli import main
from depthmix.models.counting import count_multiplied, execution_flops
from depthmix.training import flops_per_token, train
from tests.runs import lines, tiny_run

UNSTATED = """
import torch, depthmix as dm
from depthmix.mechanisms.highway import Highway
from depthmix.mechanisms.value_residual import ValueResidual

class Silent(Highway):
    @classmethod
    def facts(cls, config, *, dim, depth):
        return dm.Facts(preserves_prenorm="no", rank=1, parameters=depth * (dim + 1), reads=2 * dim, writes=dim)

class SilentValues(ValueResidual):
    facts = dm.KVMixer.facts
"""


def forward(config: dm.DecoderConfig, row: int) -> float:
    return flops_per_token(config, row) / 3


def test_attention_residuals_cost_what_their_reads_do() -> None:
    """24 sublayers of width 96, rows of 256 tokens: 1/rms, dot product and mixture are 6·D per source of a read."""
    config, row, d = dm.DecoderConfig.from_depth(24, dim=96), 256, 96
    layer = 4 * d * d + 3 * d * 256 + 2 * d + 2 * 32  # projections, MLP, norms of both and of queries and keys
    plain = 2 * (12 * layer + d + 256 * d) + 12 * 4 * 96 * (row + 1) / 2
    assert forward(config, row) == plain + 24 * d, "the residual adds 24 times"
    for name, options, sources, share in (
        ("attnres", {}, sum(range(2, 26)), 5.65),
        ("block_attnres", {"num_blocks": 8}, 3 * sum(range(2, 10)), 2.30),
    ):
        facts = dm.DepthStack(name, dim=d, depth=24, **options).facts
        reads = 6 * d * sources
        assert round(100 * reads / plain, 2) == share
        added = 16 * d * (name == "block_attnres")  # to partials
        assert facts.flops == reads + 8 * sources + added, "two for the root, two on the logit, four for softmax"
        mixed = dataclasses.replace(config, mixer={"name": name, **options})
        assert facts.flops_two_phase is not None
        assert facts.flops_two_phase < facts.flops
        assert forward(mixed, row) == plain + facts.flops_two_phase, "what runs, not the direct form"


@pytest.mark.parametrize(("size", "share"), [("1.5b", 0.0090), ("3b", 0.0060), ("360m", 0.031)])
def test_depth_attention_costs_under_a_ten_thousandth_in_the_larger_presets_only(size: str, share: float) -> None:
    config = dm.preset(f"depth-attention-{size}")
    plain = dataclasses.replace(config, kv_mixer=None)
    extra = 100 * (flops_per_token(config, 2048) / flops_per_token(plain, 2048) - 1)
    assert float(f"{extra:.2g}") == share
    assert (extra < 0.01) == (size != "360m")
    # Layers 1 to N/2 mix two values, the later ones three: 117 of 48 layers.
    layers, heads, kv = config.layers, config.heads, config.num_kv_heads
    mixed = 2 * (layers // 2) + 3 * (layers // 2 - 1)
    assert mixed == (57 if layers == 24 else 117)
    pooled = (layers - 1) * heads * 64 * (heads != kv)
    assert forward(config, 2048) - forward(plain, 2048) == mixed * kv * (4 * 64 + 1 + 4) + pooled


def kimi_linear(**fields: Any) -> dm.DecoderConfig:
    """Six layers: KDA, KDA, KDA, MLA, KDA, MLA."""
    return dm.DecoderConfig.from_depth(12, backbone="kimi_linear", dim=64, heads=2, hidden=32, **fields)


def test_kda_costs_the_same_per_token_for_rows_of_any_length_and_latent_attention_grows_with_them() -> None:
    """Heads of 32: keys of MLA are 32 + 16 wide and its values 32; chunks of KDA have 64 tokens."""
    config = kimi_linear()
    assert config.attention_kinds == ("kda", "kda", "kda", "mla", "kda", "mla")
    for row in (1, 64, 1000):
        core = 4 * 2 * (6 * 32 * 32 + 8 * 64 * 32) + 2 * 2 * (48 + 32) * (row + 1)
        assert forward(config, row) == 2 * count_multiplied(config) + core + 12 * 64, "the residual adds 12 times"
    long, longer = (forward(config, row) for row in (4096, 8192))
    assert longer - long == 2 * 2 * (48 + 32) * 4096


def test_the_first_layer_multiplies_a_token_with_its_dense_mlp_and_the_others_with_the_chosen_experts() -> None:
    config = kimi_linear()
    dense = dataclasses.replace(config, moe=None)
    expert, router = 3 * 64 * 8, 8 * 64
    assert config.moe is not None
    assert config.moe.hidden == 8
    saved = 2 * 5 * (3 * 64 * 32 - 3 * expert - router)  # 2 of 8 experts and a shared one
    assert forward(dense, 64) - forward(config, 64) == saved


def test_executions_of_every_kind_add_up_to_the_forward_pass() -> None:
    for config in (kimi_linear(), kimi_linear(mixer="attnres", loop={"first": 1, "last": 4, "repeats": 2})):
        each = execution_flops(config, 512)
        assert sum(each) == forward(config, 512)
        assert len(each) == config.depth + 1
    plain = execution_flops(kimi_linear(), 100_000)
    assert plain[6] > 3 * max(plain[0], plain[2], plain[4]), "MLA over a long row, beside KDA"


def test_stages_of_equal_cost_have_fewer_layers_where_latent_attention_is() -> None:
    config = kimi_linear()
    (_, first), *_ = dm.segment_bounds(config, 2, by="flops", tokens_per_row=100_000)
    assert first == 7, "layers 0 to 2 and the MLA of layer 3: the other MLA is in the second half"
    assert dm.segment_bounds(config, 2)[0] == (0, 6)


def test_a_run_records_the_flops_of_its_reads(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", "attnres", run__steps=2)
    result = train(config)
    each = flops_per_token(config.model, config.data.tokens_per_row) * config.tokens_per_step
    assert result.flops == 2 * each
    assert [line["flops"] for line in lines(tmp_path / "run", "train")] == [each, 2 * each]


def test_mechanisms_that_state_no_flops_count_two_for_each_parameter_and_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "silent_mixers.py").write_text(UNSTATED)
    info = tmp_path / "silent-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: silent\nVersion: 1.0\n")
    points = "silent = silent_mixers:Silent\nsilent_values = silent_mixers:SilentValues\n"
    (info / "entry_points.txt").write_text(f"[depthmix.mechanisms]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "silent_mixers", raising=False)

    sizes: dict[str, Any] = {"vocab_size": 30, "dim": 16, "layers": 2, "heads": 2, "hidden": 24}
    plain = forward(dm.DecoderConfig(**sizes), 8) - 4 * 16
    assert forward(dm.DecoderConfig(**sizes, mixer="silent"), 8) == plain + 2 * 4 * 17
    assert forward(dm.DecoderConfig(**sizes, kv_mixer="silent_values"), 8) == plain + 4 * 16 + 2 * 2

    assert main(["list", "--dim", "64", "--depth", "4", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["silent"]["flops"], rows["silent"]["forward_flops"]) == (None, 2 * 4 * 65)
    assert (rows["silent_values"]["flops"], rows["silent_values"]["forward_flops"]) == (None, 2 * 2)
    assert main(["list"]) == 0
    assert "~      not stated by the mechanism; 2 per parameter are counted" in capsys.readouterr().out
    for name in ("silent", "silent_values"):
        assert main(["show", name]) == 0
        assert "not stated by the" in " ".join(capsys.readouterr().out.replace("│", " ").split())
