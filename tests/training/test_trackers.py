"""Trackers: named where they are not installed, and a resumed run continues what it began."""

from __future__ import annotations

import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from depthmix.training import RunConfig, loop, train
from depthmix.training.metrics import TRACKERS
from tests.runs import lines, tiny_run


def test_every_tracker_of_the_configuration_can_be_made() -> None:
    assert set(typing.get_args(typing.get_type_hints(RunConfig)["tracker"])) == set(TRACKERS)


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    message = rf"run\.tracker='{name}' needs the package {name}: pip install 'depthmix\[{name}\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        train(tiny_run(tmp_path / "run", run__tracker=name))


def crash_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = loop.step

    def crashing(run: Any) -> None:
        inner(run)
        if run.progress.step == step:
            raise RuntimeError("the machine is gone")

    monkeypatch.setattr(loop, "step", crashing)


def records(data: bytes) -> Iterator[bytes]:
    """Of wandb's file: a header of 7 bytes, then LevelDB's log format, which cuts records at blocks of 32 KiB."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + length > len(data):  # still being written
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def recorded(folder: Path, expected: list[int]) -> list[tuple[str, dict[int, set[str]]]]:
    """`read_back`, when there are so many steps of each start, or after some seconds: wandb's own process writes."""
    end = time.monotonic() + 20
    found = read_back(folder)
    while [len(steps) for _, steps in found] != expected and time.monotonic() < end:
        time.sleep(0.1)
        found = read_back(folder)
    return found


def read_back(folder: Path) -> list[tuple[str, dict[int, set[str]]]]:
    """Of each start, oldest first: the id of its wandb run, and by step the names that were logged."""
    from wandb.proto.wandb_internal_pb2 import Record

    starts = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        name, steps = "", {}
        for record in map(Record.FromString, records(file.read_bytes())):
            if record.WhichOneof("record_type") == "run":
                name = record.run.run_id
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key) for item in record.history.item}
                steps[record.history.step.num] = items
        starts.append((name, steps))
    return starts


def test_a_resumed_run_continues_its_wandb_run_and_no_step_comes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="pip install 'depthmix[wandb]'")
    for name, value in (("MODE", "offline"), ("ERROR_REPORTING", "false"), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = tmp_path / "run"
    config = tiny_run(run, run__tracker="wandb", run__steps=8, run__checkpoint_every=3)
    with monkeypatch.context() as patch:
        crash_after(5, patch)
        with pytest.raises(RuntimeError, match="the machine is gone"):
            train(config)
    ((_, steps),) = recorded(run, [5])
    assert [*steps] == [1, 2, 3, 4, 5], "beyond the checkpoint of step 3"
    train(config)
    (first, early), (second, late) = recorded(run, [5, 3])
    assert first == second == (run / "wandb" / "run_id").read_text()
    assert [*early, *late] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {"train/loss", "validation/loss", "validation/bits_per_byte"} <= late[6]
    assert "validation/loss" not in late[7]
    assert len(lines(run, "train")) == 8, "the run's own file has every step too"
    train(config, resume=False)
    assert (run / "wandb" / "run_id").read_text() != first, "a restart is another run"
