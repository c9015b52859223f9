"""Presets as whole training configurations, cell by cell against the papers' tables, and the rule read off one."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from depthmix.cli import main
from depthmix.models import PRESETS, count_parameters, preset
from depthmix.training import TrainConfig, preset_config, rule_config
from depthmix.training.recipes import BATCH, MOST_RATE, RATE, RECIPES, TABLE, TOKENS_PER_PARAMETER

# arXiv 2603.15031, Table 2: active parameters, tokens, layers, heads, width, an expert's width, rate, rows of a batch
TABLE_2 = {
    "attnres-194m": (194e6, 38.7e9, 12, 12, 896, 400, 2.99e-3, 192),
    "attnres-241m": (241e6, 45.4e9, 13, 13, 960, 432, 2.80e-3, 256),
    "attnres-296m": (296e6, 62.1e9, 14, 14, 1024, 464, 2.50e-3, 320),
    "attnres-436m": (436e6, 87.9e9, 16, 16, 1168, 528, 2.20e-3, 384),
    "attnres-528m": (528e6, 119.0e9, 17, 17, 1264, 560, 2.02e-3, 432),
}
# arXiv 2606.05014: width, MLP, layers, query and key-value heads, stride, initial deviation, rate
DEPTH_ATTENTION = {
    "depth-attention-360m": (960, 2540, 24, 15, 15, 12, 0.02, 1.5e-3),
    "depth-attention-500m": (1152, 3072, 24, 18, 18, 12, 0.02, 1e-3),
    "depth-attention-500m-x3": (1152, 3072, 24, 18, 18, 12, 0.02, 1e-3),
    "depth-attention-710m": (1280, 3072, 32, 20, 20, 16, 0.02, 1e-3),
    "depth-attention-1.5b": (1536, 4096, 48, 24, 6, 24, 0.01, 1e-3),
    "depth-attention-3b": (2048, 6912, 48, 32, 8, 24, 0.01, 1e-3),
}


def printed(capsys: pytest.CaptureFixture[str], *given: object) -> TrainConfig:
    """What `--print-config` resolves."""
    assert main(["train", "--print-config", *map(str, given)]) == 0
    return TrainConfig.from_toml(capsys.readouterr().out)


@pytest.mark.parametrize("name", TABLE_2)
def test_an_attnres_preset_trains_as_its_row_of_table_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parameters, tokens, layers, heads, dim, hidden, lr, rows = TABLE_2[name]
    config = printed(capsys, "--preset", name)
    assert config == preset_config(name)
    model = config.model
    assert model == preset(name)
    assert model.moe is not None
    assert (model.layers, model.heads, model.dim, model.moe.hidden) == (layers, heads, dim, hidden)
    assert model.mixer.to_dict() == {"name": "block_attnres", "num_blocks": 8}
    assert (config.run.accumulate * config.data.rows, config.data.tokens_per_row) == (rows, 8192)
    assert config.run.steps * config.tokens_per_step == pytest.approx(tokens, rel=1e-4)
    assert (config.optimizer.lr, config.schedule.kind) == (lr, "cosine")
    assert (RECIPES[name].parameters, RECIPES[name].tokens) == (parameters, tokens)


@pytest.mark.parametrize("name", DEPTH_ATTENTION)
def test_a_depth_attention_preset_trains_as_its_paper(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    dim, hidden, layers, heads, kv_heads, stride, deviation, lr = DEPTH_ATTENTION[name]
    config = printed(capsys, "--preset", name)
    model, optimizer, schedule = config.model, config.optimizer, config.schedule
    assert (model.dim, model.hidden, model.layers, model.heads, model.kv_heads) == (
        dim,
        hidden,
        layers,
        heads,
        kv_heads,
    )
    mixing = model.saved()["kv_mixer"]
    assert (mixing["name"], mixing["stride"]) == ("depth_attention", stride)
    assert (model.init_std, model.vocab_size) == (deviation, 50304)
    assert (config.run.accumulate * config.data.rows, config.data.tokens_per_row) == (1024, 2048)
    assert (config.run.steps, config.run.precision) == (15_625, "bfloat16")
    assert (optimizer.name, optimizer.lr, optimizer.betas) == ("adamw", lr, (0.9, 0.95))
    assert (optimizer.weight_decay, optimizer.clip) == (0.1, 1)
    assert (schedule.kind, schedule.warmup, schedule.final) == ("cosine", 0.02, 0.1)


def test_the_numbers_of_a_preset_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--preset", "attnres-194m", "--print-config"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    for words in ("193,608,300 active", "3.87e+10 tokens (200 per", "24,605 steps of 192 × 8192", "rate 0.00299"):
        assert words in first


def test_a_preset_takes_what_the_dial_takes(capsys: pytest.CaptureFixture[str]) -> None:
    plain = printed(capsys, "--preset", "attnres-194m", "--mixer", "residual")
    assert plain.model.mixer.name == "residual"
    assert plain.run.folder == "runs/attnres-194m-residual"
    assert plain.run.steps == preset_config("attnres-194m").run.steps
    both = printed(capsys, "--preset", "depth-attention-360m", "--mixer", "attnres", "--folder", "runs/x")
    assert (both.model.mixer.name, both.model.kv_mixer, both.run.folder) == ("attnres", None, "runs/x")
    changed = printed(
        capsys, "--preset", "attnres-194m", "--set", "mixer.block_sublayers=6", "--set", "data.rows=32", "--seed", "3",
        "--tokenizer", "bpe:4096", "--data", "notes.txt",
    )  # fmt: skip
    assert changed.model.mixer.options == {"block_sublayers": 6}
    assert (changed.run.seed, changed.data.source, changed.model.vocab_size) == (3, "notes.txt", 4096)
    assert changed.run.steps * changed.tokens_per_step == pytest.approx(38.7e9, rel=1e-4), "the tokens stay"
    short = printed(capsys, "--preset", "attnres-194m", "--tokens", "1e9")
    assert short.run.steps == round(1e9 / (192 * 8192))
    assert printed(capsys, "--preset", "attnres-194m", "--steps", "7").run.steps == 7


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--preset", "attnres-194m", "--depth", "24"], "depth=24 and preset=attnres-194m; expected only one of them"),
        (["--preset", "attnres-194m", "--dim", "64"], "or --preset attnres for other sizes"),
        (
            ["--preset", "attnres-194m", "--config", "x.toml"],
            "preset=attnres-194m and config=x.toml; expected only one",
        ),
        (["--preset", "attnres", "--config", "x.toml"], "preset=attnres and config=x.toml; expected only one"),
        (["--depth", "24", "--config", "x.toml"], "depth=24 and config=x.toml; expected only one of them"),
        (["--preset", "atnres-194m"], "no recipe for preset 'atnres-194m'. Did you mean 'attnres-194m'?"),
        (["--preset", "attnres", "--depth", "7"], "depth=7; expected an even number"),
        (["--preset", "attnres-194m", "--mixer", "blok_attnres"], "Did you mean 'block_attnres'"),
    ],
)
def test_preset_dial_and_file_exclude_each_other(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--print-config", *given]) == 2
    assert words in capsys.readouterr().err


def test_every_preset_of_the_papers_has_a_recipe_and_no_recipe_is_without_a_shape() -> None:
    assert set(TABLE_2) == set(TABLE)
    gqa = {f"{name}-gqa" for name in TABLE_2}
    kimi = {"kimi-linear-48b", "kimi-linear-tiny"}
    assert set(TABLE_2) | gqa | set(DEPTH_ATTENTION) | kimi == set(RECIPES) == set(PRESETS)


@pytest.mark.parametrize("name", TABLE_2)
def test_the_grouped_query_models_of_the_table_train_like_the_others(name: str) -> None:
    """Only shape and folder differ."""
    ours, other = preset_config(name), preset_config(f"{name}-gqa")
    assert other.model == preset(f"{name}-gqa") != ours.model
    run = dataclasses.replace(other.run, folder=ours.run.folder)
    assert dataclasses.replace(other, model=ours.model, run=run) == ours


def plain_fit(xs: list[float], ys: list[float]) -> tuple[float, float, float]:
    """Factor, exponent and largest relative residual of a least-squares line in logarithms."""
    u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    slope = sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True)) / sum((a - mean_u) ** 2 for a in u)
    factor = math.exp(mean_v - slope * mean_u)
    return factor, slope, max(abs(y / (factor * x**slope) - 1) for x, y in zip(xs, ys, strict=True))


def test_the_rule_is_the_one_that_the_documentation_gives() -> None:
    rows = [*TABLE_2.values()]
    factor, exponent, residual = plain_fit([r[0] for r in rows], [r[6] for r in rows])
    assert (factor, exponent) == pytest.approx(RATE, rel=1e-9)
    assert (round(factor, 2), round(exponent, 3), round(residual, 3)) == (5.45, -0.393, 0.017)
    factor, exponent, residual = plain_fit([r[1] for r in rows], [r[7] * 8192.0 for r in rows])
    assert (factor, exponent) == pytest.approx(BATCH, rel=1e-9)
    assert (round(factor, 3), round(exponent, 3), round(residual, 3)) == (0.117, 0.678, 0.105)
    ratios = [r[1] / r[0] for r in rows]
    assert (round(min(ratios)), round(max(ratios))) == (188, 225)
    assert round(math.prod(ratios) ** 0.2, 1) == round(TOKENS_PER_PARAMETER, 1) == 204.6


@pytest.mark.parametrize("name", TABLE_2)
def test_the_rule_at_a_size_of_the_table_is_near_its_row(name: str) -> None:
    """Our count of active parameters is up to 6 % below the table's names, which moves tokens and batch as much."""
    _, tokens, layers, heads, dim, hidden, lr, rows = TABLE_2[name]
    config = rule_config(2 * layers)
    assert config.model.moe is not None
    assert config.model.heads == heads
    assert config.model.dim == pytest.approx(dim, rel=0.02)
    assert config.model.moe.hidden == pytest.approx(hidden, rel=0.02)
    assert config.optimizer.lr == pytest.approx(lr, rel=0.04)
    assert config.run.steps * config.tokens_per_step == pytest.approx(tokens, rel=0.14)
    assert config.data.tokens_per_row == 8192
    assert config.run.accumulate * config.data.rows == pytest.approx(rows, rel=0.11)


