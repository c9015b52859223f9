"""A checkpoint is the same whatever layout of processes wrote it, and every layout resumes from it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.cli import main
from depthmix.training import TrainConfig, checkpoint, override, train
from depthmix.training.build import layout_of, open_run
from depthmix.training.checkpoint import load_latest
from depthmix.training.loop import begin
from depthmix.training.manifest import list_checkpoints, step_of
from depthmix.training.resume import state_tensors
from tests.parallel.test_killed_ranks import marked, ranks_of, torchrun, wait_until
from tests.parallel.test_pipeline import run_ranks
from tests.runs import lines, steps_done, tiny_run

TIED = {"model__tie_embeddings": True}
MOE = {"model__moe": {"experts": 4, "active": 2, "shared": 1, "hidden": 16}}
LOOP = {"model__loop": {"first": 1, "last": 2, "repeats": 2}}
QUIET = {"run__depth_every": 0, "run__snapshot_every": 0}


def with_layout(config: TrainConfig, layout: dict[str, Any]) -> TrainConfig:
    for name, value in layout.items():
        config = override(config, f"parallel.{name}", value)
    return config


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = load_latest(folder)
    assert found is not None
    return checkpoint.flatten(found[1])[0]


def same_after(layouts: list[dict[str, Any]], ranks: int, folder: Path, kinds: list[dict[str, Any]]) -> None:
    """Every layout writes the initial state of one process, and the state that one process had after some steps."""
    cases, expected = [], []
    for k, kind in enumerate(kinds):
        config = tiny_run(folder / f"{k}", run__steps=3, run__validate_every=0, **QUIET, **kind)
        train(config)
        (folder / f"{k}" / "result.json").unlink()
        initial = override(config, "run.folder", str(folder / f"{k}-initial"))
        starts = [(config, folder / f"{k}" / "checkpoints"), (initial, folder / f"{k}-one")]
        (folder / f"{k}-initial").mkdir()
        write_alone(initial, folder / f"{k}-one")
        for n, layout in enumerate(layouts):
            for start, reference in starts:
                target = folder / f"{k}-{n}-{reference.name}"
                cases.append((with_layout(start, layout).to_toml(), str(target), n % 2 == 0))
                expected.append((f"{kind} {layout} {reference.name}", reference, target))
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks([[sys.executable, "-m", "tests.parallel.checkpoint_worker", str(folder)]] * ranks, folder, 300)
    for name, reference, target in expected:
        one, other = tensors_of(reference), tensors_of(target)
        assert one.keys() == other.keys(), name
        for key, tensor in one.items():
            assert torch.equal(tensor, other[key]), f"{name}: {key}"
            assert tensor.dtype == other[key].dtype, f"{name}: {key}"


def write_alone(config: TrainConfig, target: Path) -> None:
    run = begin(config, layout_of(config), torch.device("cpu"), lambda event: None)
    checkpoint.save(target, 0, state_tensors(run))
    run.close()


ON_TWO: list[dict[str, Any]] = [{}, {"replicate": 2}, {"tp": 2}, {"pp": 2}, {"pp": 2, "virtual_stages": 2}]
ON_FOUR: list[dict[str, Any]] = [
    {},
    {"replicate": 2},
    {"tp": 2},
    {"replicate": 2, "tp": 2},
    {"tp": 2, "pp": 2},
    {"pp": 2, "fsdp": 2},
    {"pp": 2, "replicate": 2},
]


KINDS: list[dict[str, Any]] = [{"run__precision": "float64"}, LOOP | MOE | {"optimizer__name": "adamw"}]


@pytest.mark.full
def test_two_ranks_write_and_load_the_bits_of_one_process(tmp_path: Path) -> None:
    same_after(ON_TWO, 2, tmp_path, KINDS)


@pytest.mark.full
def test_four_ranks_write_and_load_the_bits_of_one_process(tmp_path: Path) -> None:
    same_after(ON_FOUR, 4, tmp_path, KINDS)


def follow(config: TrainConfig, ranks: int, layout: dict[str, Any], stop: tuple[int, int] | None) -> None:
    """Train on some layout; to the end, or until `stop`: a signal to torchrun or, if it kills, to
    the ranks; and the step after which it is sent."""
    folder = Path(config.run.folder)
    with torchrun(with_layout(config, layout), ranks) as process:
        if stop is not None:
            number, step = stop
            wait_until(lambda: steps_done(folder) >= step, process)
            for pid in ranks_of(folder) if number == signal.SIGKILL else [process.pid]:
                os.kill(pid, number)
        code = process.wait(timeout=120)
        said = Path(f"{folder}.log").read_text()
        assert (code == 0) == (stop is None), said[-3000:]
        assert not marked(folder)


@pytest.mark.full
@pytest.mark.parametrize("kind", [TIED | {"optimizer__name": "muon"}, MOE | {"optimizer__name": "adamw"}])
def test_a_run_that_moves_between_layouts_follows_the_curve_of_one_process(
    kind: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"run__steps": 60, "run__checkpoint_every": 4, "run__validate_every": 20, "run__precision": "float64"}
    train(tiny_run(tmp_path / "alone", **QUIET, **steps, **kind))
    folder = tmp_path / "moved"
    config = tiny_run(folder, **QUIET, **steps, **kind)
    follow(config, 4, {"fsdp": 2, "tp": 2}, (signal.SIGTERM, 10))
    follow(config, 2, {"pp": 2, "virtual_stages": 2}, (signal.SIGINT, 22))
    # One process reads what a pipeline wrote.
    done = list_checkpoints(folder / "checkpoints")[-1]
    opened = open_run(folder, "cpu")
    assert opened.step == step_of(done) >= 22
    assert main(["eval", str(folder)]) == 0
    assert main(["generate", str(folder), "--prompt", "depth", "-n", "4"]) == 0
    assert capsys.readouterr().err.count(f"unfinished: using its checkpoint of step {opened.step}\n") == 2
    follow(config, 1, {}, (signal.SIGKILL, 40))
    follow(config, 4, {"tp": 2, "pp": 2}, None)
    for kind_of_line in ("train", "validation"):
        one, moved = (
            {line["step"]: line["loss"] for line in lines(run, kind_of_line)} for run in (tmp_path / "alone", folder)
        )
        assert moved == pytest.approx(one, rel=1e-6)
    assert [line["step"] for line in lines(folder, "train")] == [*range(1, 61)]
