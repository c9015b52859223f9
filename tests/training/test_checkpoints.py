"""A run that is killed, cut or short of disk ends as one that was left alone."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.cli import main
from depthmix.support.files import digest
from depthmix.training import CheckpointError, checkpoint, train
from depthmix.training.checkpoint import load_latest, save
from depthmix.training.manifest import find_damage, list_checkpoints
from tests.runs import CHILD, lines, start, steps_done, tiny_run, weights

LONG = {"run__steps": 60, "run__checkpoint_every": 3, "run__validate_every": 25, "run__depth_every": 20}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(tiny_run(folder, **LONG))
    return folder


def same_as(alone: Path, folder: Path) -> None:
    assert weights(folder) == weights(alone)
    for kind, fields in (("train", ("step", "loss", "lr", "grad_norm")), ("validation", ("step", "loss"))):
        mine, other = ([[line[f] for f in fields] for line in lines(where, kind)] for where in (folder, alone))
        assert mine == other
    assert [line["step"] for line in lines(folder, "train")] == [*range(1, 61)]


def test_a_run_killed_ten_times_at_random_moments_ends_with_the_same_bits(alone: Path, tmp_path: Path) -> None:
    folder, draw, kills = tmp_path / "run", random.Random(time.time_ns()), 0
    config = tiny_run(folder, **LONG)
    while kills < 10:
        before = steps_done(folder)
        process = start(config)
        target = before + draw.randint(1, 5)
        while process.is_alive() and steps_done(folder) < target and process.exitcode is None:
            time.sleep(0.002)
            if steps_done(folder) < before:  # a restart drops lines beyond its checkpoint
                before = steps_done(folder)
        time.sleep(draw.random() * 0.02)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    process = start(config)
    process.join()
    assert process.exitcode == 0
    same_as(alone, folder)


def test_a_run_killed_while_it_writes_checkpoints_ends_with_the_same_bits(alone: Path, tmp_path: Path) -> None:
    folder, caught = tmp_path / "run", 0
    config = tiny_run(folder, **LONG)
    for _ in range(12):
        process = start(config)
        begun = steps_done(folder)
        while process.is_alive():
            if steps_done(folder) >= begun + 1 and any(checkpoint_parts(folder)):
                break
        process.kill()
        process.join()
        caught += any(checkpoint_parts(folder))
        if caught == 3:
            break
    assert caught >= 1, "no kill fell into the writing of a checkpoint"
    process = start(config)
    process.join()
    same_as(alone, folder)
    assert not any(checkpoint_parts(folder))


def checkpoint_parts(folder: Path) -> list[Path]:
    return [*(folder / "checkpoints").glob("*.part")]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink], ids=["truncated", "altered", "missing"])
@pytest.mark.parametrize("which", ["shard-00001-model-00001-of-00001.safetensors", "state.json", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_message(
    harm: Any, which: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run(tmp_path / "run")
    train(config)
    expected = weights(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    (tmp_path / "run" / "result.json").unlink()
    *_, before, newest = list_checkpoints(tmp_path / "run" / "checkpoints")
    harm(newest / which)
    train(config)
    assert weights(tmp_path / "run") == expected
    said = capfd.readouterr().err
    assert str(newest / which) in said
    assert f"Falling back to {before.name}\n" in said
    assert find_damage(newest) is None, "written anew"


def test_where_all_checkpoints_are_damaged_a_run_begins_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tiny_run(tmp_path / "run")
    train(config)
    expected = weights(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    for each in list_checkpoints(tmp_path / "run" / "checkpoints"):
        (each / "manifest.json").write_text("{}")
    train(config)
    assert weights(tmp_path / "run") == expected
    assert "No intact checkpoint remains; training restarts from step 0" in capfd.readouterr().err


def test_a_checkpoint_of_another_version_is_an_error_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newer version's work is no damage: falling back would end in its removal."""
    train(tiny_run(tmp_path / "run"))
    (tmp_path / "run" / "result.json").unlink()
    there = list_checkpoints(tmp_path / "run" / "checkpoints")
    manifest = there[-1] / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    assert main(["train", "--folder", str(tmp_path / "run")]) == 2
    assert f"{there[-1]} has format 2; this version of depthmix reads 1" in capsys.readouterr().err
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == there


