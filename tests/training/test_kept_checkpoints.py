"""Which checkpoints remain, exactly: the newest `keep` up to the step that was written, and no other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.training import CheckpointError, checkpoint, train
from depthmix.training.checkpoint import load_latest, save
from depthmix.training.manifest import find_damage, list_checkpoints
from tests.runs import tiny_run, weights


def saved(folder: Path, *steps: int, **options: Any) -> list[str]:
    for step in steps:
        save(folder, step, {"w": torch.full((2,), float(step))}, **options)
    return kept(folder)


def kept(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("step-").lstrip("0") for path in folder.iterdir())


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 9])
def test_the_newest_so_many_remain(keep: int, tmp_path: Path) -> None:
    steps = [2, 3, 5, 8, 9]
    for count in range(1, 6):
        saved(tmp_path, steps[count - 1], keep=keep)
        assert kept(tmp_path) == [str(step) for step in steps[:count][-keep:]], "after every save, not only the last"
    found = load_latest(tmp_path)
    assert found is not None
    assert (found[0], found[1]["w"].tolist()) == (9, [9, 9])


def test_three_remain_where_nothing_is_said(tmp_path: Path) -> None:
    assert saved(tmp_path, 1, 2, 3, 4, 5) == ["3", "4", "5"]


def test_a_lower_number_removes_all_that_are_too_many_at_once(tmp_path: Path) -> None:
    assert saved(tmp_path, 1, 2, 3, 4, 5, keep=9) == ["1", "2", "3", "4", "5"]
    assert saved(tmp_path, 6, keep=2) == ["5", "6"]


def test_the_newest_is_the_one_of_the_highest_step_not_of_the_last_name(tmp_path: Path) -> None:
    """Names have eight digits, so from a hundred million steps on they no longer sort as numbers do."""
    steps = 99_999_998, 99_999_999, 100_000_000
    assert saved(tmp_path, *steps, keep=2) == ["100000000", "99999999"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-99999999", "step-100000000"]


def test_newer_ones_that_were_passed_over_go_and_do_not_count(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6, 9, 12, keep=9)
    for step in (9, 12):
        (tmp_path / f"step-{step:08d}" / "manifest.json").unlink()
    assert saved(tmp_path, 7, keep=2) == ["6", "7"]
    assert saved(tmp_path, 9, keep=3) == ["6", "7", "9"]
    assert all(find_damage(path) is None for path in list_checkpoints(tmp_path))


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6, keep=2)
    (tmp_path / "step-00000006" / "state.json").write_text("{")
    assert saved(tmp_path, 6, keep=2) == ["3", "6"]
    assert find_damage(tmp_path / "step-00000006") is None


def test_what_is_no_checkpoint_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-00000004").write_text("a file")
    (tmp_path / "notes").mkdir()
    saved(tmp_path, 2, 3, 5, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("notes", "step-00000003", "step-00000004", "step-00000005", "step-best")
    ]


def test_none_is_removed_before_the_new_one_is_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 3, 6, keep=2)

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "finalize", full)
    with pytest.raises(CheckpointError, match=r"step 9 .*Unchanged in .*step-00000003, step-00000006"):
        saved(tmp_path, 9, keep=1)
    assert kept(tmp_path) == ["3", "6"]


@pytest.mark.parametrize(("keep", "asynchronous", "remain"), [(1, False, ["12"]), (2, True, ["10", "12"])])
def test_a_run_keeps_as_many_as_its_configuration_says(
    keep: int, asynchronous: bool, remain: list[str], tmp_path: Path
) -> None:
    train(tiny_run(tmp_path / "run", run__keep=keep, run__checkpoint_every=5, run__asynchronous=asynchronous))
    assert kept(tmp_path / "run" / "checkpoints") == remain


def test_a_run_that_fell_back_removes_what_it_passed_over_with_its_next_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    train(tiny_run(tmp_path / "run"))
    expected = weights(tmp_path / "run")
    assert kept(folder) == ["12", "4", "8"]
    shutil.rmtree(tmp_path / "run" / "final")
    (tmp_path / "run" / "result.json").unlink()
    for step in ("08", "12"):
        (folder / f"step-000000{step}" / "state.json").write_text("{}")
    seen: list[list[str]] = []

    def report(event: Any) -> None:
        if event["kind"] == "checkpoint":
            seen.append(kept(folder))

    train(tiny_run(tmp_path / "run", run__checkpoint_every=3), report=report)
    assert seen == [["4", "6"], ["4", "6", "9"], ["12", "6", "9"]]
    assert weights(tmp_path / "run") == expected
