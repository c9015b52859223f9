"""Weights over sources: what mechanisms say of their reads, and what is taken from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import depthmix as dm
from depthmix.analysis import figures
from depthmix.analysis.invariants import Probe, make_probe
from depthmix.mechanisms.source_attention import options_of_family
from tests.cases import EVERY_MECHANISM, label


def traced(probe: Probe) -> dm.Trace:
    return dm.trace(probe.stack, probe.x, probe.sublayers)


FAMILY = [pytest.param(options, id=label("", options)) for options in options_of_family()]


def test_shares_of_the_residual_are_those_of_its_m() -> None:
    found = traced(make_probe("residual", {}))
    assert found.shares_of == "M"
    for row in range(found.M.shape[-1]):
        assert (found.embedding_share()[..., row] - 1 / (row + 1)).abs().max() <= 1e-12
        assert (found.locality()[..., row] - 1 / (row + 1)).abs().max() <= 1e-12


@pytest.mark.parametrize("options", FAMILY)
def test_each_output_of_a_block_has_the_weight_of_its_block_in_m(options: dict[str, Any]) -> None:
    size, probe = 3, make_probe("block_attnres", {"block_sublayers": 3, **options})
    found = traced(probe)
    assert found.weights is not None
    assert found.source_names == ["embedding", "block 1", "block 2", "block 3"]
    assert found.partial == [False, True, True, False, True, True, False, True]
    assert found.reads == [[0], [0, 1], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]
    for row in range(8):
        for i in range(8):
            want = found.weights[..., row, 0 if i == 0 else 1 + (i - 1) // size] if i <= row else torch.zeros(())
            assert (found.M[..., row, i] - want).abs().max() <= 1e-12
    if options.get("mixing") != "sigmoid":
        assert (found.weights.sum(-1) - 1).abs().max() <= 1e-12
    else:
        assert (found.weights.sum(-1)[..., -1] - 1).abs().max() > 0.1


@pytest.mark.parametrize("options", [*FAMILY, pytest.param({"window": 2}, id="window")])
def test_of_full_attnres_the_weights_are_m(options: dict[str, Any]) -> None:
    found = traced(make_probe("attnres", options))
    assert found.weights is not None
    assert found.source_names == ["embedding", *(f"output {i}" for i in range(1, 8))]
    assert torch.equal(found.weights, found.M)
    if "window" in options:
        assert found.reads[6] == [0, 5, 6]


@pytest.mark.parametrize("name", ["attnres", "block_attnres"])
def test_the_number_of_sources_is_no_part_of_a_weight(name: str) -> None:
    found = traced(make_probe(name, {"scale_by_count": True}))
    assert found.weights is not None
    assert (found.weights.sum(-1) - 1).abs().max() <= 1e-12
    counts = torch.tensor([len(row) for row in found.reads], dtype=torch.float64)
    assert (found.M[..., 0] - counts * found.weights[..., 0]).abs().max() <= 1e-12


def test_what_is_beside_a_stream_is_weighted_without_it() -> None:
    delta = traced(make_probe("delta_attnres", {"heads": 2}))
    assert delta.weights is not None
    assert delta.reads[0] == delta.reads[-1] == [], "these rows are plain sums"
    assert delta.source_names[-1] == "output 6", "only the head's row reads the last output"
    want = (1 + delta.weights[..., 1:-1, :]).tril(1)
    assert (delta.M[..., 1:-1, :-1] - want).abs().max() <= 1e-12
    probe = make_probe("mrla", {"form": "base", "head_dim": 4})
    base = traced(probe)
    assert base.weights is not None
    assert base.weights.shape == (2, 3, 2, 8, 8)
    gamma = torch.stack([mixer.gamma for mixer in probe.stack.all_mixers()[1:]])  # [row, D]
    want = 1 + gamma.T[:, :, None] * base.weights.repeat_interleave(4, 2)[..., 1:, :]
    assert (base.M[..., 1:, :] - want.tril(1)).abs().max() <= 1e-12


@pytest.mark.parametrize(("name", "options"), [("attnres", {}), ("block_attnres", {"block_sublayers": 3})])
def test_uniform_weights_over_n_sources_have_entropy_log_n(name: str, options: dict[str, Any]) -> None:
    found = traced(make_probe(name, options, spread=0))
    counts = [len(row) for row in found.reads]
    assert counts == ([1, 2, 3, 4, 5, 6, 7, 8] if name == "attnres" else [1, 2, 2, 2, 3, 3, 3, 4])
    assert found.shares_of == "weights"
    for row, n in enumerate(counts):
        assert (found.entropy()[..., row] - math.log(n)).abs().max() <= 1e-12
        assert (found.locality()[..., row] - 1 / n).abs().max() <= 1e-12
        assert (found.embedding_share()[..., row] - 1 / n).abs().max() <= 1e-12
    assert found.spread().abs().max() <= 1e-12
    readers = [sum(i in row for row in found.reads) for i in range(len(found.source_names))]
    want = [sum(1 / n for n, row in zip(counts, found.reads, strict=True) if i in row) for i in range(len(readers))]
    assert found.sinks()[0, 0].tolist() == pytest.approx([w / n for w, n in zip(want, readers, strict=True)])


@pytest.mark.parametrize("options", FAMILY)
def test_full_attnres_and_blocks_of_one_agree_number_for_number(options: dict[str, Any]) -> None:
    full = traced(make_probe("attnres", options))
    block = traced(make_probe("block_attnres", {"block_sublayers": 1, **options}))
    assert full.reads == block.reads
    assert not any(block.partial)
    assert torch.allclose(full.weights, block.weights, atol=1e-12)
    for statistic in ("sinks", "entropy", "locality", "spread"):
        assert torch.allclose(getattr(full, statistic)(), getattr(block, statistic)(), atol=1e-12), statistic


def test_a_block_is_one_source_in_the_share_of_a_sink() -> None:
    """α = 0.44 on the embedding and 0.07 on each of eight blocks of three, in the head's row."""
    stack = dm.DepthStack("block_attnres", dim=4, depth=24, block_sublayers=3, mixing="static").double()
    with torch.no_grad():
        stack.out.logits.copy_(torch.tensor([0.44, *[0.07] * 8]).log())
    found = dm.trace(stack, torch.randn(5, 4).double(), [torch.tanh] * 24)
    assert found.weights[0, -1].tolist() == pytest.approx([0.44, *[0.07] * 8], abs=1e-6)
    row = found.M[0, -1]
    assert float(row[0] / row.sum()) == pytest.approx(0.44 / (0.44 + 24 * 0.07), abs=1e-6)
    assert float(found.entropy()[0, -1]) == pytest.approx(-0.44 * math.log(0.44) - 8 * 0.07 * math.log(0.07), abs=1e-5)
    assert float(found.entropy().max()) <= math.log(9) + 1e-12


