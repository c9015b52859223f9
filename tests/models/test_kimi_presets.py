"""Decoders on the Kimi Linear backbone: counts by hand, layers and blocks, cache, the dial."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch

import depthmix as dm
from depthmix.cli import main
from depthmix.models.counting import Counts, attention_flops, count_parameters, count_sublayers
from depthmix.models.decoder import make_mixers, make_sublayer
from depthmix.models.mlp import MLP
from depthmix.models.moe import MixtureOfExperts
from depthmix.models.presets import preset
from depthmix.studies import Grid, Size, make_arms
from depthmix.training import TrainConfig, flops_per_token
from tests.models.test_kimi_linear import public
from tests.reference import block_attnres, kimi_linear
from tests.reference import kimi_counts as reference

KIMI = reference.KIMI_LINEAR_48B
TABLE_2 = {f"attnres-{size.lower()}": model for size, model in reference.SCALING_LAW.items()}


@functools.cache
def counts_of(name: str, mixer: str | None = None) -> Counts:
    return count_parameters(preset(name) if mixer is None else preset(name, mixer=mixer))


# The 48B model.


def test_the_48b_model_counts_what_the_released_one_has() -> None:
    plain, blocks = counts_of("kimi-linear-48b", "residual"), counts_of("kimi-linear-48b")
    assert (plain.total, plain.active) == (49_122_675_072, 3_484_453_248)
    assert (plain.total, plain.active) == (reference.total(KIMI), reference.active(KIMI))
    assert (blocks.total, blocks.active) == (49_122_923_904, 3_484_702_080)
    assert plain.embedding == reference.embeddings(KIMI)
    assert blocks.mixer == reference.attnres(KIMI)


def test_the_counts_of_the_48b_model_follow_from_its_parts() -> None:
    sublayers = count_sublayers(preset("kimi-linear-48b"))
    experts = 257 * reference.expert(KIMI) + reference.router(KIMI)
    parts = {"kda": reference.kda(KIMI), "mla": reference.mla(KIMI), "dense": reference.dense(KIMI), "experts": experts}
    assert {kind: part.total - KIMI.dim for kind, part in sublayers.items()} == parts, "each with its norm"
    idle = {kind: part.total - part.active for kind, part in sublayers.items()}
    assert idle == {"kda": 0, "mla": 0, "dense": 0, "experts": (256 - 8) * reference.expert(KIMI)}


def test_latent_attention_is_in_every_fourth_layer_and_the_last() -> None:
    config = preset("kimi-linear-48b")
    kinds = config.attention_kinds
    assert [layer for layer, kind in enumerate(kinds) if kind == "mla"] == [3, 7, 11, 15, 19, 23, 26]
    assert kinds.count("kda") == 20
    with torch.device("meta"):
        assert isinstance(make_sublayer(config, 1), MLP), "layer 0 is dense"
        assert isinstance(make_sublayer(config, 3), MixtureOfExperts)
    assert config.moe is not None
    assert (config.moe.scale, config.moe.scoring, config.moe.balance) == (2.446, "sigmoid", "bias")


def test_the_48b_model_has_nine_blocks_of_three_layers_and_ten_sources_at_the_head() -> None:
    config = preset("kimi-linear-48b")
    with torch.device("meta"):
        stack, _ = make_mixers(config)
    opens = [index + 1 for index, mixer in enumerate(stack) if mixer.opens_block]
    assert opens == [1, 7, 13, 19, 25, 31, 37, 43, 49]
    assert len(stack.out.source_names()) == 10
    blocks = [config.attention_kinds[3 * n : 3 * n + 3] for n in range(9)]
    where = {n + 1: block.index("mla") + 1 for n, block in enumerate(blocks) if "mla" in block}
    assert where == {2: 1, 6: 1, 3: 2, 7: 2, 4: 3, 8: 3, 9: 3}, "block: which of its three layers has MLA"
    assert all(block.count("mla") <= 1 for block in blocks)


# The models of Table 2.


@pytest.mark.parametrize("name", TABLE_2)
def test_a_model_of_table_2_counts_what_its_name_says(name: str) -> None:
    model, counts = TABLE_2[name], counts_of(name)
    assert preset(name).attention_kinds == model.attention
    assert counts.total - counts.mixer == reference.total(model)
    assert counts.active - counts.mixer == reference.active(model)
    assert counts.mixer == reference.attnres(model)
    for number in (counts.active_without_embeddings, counts.active_without_embeddings - counts.mixer):
        assert round(number / 1e6) == int(name.removeprefix("attnres-").removesuffix("m"))
    idle = (len(model.attention) - 1) * (64 - 8) * reference.expert(model)
    assert counts.total - counts.active == idle, "layer 0 has no idle expert"


def test_without_latent_attention_in_the_last_layer_the_names_would_not_fit() -> None:
    """It is what fixes that choice: the paper's table does not say where MLA lies."""
    millions = {}
    for name, model in TABLE_2.items():
        if len(model.attention) % 4:
            config = dataclasses.replace(preset(name), attention=("kda", "kda", "kda", "mla"))
            assert config.attention_kinds[-1] == "kda"
            counts = count_parameters(config)
            millions[name] = round((counts.active_without_embeddings - counts.mixer) / 1e6)
    assert millions == {"attnres-241m": 241, "attnres-296m": 297, "attnres-528m": 530}


