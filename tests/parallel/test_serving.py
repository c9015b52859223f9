"""Generation, evaluation and prefill on several processes give what one process gives, and a share of its memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import depthmix as dm
from depthmix.cli import main
from depthmix.parallel.serving import serving_layout
from tests.decoders import KIMI, tiny_config
from tests.parallel.test_pipeline import run_cases, run_ranks
from tests.runs import tiny_run

WORKER = "tests.parallel.serving_worker"
MOE = {"experts": 4, "active": 2, "hidden": 8, "shared": 1}
MODELS: list[dict[str, Any]] = [
    {"mixer": {"name": "block_attnres", "block_sublayers": 3}},
    {"mixer": "attnres", "kv_mixer": "depth_attention"},
    {"mixer": "mhc", "moe": MOE, "tie_embeddings": True},
    {"mixer": "block_attnres", "loop": {"first": 1, "last": 2, "repeats": 3}},
]

HYBRID = {**KIMI, "attention": ("kda", "mla", "gqa", "kda")}  # without tensor parallelism


def check_equal(cases: list[dict[str, Any]], ranks: int, folder: Path) -> None:
    for of_rank in run_cases(cases, ranks, folder, 600, WORKER):
        for case, found in zip(cases, of_rank, strict=True):
            assert found["logits"] < 1e-11, case
            assert found["loss"] < 1e-11, case
            assert all(found["answers"]), (case, found["answers"])


def test_two_processes_generate_and_score_as_one_does(tmp_path: Path) -> None:
    layouts = ({"tp": 2}, {"pp": 2})
    cases = [{"model": model, "layout": layout} for model in MODELS for layout in layouts]
    check_equal([*cases, {"model": HYBRID, "layout": {"pp": 2}, "memory": "48KB"}], 2, tmp_path)


@pytest.mark.full
def test_four_processes_generate_and_score_as_one_does(tmp_path: Path) -> None:
    layouts = ({"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 2})
    names = [{"mixer": name} for name in dm.list_mechanisms()]
    check_equal([{"model": model, "layout": layout} for model in (*MODELS, *names) for layout in layouts], 4, tmp_path)


@pytest.mark.full
def test_a_prefill_on_four_processes_holds_a_quarter_of_the_state_on_each(tmp_path: Path) -> None:
    """Blocks and what phase 1 makes of them are told apart. A sublayer's gathered input and its output before the
    reduce-scatter come on top, each for the tokens of one chunk."""
    tokens, chunk, dim = 512, 128, 64
    model = {"mixer": {"name": "block_attnres", "block_sublayers": 4}, "layers": 8, "dim": dim, "hidden": 128}
    case = {"model": model, "layout": {"tp": 4}, "tokens": tokens, "chunk": chunk}
    for (found,) in run_cases([case], 4, tmp_path, 600, WORKER):
        whole = found[f"alone {tokens}"]
        assert whole["blocks"] == 5 * tokens * dim * 4  # embedding, three blocks and the partial sum
        assert whole["derived"] > 0
        for length in (tokens, chunk):
            alone, together = found[f"alone {length}"], found[f"together {length}"]
            assert 4 * together["blocks"] == alone["blocks"]
            assert 4 * together["derived"] == alone["derived"]
            assert 4 * together["cache"] == alone["cache"]
            assert together["logits"] == pytest.approx(alone["logits"], abs=1e-4)
        assert found[f"together {chunk}"]["blocks"] == whole["blocks"] / 4 * chunk / tokens
        one_chunk = tokens * dim * 4
        assert found[f"together {tokens}"]["peak"] <= whole["peak"] / 4 + 2 * one_chunk


def test_generate_and_eval_under_torchrun_say_what_one_process_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from depthmix.training import train

    run = tiny_run(tmp_path / "run", depth=8, run__steps=2)
    train(run)
    folder = run.run.folder
    commands = {
        "generate": ["generate", folder, "--prompt", "depth", "-n", "6"],
        "eval": ["eval", folder, "--rows", "64"],
    }
    for verb, command in commands.items():
        capfd.readouterr()
        assert main(command) == 0
        alone = capfd.readouterr().out
        for flag in ("--tp", "--pp"):
            call = [sys.executable, "-m", "depthmix", *command, flag, "2"]
            logs = run_ranks([call] * 2, tmp_path, 300)
            assert alone.strip().splitlines()[0] in logs[0], (verb, flag)
            assert alone.strip() not in logs[1], "only the first process prints"


def test_layouts_that_cannot_serve_are_refused_with_what_would_work() -> None:
    config = dm.DecoderConfig(vocab_size=29, dim=16, layers=2, heads=4, hidden=24)
    for given, words in (
        ({"processes": 2}, r"tp=1 · pp=1 on 2 processes; expected 1 .* such as tp=2, or pp=2"),
        ({"processes": 3, "tp": 3}, r"parallel.tp=3 with model.heads=4; .*For this model: 1, 2, 4"),
        ({"processes": 8, "pp": 8}, r"8 stages for 4 sublayers; expected at most 4"),
    ):
        with pytest.raises(ValueError, match=words):
            serving_layout(config, **given)
    with pytest.raises(ValueError, match=r"parallel.tp=2 with model.attention 'kda' and 'mla'; expected tp=1"):
        serving_layout(tiny_config(**KIMI), processes=2, tp=2)