def test_spread_and_deviation_are_over_tokens() -> None:
    found = traced(make_probe("attnres", {"heads": 2}, tokens=(2, 3)))
    shares = found.weights.reshape(6, 2, 8, 8)  # rows sum to 1 already
    mean = sum(shares) / 6
    variance = sum((share - mean) ** 2 for share in shares) / 6
    assert torch.allclose(found.deviation(), variance.sqrt(), atol=1e-12)
    assert torch.allclose(found.spread(), variance.sum(-1).sqrt(), atol=1e-12)
    static = traced(make_probe("attnres", {"mixing": "static"}))
    assert static.spread().abs().max() <= 1e-7


@EVERY_MECHANISM
def test_a_trace_says_what_its_shares_are_taken_from(name: str, options: dict[str, Any]) -> None:
    found = traced(make_probe(name, options))
    named = name in ("attnres", "block_attnres", "delta_attnres")
    assert found.shares_of == ("weights" if named else "M")
    assert (found.weights is not None) == bool(found.source_names) == named
    if not named:
        assert torch.equal(found.sinks(), dm.sinks(found.M))
        share = found.M.abs() / found.M.abs().sum(-1, keepdim=True)
        assert torch.allclose(found.locality(), share.diagonal(dim1=-2, dim2=-1))
        assert torch.allclose(found.entropy(), -torch.special.xlogy(share, share).sum(-1))


