"""Decoders by name: their counts against formulas written here, and against the papers' tables."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch

from depthmix.cli import main
from depthmix.mechanisms import kv_mechanism
from depthmix.models.config import DecoderConfig
from depthmix.models.counting import Counts, count_parameters
from depthmix.models.decoder import Decoder
from depthmix.models.presets import PRESETS, preset
from tests.reference import decoder as reference_decoder

# name: width, MLP, layers, query heads, key-value heads, stride (Depth-Attention, the table of models)
DEPTH_ATTENTION = {
    "depth-attention-360m": (960, 2540, 24, 15, 15, 12),
    "depth-attention-500m": (1152, 3072, 24, 18, 18, 12),
    "depth-attention-710m": (1280, 3072, 32, 20, 20, 16),
    "depth-attention-1.5b": (1536, 4096, 48, 24, 6, 24),
    "depth-attention-3b": (2048, 6912, 48, 32, 8, 24),
}
# name: active parameters in millions, layers and heads, width, width of an expert (AttnRes, Table 2); the decoders with
# grouped-query attention. Those on the paper's own backbone: test_kimi_presets.py
ATTNRES = {
    "attnres-194m-gqa": (194, 12, 896, 400),
    "attnres-241m-gqa": (241, 13, 960, 432),
    "attnres-296m-gqa": (296, 14, 1024, 464),
    "attnres-436m-gqa": (436, 16, 1168, 528),
    "attnres-528m-gqa": (528, 17, 1264, 560),
}
KIMI_LINEAR = {*(name.removesuffix("-gqa") for name in ATTNRES), "kimi-linear-48b", "kimi-linear-tiny"}


@functools.cache
def counts_of(name: str) -> Counts:
    return count_parameters(preset(name))


def test_the_names_are_those_of_the_papers() -> None:
    assert set(PRESETS) == set(DEPTH_ATTENTION) | set(ATTNRES) | KIMI_LINEAR | {"depth-attention-500m-x3"}


def test_the_looped_preset_runs_all_layers_of_the_500m_three_times() -> None:
    plain, looped = preset("depth-attention-500m"), preset("depth-attention-500m-x3")
    assert looped.layer_order == (*range(24), *range(24), *range(24))
    assert counts_of("depth-attention-500m-x3") == counts_of("depth-attention-500m")
    assert looped.kv_mixer is not None
    assert looped.kv_mixer.to_dict() == {"name": "depth_attention", "stride": 12, "loop": "both"}
    rules = kv_mechanism("depth_attention").Config(**looped.kv_mixer.options)
    assert rules.reads(5, looped.layer_order) == [0]
    assert rules.reads(24 + 5, looped.layer_order) == [0, 5, 12, 24]
    assert rules.reads(48 + 5, looped.layer_order) == [0, 5, 12, 24, 29, 36, 48]
    assert dataclasses.replace(looped, loop=None, kv_mixer=plain.kv_mixer) == plain


@pytest.mark.parametrize("name", DEPTH_ATTENTION)
def test_a_depth_attention_decoder_counts_what_its_table_gives(name: str) -> None:
    dim, hidden, layers, heads, kv_heads, stride = DEPTH_ATTENTION[name]
    assert heads * 64 == dim
    matrices = layers * (2 * dim * dim + 2 * dim * 64 * kv_heads + 3 * dim * hidden)
    norms = layers * (2 * dim + 2 * 64) + dim
    embedding = 2 * 50304 * dim
    total = matrices + norms + embedding
    assert counts_of(name) == Counts(
        total=total,
        active=total,
        active_without_embeddings=total - embedding,
        embedding=embedding,
        mixer=0,
    )
    config = preset(name)
    assert (config.norm_eps, config.rope_theta, config.tie_embeddings) == (1e-5, 1e4, False)
    assert config.init_std == (0.01 if layers == 48 else 0.02)
    assert config.kv_mixer is not None
    assert config.kv_mixer.to_dict() == {"name": "depth_attention", "stride": stride}
    assert stride == layers // 2


@pytest.mark.parametrize("name", DEPTH_ATTENTION)
def test_a_depth_attention_preset_norms_its_keys_after_rope(name: str) -> None:
    """As in the authors' code. Weights away from 1: a norm without a weight commutes with the rotation."""
    grouped = preset(name).kv_heads != preset(name).heads
    sizes = {"vocab_size": 13, "dim": 16, "layers": 4, "heads": 4, "head_dim": 6, "hidden": 20}
    small = {**sizes, "kv_heads": 2 if grouped else 4, "kv_mixer": {"name": "depth_attention", "stride": 2}}
    config = preset(name, **small)
    model = Decoder(config).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=draw, dtype=p.dtype)
    tokens = torch.randint(13, (2, 5), generator=draw)
    plain = {
        order: reference_decoder.run(
            tokens,
            dict(model.named_parameters()),
            order=range(4),
            theta=1e4,
            eps=1e-5,
            key_norm=order,
            kv_mixer="depth_attention",
            kv_options={"stride": 2},
        )[0]
        for order in ("after", "before")
    }
    logits = model(tokens)
    assert (logits - plain["after"]).abs().max() <= 1e-12
    assert (logits - plain["before"]).abs().max() >= 1e-3