def test_beginning_anew_removes_a_run_and_nothing_else(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", run__steps=1)
    for name in ("final", "checkpoints", "snapshots"):  # of somebody else
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "mine").touch()
    train(config, resume=False)
    assert all((tmp_path / "run" / name / "mine").exists() for name in ("final", "checkpoints", "snapshots"))
    (tmp_path / "run" / "notes.txt").touch()
    train(config, resume=False)
    assert (tmp_path / "run" / "notes.txt").exists()
    assert not (tmp_path / "run" / "checkpoints" / "mine").exists()
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [1]


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_a_pickle_in_a_checkpoint_is_never_opened(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    save(tmp_path / "c", 1, {"model": {"w": torch.ones(3)}})
    save(tmp_path / "c", 2, {"model": {"w": torch.ones(3) * 2}})
    newest = list_checkpoints(tmp_path / "c")[-1]
    (newest / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    (newest / "extra.safetensors").write_bytes(pickle.dumps(Bomb(mark)))
    found = load_latest(tmp_path / "c")
    assert found is not None
    assert found[0] == 1, "a file that the manifest does not name is damage"
    # Even where the manifest names it.
    (newest / "extra.safetensors").unlink()
    manifest = json.loads((newest / "manifest.json").read_text())
    file = newest / ".metadata"
    manifest["files"][".metadata"] = {"bytes": file.stat().st_size, "sha256": digest(file)}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    found = load_latest(tmp_path / "c")
    assert found is not None
    assert found[0] == 2
    assert found[1]["model"]["w"].tolist() == [2, 2, 2]
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb works"


def test_the_state_comes_back_as_it_was(tmp_path: Path) -> None:
    x = torch.arange(6).reshape(2, 3)
    state = {
        "model": {"a.b": x.float().T, "half": torch.randn(3).bfloat16()},
        "optimizer": {"a.b/step": torch.tensor(3.0)},
        "data": {"epoch": 1, "list": [1.5, None, "x"]},
    }
    save(tmp_path, 12, state)
    found = load_latest(tmp_path)
    assert found is not None
    assert found[0] == 12
    assert found[1]["data"] == state["data"]
    for part in ("model", "optimizer"):
        for name, tensor in state[part].items():
            assert torch.equal(found[1][part][name], tensor)
            assert found[1][part][name].dtype == tensor.dtype


def test_the_last_k_are_kept_and_older_ones_go_after_the_new_one_is_there(tmp_path: Path) -> None:
    (tmp_path / "step-00000002.part").mkdir()  # of a save that was killed
    for step in (3, 6, 9, 12):
        save(tmp_path, step, {"w": torch.ones(2)}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000012"]


def test_a_checkpoint_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1, {"model": {"w": torch.ones(2)}})
    with pytest.raises(ValueError, match=r"another model: model\|w has shape \[2\], expected \[3\]"):
        load_latest(tmp_path, {"model": {"w": torch.ones(3)}})


def test_an_asynchronous_checkpoint_has_the_bits_of_its_step(tmp_path: Path) -> None:
    w = torch.randn(200_000)
    expected = w.clone()
    future = save(tmp_path, 1, {"w": w}, asynchronous=True)
    assert future is not None
    w.zero_()
    settle(future)
    found = load_latest(tmp_path)
    assert found is not None
    assert torch.equal(found[1]["w"], expected)


def test_asynchronous_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    train(tiny_run(tmp_path / "sync"))
    train(tiny_run(tmp_path / "async", run__asynchronous=True))
    assert weights(tmp_path / "sync") == weights(tmp_path / "async")
    for a, b in zip(*(list_checkpoints(tmp_path / n / "checkpoints") for n in ("sync", "async")), strict=True):
        one, two = (checkpoint.flatten(checkpoint.read(path, None))[0] for path in (a, b))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


@contextlib.contextmanager
def small_files(size: int) -> Any:
    """Writes beyond `size` bytes of a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def settle(future: Any) -> None:
    if future is not None:
        future.result()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_ones_intact(asynchronous: bool, tmp_path: Path) -> None:
    save(tmp_path, 1, {"w": torch.ones(2)})
    with small_files(4096), pytest.raises(CheckpointError, match=r"step 2 could not .*File too large.*step-00000001"):
        settle(save(tmp_path, 2, {"w": torch.ones(5000)}, asynchronous=asynchronous))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert find_damage(list_checkpoints(tmp_path)[0]) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_stops_the_run_with_a_message_and_room_lets_it_go_on(small_disk: Path, tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", run__keep=9, run__steps=40)
    train(config)
    expected = weights(tmp_path / "run")
    toml = tmp_path / "c.toml"
    toml.write_text(config.to_toml())
    command = [sys.executable, "-m", "depthmix", "train", "--config", str(toml), "--folder", str(small_disk / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=CHILD)
    assert done.returncode == 1, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    there = list_checkpoints(small_disk / "run" / "checkpoints")
    assert there
    assert all(find_damage(path) is None for path in there)
    assert not checkpoint_parts(small_disk / "run")
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=CHILD)
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {there[-1].name[-2:].lstrip('0')}" in done.stderr
    assert weights(small_disk / "run") == expected


def test_ctrl_c_makes_a_checkpoint_and_says_how_to_go_on(alone: Path, tmp_path: Path) -> None:
    """The command line keeps freed memory, and `alone` did not: that must not show in the weights either."""
    config = tiny_run(tmp_path / "run", **{**LONG, "run__checkpoint_every": 0})
    toml = tmp_path / "c.toml"
    toml.write_text(config.to_toml())
    command = [sys.executable, "-m", "depthmix", "train", "--config", str(toml)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=CHILD)
    while steps_done(tmp_path / "run") < 5:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    time.sleep(0.005)
    process.send_signal(signal.SIGINT)  # as torchrun does for what the terminal has sent already
    said = process.communicate()[1]
    assert process.returncode == 130
    assert f"To resume: depthmix train --folder {tmp_path / 'run'}" in said
    assert len(list_checkpoints(tmp_path / "run" / "checkpoints")) == 1
    command = [sys.executable, "-m", "depthmix", "train", "--folder", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=CHILD)
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in done.stderr
    same_as(alone, tmp_path / "run")