def test_the_grouped_query_models_of_the_table_are_kept_under_names_of_their_own() -> None:
    for name, model in TABLE_2.items():
        config, layers = preset(f"{name}-gqa"), len(model.attention)
        assert {*config.attention_kinds} == {"gqa"}
        assert (config.layers, config.dim, config.heads, config.head_dim) == (layers, model.dim, layers, 128)
        hidden = model.expert_hidden
        assert config.moe == dm.MoEConfig(experts=64, active=8, shared=1, hidden=hidden, scoring="sigmoid")


# Cache.


def test_the_cache_of_the_48b_model_takes_8064_bytes_per_token_and_a_constant_state() -> None:
    config = preset("kimi-linear-48b")
    cache = dm.cache_bytes(config)
    assert cache.per_token == 7 * 576 * 2 == 8064 == reference.cache_per_token(KIMI)
    assert cache.total(2**20) == reference.cache(KIMI, tokens=2**20)
    assert cache.per_row == 20 * (2 * 2**20 + 72 * 2**10)
    assert cache.total(1000, rows=3) == 3 * (cache.per_row + 1000 * 8064)
    wide = dm.cache_bytes(config, torch.float32)
    assert wide.per_token == 2 * 8064
    assert wide.per_row == 20 * (2 * 2**20 + 2 * 72 * 2**10), "the state is float32 in any case"
    assert dm.cache_bytes(config, torch.float64).per_row == 2 * wide.per_row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backbone", ["qwen3", "kimi_linear"])
def test_a_cache_holds_as_many_bytes_as_are_counted(backbone: str, dtype: torch.dtype) -> None:
    config = dm.DecoderConfig.from_depth(10, backbone=backbone, dim=32, heads=2, hidden=16)
    model, cache = dm.Decoder(config).to(dtype).eval(), dm.DynamicCache()
    with torch.no_grad():
        model(torch.randint(256, (3, 7)), cache=cache)
    counted = dm.cache_bytes(config, dtype)
    assert cache.nbytes == counted.total(7, rows=3) > 0
    written_in_place = dm.PreallocatedCache(config, 3, 7, dtype=dtype)
    assert sum(tensor.nbytes for tensor in written_in_place.tensors) == counted.total(7, rows=3)


def test_a_grouped_query_cache_has_keys_and_values_per_token_and_nothing_per_row() -> None:
    config = dm.DecoderConfig(vocab_size=9, dim=64, layers=3, heads=4, kv_heads=2, hidden=8)
    assert dm.cache_bytes(config) == dm.CacheBytes(per_token=3 * 2 * 2 * 16 * 2, per_row=0)
    looped = dataclasses.replace(config, loop=dm.LoopConfig(first=0, last=1, repeats=4))
    assert dm.cache_bytes(looped).per_token == 2 * dm.cache_bytes(config).per_token, "every execution has a slot"


# The dial, and the small preset, which is one of its points.


@pytest.mark.parametrize("depth", [2, 4, 6, 8, 12, 16, 24, 48])
def test_the_dial_derives_a_kimi_linear_decoder(depth: int) -> None:
    config = dm.DecoderConfig.from_depth(depth, backbone="kimi_linear")
    plain = dm.DecoderConfig.from_depth(depth)
    for name in ("dim", "layers", "heads", "hidden", "vocab_size", "mixer"):
        assert getattr(config, name) == getattr(plain, name)
    kinds = config.attention_kinds
    assert [kind == "mla" for kind in kinds] == [i % 4 == 3 or i == config.layers - 1 for i in range(config.layers)]
    assert config.mla is not None
    assert config.heads * config.mla.value == config.heads * config.mla.nope == config.dim
    assert config.kda is None or config.kda.heads * config.kda.head_dim == config.dim
    assert config.moe is not None
    assert config.moe.dense_layers == min(1, config.layers - 1)
    with torch.device("meta"):
        dm.Decoder(config)