class First(dm.DepthMixer):
    """Somebody else's: every site reads 3/4 of the embedding and 1/4 of the newest output."""

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> dm.Facts:
        return dm.Facts(preserves_prenorm="no", rank=None, parameters=0, reads=0, writes=0)

    def spec(self, site: dm.Site) -> dm.StateSpec:
        return dm.StateSpec(((site.dim,),) * (1 if site.is_first else 2), essential=1 if site.is_first else 2, sealed=0)

    def combine(self, state: dm.State, c: Any) -> Tensor:
        return state[0] if len(state) == 1 else 0.75 * state[0] + 0.25 * state[1]

    def update(self, state: dm.State, c: Any, v: Tensor) -> dm.State:
        return (state[0], v)

    def source_weights(self, c: Any) -> dm.SourceWeights | None:
        if self.site.is_first:
            return None
        return dm.SourceWeights(torch.tensor([0.75, 0.25]), ("text", f"step {self.site.index}"))


def test_a_mechanism_of_another_package_names_its_own_sources() -> None:
    found = dm.trace(dm.DepthStack(First, dim=4, depth=3), torch.randn(2, 4), [torch.tanh] * 3)
    assert found.source_names == ["text", "step 1", "step 2", "step 3"]
    assert found.reads == [[], [0, 1], [0, 2], [0, 3]]
    assert found.weights[1].tolist() == [[0] * 4, [0.75, 0.25, 0, 0], [0.75, 0, 0.25, 0], [0.75, 0, 0, 0.25]]
    assert found.sinks()[0].tolist() == pytest.approx([0.75, 0.25, 0.25, 0.25])
    assert found.locality()[0].tolist() == [0, 0.25, 0.25, 0.25]


def test_weights_come_back_from_a_file(tmp_path: Path) -> None:
    found = traced(make_probe("block_attnres", {"block_sublayers": 2, "heads": 2}))
    found.save(tmp_path / "trace.safetensors")
    back = dm.Trace.load(tmp_path / "trace.safetensors")
    assert torch.equal(back.weights, found.weights)
    assert (back.source_names, back.reads, back.partial) == (found.source_names, found.reads, found.partial)
    assert torch.equal(back.sinks(), found.sinks())


def test_traces_of_earlier_versions_load(tmp_path: Path) -> None:
    found = traced(make_probe("block_attnres", {}))
    fields = {name: getattr(found, name) for name in ("kind", "mechanism", "options", "channels")}
    tensors = {name: getattr(found, name).contiguous() for name in ("M", "sources", "inputs")}
    save_file(tensors, tmp_path / "old.safetensors", {"depthmix.trace": json.dumps(fields)})
    back = dm.Trace.load(tmp_path / "old.safetensors")
    assert back.weights is None
    assert back.shares_of == "M"
    assert torch.allclose(back.sinks(), dm.sinks(found.M), atol=1e-12)


def test_weights_are_drawn_with_the_names_of_their_sources(tmp_path: Path) -> None:
    found = traced(make_probe("block_attnres", {"block_sublayers": 2, "heads": 2}))
    figures.weights_map(found, tmp_path / "weights.svg")
    drawn = (tmp_path / "weights.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in found.source_names)
    with pytest.raises(ValueError, match="residual does not weight a list of sources"):
        figures.weights_map(traced(make_probe("residual", {})), tmp_path / "none.png")