@pytest.mark.parametrize(("name", "millions"), [("360m", 360), ("500m", 500), ("710m", 710)])
def test_the_names_of_the_smaller_ones_are_their_counts(name: str, millions: int) -> None:
    assert counts_of(f"depth-attention-{name}").total == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.parametrize(("name", "billions"), [("1.5b", 1.34), ("3b", 2.75)])
def test_the_larger_ones_hold_less_than_their_names(name: str, billions: float) -> None:
    """The widths of the paper's table give this; its names are rounded up."""
    assert counts_of(f"depth-attention-{name}").total == pytest.approx(billions * 1e9, rel=0.005)


def attnres_active(layers: int, dim: int, hidden: int, kv_heads: int) -> int:
    attention = 2 * dim * 128 * (layers + kv_heads) + dim + 2 * 128  # as many heads as layers
    experts = (8 + 1) * 3 * dim * hidden + 64 * dim + dim
    mixer = 2 * dim * 2 * layers  # query and key weight of each site but the first, the output's included
    return layers * (attention + experts) + dim + mixer


@pytest.mark.parametrize("name", ATTNRES)
def test_an_attnres_decoder_counts_what_its_table_gives(name: str) -> None:
    millions, layers, dim, hidden = ATTNRES[name]
    active = attnres_active(layers, dim, hidden, layers)
    embedding = 2 * 163840 * dim
    counts = counts_of(name)
    assert counts == Counts(
        total=active + embedding + layers * (64 - 8) * 3 * dim * hidden,
        active=active + embedding,
        active_without_embeddings=active,
        embedding=embedding,
        mixer=4 * dim * layers,
    )
    assert counts.active_without_embeddings == pytest.approx(millions * 1e6, rel=0.08)
    assert preset(name).mixer.to_dict() == {"name": "block_attnres", "num_blocks": 8}


@pytest.mark.parametrize("name", ATTNRES)
def test_fewer_key_value_heads_would_not_fit_the_table(name: str) -> None:
    millions, layers, dim, hidden = ATTNRES[name]
    assert attnres_active(layers, dim, hidden, layers // 2) < 0.9 * millions * 1e6


def test_fields_can_be_set_anew() -> None:
    config = preset("attnres-194m-gqa", layers=2, mixer="residual", vocab_size=50)
    assert (config.layers, config.mixer.name, config.vocab_size, config.dim) == (2, "residual", 50, 896)
    dense = count_parameters(preset("attnres-194m-gqa", moe=None))
    assert dense.active_without_embeddings == attnres_active(12, 896, 400, 12) - 12 * 64 * 896, "all but the router"


def test_a_preset_survives_its_json() -> None:
    for name in PRESETS:
        assert DecoderConfig.from_dict(json.loads(json.dumps(preset(name).to_dict()))) == preset(name)


@pytest.mark.parametrize(
    "options",
    [
        {"tie_embeddings": True},
        {"loop": {"first": 0, "last": 1, "repeats": 3}, "mixer": "attnres"},
        {"moe": {"experts": 4, "active": 2, "hidden": 6}, "mixer": "mhc"},
    ],
)
def test_counts_are_those_of_the_real_model(options: dict[str, object]) -> None:
    config = DecoderConfig(vocab_size=30, dim=16, layers=2, heads=2, hidden=24, **options)  # type: ignore[arg-type]
    model, counts = Decoder(config), count_parameters(config)
    assert counts.total == sum(p.numel() for p in model.parameters())
    assert counts.embedding == 30 * 16 * (1 if config.tie_embeddings else 2)
    assert counts.mixer == model.depth.facts.parameters
    assert counts.total - counts.active == (0 if config.moe is None else 2 * (4 - 2) * 3 * 16 * 6)
    assert counts.active - counts.active_without_embeddings == counts.embedding


def test_counting_takes_no_memory() -> None:
    before = torch.get_rng_state()
    assert count_parameters(preset("depth-attention-3b")).total > 2e9
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'atnres-194m'\. Did you mean 'attnres-194m'"):
        preset("atnres-194m")
    with pytest.raises(ValueError, match="widht"):
        preset("attnres-194m", widht=3)


def test_show_prints_configuration_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--preset", "attnres-194m-gqa"]) == 0
    out = capsys.readouterr().out
    for word in ("attnres-194m-gqa", "block_attnres", "experts=64", "182,938,496", "1,199,074,176"):
        assert word in out


def test_show_lists_all_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--preset", "all"]) == 0
    out = capsys.readouterr().out
    for name in PRESETS:
        assert name in out
    assert "360.67" in out
    assert all(len(line) <= 80 for line in out.splitlines()), "fits a plain terminal"


def test_show_tells_presets_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--preset", "depth-attention-360m", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["parameters"]["total"] == 360_672_192
    assert DecoderConfig.from_dict(page["configuration"]) == preset("depth-attention-360m")
    assert main(["show", "--preset", "all", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(PRESETS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show"], "--preset NAME"),
        (["show", "attnres", "--preset", "all"], "--preset NAME"),
        (["show", "--preset", "attnres-194"], "Did you mean 'attnres-194m'"),
    ],
)
def test_show_wants_one_thing(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_configuration_comes_back_from_json_as_it_was() -> None:
    config = DecoderConfig.from_depth(4, kv_mixer={"name": "depth_attention", "sources": (0, 1)}, mixer="mhc")
    assert DecoderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