@pytest.mark.parametrize("depth", [2, 4, 8, 12, 48])
@pytest.mark.parametrize("more", [{}, {"tokens": 1e6}, {"tokens": 3e5, "dim": 64}])
def test_the_rule_goes_down_to_small_sizes(depth: int, more: dict[str, Any]) -> None:
    config = rule_config(depth, **more)
    parameters = count_parameters(config.model).active_without_embeddings
    tokens = more.get("tokens", TOKENS_PER_PARAMETER * parameters)
    assert config.run.steps * config.tokens_per_step == pytest.approx(tokens, rel=0.01)
    assert config.tokens_per_step == pytest.approx(BATCH(tokens), rel=0.2)
    assert config.data.tokens_per_row in (128, 256, 512, 1024, 2048, 4096, 8192)
    assert config.optimizer.lr == pytest.approx(min(RATE(parameters), MOST_RATE), rel=0.01)
    assert config.model.mixer.options["num_blocks"] == min(8, depth)
    assert config.model.vocab_size == 256


def test_the_command_line_gives_the_rule_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--preset", "attnres", "--depth", 4, "--dim", 48, "--tokens", 1e6)
    assert printed(capsys, *given) == rule_config(4, 48, tokens=1e6)
    other = printed(capsys, *given, "--mixer", "residual", "--set", "model.vocab_size=300", "--set", "model.moe=none")
    assert (other.model.mixer.name, other.model.vocab_size, other.model.moe) == ("residual", 300, None)
    assert main(["train", "--print-config", *map(str, given)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "learning rate 0.00299, the table's largest (its law would give 0.0" in first


def test_the_rule_trains_and_says_its_numbers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("what a layer reads from the layers below it " * 200)
    where = ["--data", str(tmp_path / "text.txt"), "--set", f"data.folder={tmp_path / 'tokens'}"]
    small = ["--preset", "attnres", "--depth", "2", "--dim", "16", "--tokens", "2000", "--set", "model.head_dim=8"]
    assert main(["train", *small, *where, "--folder", str(tmp_path / "run")]) == 0
    captured = capfd.readouterr()
    assert "active parameters without embeddings" in captured.err
    assert "validation loss" in captured.out