def test_the_sizes_given_to_the_dial_reach_every_part_of_the_backbone() -> None:
    config = dm.DecoderConfig.from_depth(8, backbone="kimi_linear", dim=48, heads=2, hidden=40, mixer="attnres")
    assert config.kda is not None
    assert (config.kda.heads, config.kda.head_dim) == (2, 24)
    assert config.mla is not None
    assert (config.mla.nope, config.mla.shared, config.mla.value) == (24, 12, 24)
    assert config.moe is not None
    assert (config.hidden, config.moe.hidden) == (40, 10)
    assert config.mixer.name == "attnres"


@torch.no_grad()
def test_a_decoder_of_the_dial_computes_what_the_loops_of_the_reference_do() -> None:
    """Four layers of KDA and two of MLA, a dense first layer, scaled experts, blocks of four sublayers."""
    mixer = {"name": "block_attnres", "num_blocks": 3}
    config = dm.DecoderConfig.from_depth(12, backbone="kimi_linear", dim=32, heads=2, hidden=16, mixer=mixer)
    draw = torch.Generator().manual_seed(0)
    model = dm.Decoder(config).double().eval()
    for tensor in model.state_dict().values():  # the biases of the balance too
        if tensor.is_floating_point():
            tensor += 0.2 * torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype)
    tokens = torch.randint(256, (2, 9), generator=draw)
    mixers = {name.removeprefix("depth."): tensor for name, tensor in model.state_dict().items()}

    def depth(x: torch.Tensor, sublayers: list[kimi_linear.Sublayer]) -> list[torch.Tensor]:
        return block_attnres.inputs(x, sublayers, mixers, num_blocks=3, eps=1e-6)

    given = {"attention": config.attention_kinds, "heads": 2, "active": 2, "eps": config.norm_eps, "depth": depth}
    expected = kimi_linear.logits(tokens, public(model), **given)  # its scale is that of the 48B model
    assert (model(tokens) - expected).abs().max() <= 1e-11
    other = kimi_linear.logits(tokens, public(model), **given, scale=1.0)
    assert (model(tokens) - other).abs().max() >= 1e-3


def test_the_default_backbone_is_what_it_was() -> None:
    for depth in (2, 12, 24):
        assert dm.DecoderConfig.from_depth(depth) == dm.DecoderConfig.from_depth(depth, backbone="qwen3")
        assert dm.DecoderConfig.from_depth(depth).moe is None


def test_an_unknown_backbone_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"backbone='kimi-linear'\. Did you mean 'kimi_linear'\? Expected one of"):
        dm.DecoderConfig.from_depth(8, backbone="kimi-linear")


def test_mechanisms_inside_attention_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"kv_mixer='depth_attention'.*latent"):
        dm.DecoderConfig.from_depth(8, backbone="kimi_linear", kv_mixer="depth_attention")


def test_the_small_preset_is_the_dial_at_eight_layers_and_width_128() -> None:
    config = preset("kimi-linear-tiny")
    dial = TrainConfig.from_dial(16, {"name": "block_attnres", "num_blocks": 4}, backbone="kimi_linear", dim=128).model
    assert config == dial
    assert config.attention_kinds == ("kda", "kda", "kda", "mla") * 2
    assert config.kda == dm.KDAConfig(heads=4, head_dim=32)
    assert config.mla == dm.MLAConfig(rank=64, nope=32, shared=16, value=32)
    assert config.moe is not None
    assert (config.hidden, config.moe.experts, config.moe.active, config.moe.shared) == (384, 8, 2, 1)
    assert config.moe.hidden == 96


# The page.


def test_the_page_gives_the_counts_of_every_preset_on_this_backbone() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kimi_linear.md").read_text()
    for name in (*TABLE_2, "kimi-linear-48b", "kimi-linear-tiny"):
        counts = counts_of(name)
        numbers = (counts.total, counts.active, counts.active_without_embeddings)
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert row.endswith(f" {' | '.join(f'{number:,}' for number in numbers)} |")


def test_the_page_gives_the_flops_of_attention() -> None:
    config = preset("kimi-linear-48b")
    kinds = config.attention_kinds
    for tokens, kda, mla in ((4096, 0.10, 0.29), (131_072, 0.10, 9.40), (1_048_576, 0.10, 75.2)):
        flops = dict.fromkeys(("kda", "mla"), 0)
        for kind, each in zip(kinds, attention_flops(config, tokens), strict=True):
            flops[kind] += each
        assert flops["kda"] / 1e9 == pytest.approx(kda, abs=0.006)
        assert flops["mla"] / 1e9 == pytest.approx(mla, rel=0.02)
        rest = flops_per_token(config, tokens) / 3 - sum(flops.values())
        assert rest / 1e9 == pytest.approx(6.22, abs=0.005)


# The command line.


def printed(capsys: pytest.CaptureFixture[str], *given: str) -> TrainConfig:
    assert main(["train", "--print-config", *given]) == 0
    return TrainConfig.from_toml(capsys.readouterr().out)


def test_train_takes_the_backbone_from_the_dial(capsys: pytest.CaptureFixture[str]) -> None:
    config = printed(capsys, "--backbone", "kimi_linear", "--depth", "8", "--mixer", "attnres")
    assert config == TrainConfig.from_dial(8, "attnres", backbone="kimi_linear")
    assert config.run.folder == "runs/kimi_linear-attnres-8"
    assert printed(capsys, "--depth", "8", "--backbone", "qwen3") == printed(capsys, "--depth", "8")
    rule = printed(capsys, "--preset", "attnres", "--depth", "12", "--backbone", "qwen3")
    assert {*rule.model.attention_kinds} == {"gqa"}
    assert rule.run.folder == "runs/attnres-qwen3-12"


@pytest.mark.parametrize("start", [("--preset", "attnres-194m"), ("--config", "some.toml")])
def test_a_preset_or_a_file_has_a_backbone_already(start: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *start, "--backbone", "qwen3", "--print-config"]) == 2
    assert f"backbone=qwen3 and {start[0][2:]}={start[1]}" in capsys.readouterr().err


def test_the_48b_model_trains_as_far_as_its_paper_says(capsys: pytest.CaptureFixture[str]) -> None:
    config = printed(capsys, "--preset", "kimi-linear-48b")
    assert config.model == preset("kimi-linear-48b")
    assert (config.optimizer.name, config.schedule.kind, config.run.precision) == ("muon", "wsd", "bfloat16")
    assert config.tokens_per_step == 2**23
    assert config.data.tokens_per_row == 4096
    assert config.run.steps * config.tokens_per_step == pytest.approx(1e12, rel=1e-4)


def test_show_tells_layers_blocks_and_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--preset", "kimi-linear-48b"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        *("49,122,923,904", "3,484,702,080", "248,832", "39,516,576", "9 blocks of 6 sublayers"),
        *("1, 7, 13, 19, 25, 31, 37, 43, 49", "sources at the head 10", "mla in 7: 3, 7, 11, 15, 19, 23, 26"),
        *("dense in 1: 0", "experts in 26: 1–26", "8,064 bytes", "43,417,600 bytes", "7.92 GiB"),
    ):
        assert words in out
    assert main(["show", "--preset", "kimi-linear-48b", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["cache"] == {"dtype": "bfloat16", "bytes_per_token": 8064, "bytes_per_row": 43_417_600}
    assert page["mixing"]["blocks_begin_at_sublayer"] == [1, 7, 13, 19, 25, 31, 37, 43, 49]
    assert page["layers"]["attention"].count("mla") == 7


def test_show_tells_no_blocks_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--preset", "depth-attention-360m", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert "blocks_begin_at_sublayer" not in page["mixing"]
    assert (page["layers"]["attention"], page["layers"]["mlp"]) == (["gqa"] * 24, ["dense"] * 24)
    assert page["cache"]["bytes_per_row"] == 0


def test_every_arm_of_a_study_has_the_backbone() -> None:
    sizes = [Size(depth=4, dim=32), Size(depth=8, dim=32)]
    grid = Grid.parse(["residual", "attnres"], sizes, settings=["model.kda.conv=3"], backbone="kimi_linear")
    models = [arm.config.model for arm in make_arms(grid)]
    assert [model.attention_kinds for model in models[::2]] == [("kda", "mla"), ("kda", "kda", "kda", "mla")]
    assert all(model.kda == dm.KDAConfig(heads=1, head_dim=32, conv=3) for model in models)
    plain = make_arms(Grid.parse(["residual"], sizes))
    assert all({*arm.config.model.attention_kinds} == {"gqa"} for arm in plain)


@pytest.mark.full
def test_the_small_preset_learns_in_20_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--preset", "kimi-linear-tiny", "--steps", "20", "--json", "--folder", str(tmp_path / "run")]
    assert main(["train", *given, "--set", f"data.folder={tmp_path / 'tokens'}"]) == 0
    assert json.loads(capsys.readouterr().out)["validation_loss"] < 3.0, "5.5 at the start; 2.5 was seen"


def test_the_small_preset_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--data", str(tmp_path / "text.txt"), "--set", f"data.folder={tmp_path / 'tokens'}"]
    (tmp_path / "text.txt").write_text("what a layer reads from the layers below it " * 200)
    small = ["--preset", "kimi-linear-tiny", "--steps", "3", "--batch", "2", "--context", "64"]
    assert main(["train", *small, *where, "--folder", str(tmp_path / "run")]) == 0
    assert "validation loss" in capsys.readouterr().out
