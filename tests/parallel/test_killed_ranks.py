"""A run whose ranks are killed, and restarted by torchrun, ends as one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from depthmix.training import TrainConfig, train
from depthmix.training.manifest import find_damage, list_checkpoints
from tests.parallel.test_pipeline import ROOT, free_port
from tests.runs import lines, steps_done, tiny_run

PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
CHILD = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
MARK = "DEPTHMIX_TEST_RUN"
TIMEOUT = 20  # seconds that a rank waits for another
PATIENCE = 60  # seconds for a start on a busy machine
LONG = {
    "run__precision": "float64",
    "run__checkpoint_every": 2,
    "run__validate_every": 0,
    "run__depth_every": 0,
    "run__snapshot_every": 0,
    "parallel__timeout": TIMEOUT,
}


@contextmanager
def torchrun(config: TrainConfig, processes: int, *options: str) -> Iterator[Any]:
    """`depthmix train` on several processes, marked with the run's folder; none of them outlives the block."""
    folder = config.run.folder
    Path(f"{folder}.toml").write_text(config.to_toml())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-port", str(free_port()), *options, "-m", "depthmix", "train", "--config", f"{folder}.toml"]
    with Path(f"{folder}.log").open("w") as output:
        process = subprocess.Popen(command, env={**CHILD, MARK: folder}, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=30)
        for pid in marked(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def marked(folder: object) -> dict[int, str | None]:
    """The living processes of a run, torchrun among them, each with its rank if it has one."""
    found: dict[int, str | None] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of somebody else, or it has ended meanwhile
            pairs = (entry.partition("=") for entry in (path / "environ").read_text().split("\0"))
            variables = {name: value for name, _, value in pairs}
            if variables.get(MARK) == str(folder):  # empty for a zombie
                found[int(path.name)] = variables.get("RANK")
    return found


def ranks_of(folder: Path) -> list[int]:
    return [pid for pid, rank in marked(folder).items() if rank is not None]


def wait_until(condition: Any, process: Any, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "torchrun has ended"
        assert time.monotonic() < end, f"nothing happened for {seconds} s"
        time.sleep(0.002)


def starts(folder: Path) -> int:
    """How often training has begun, from what rank 0 has said."""
    return Path(f"{folder}.log").read_text().count("estimated time: ")


def unfinished(folder: Path) -> bool:
    """Whether a checkpoint is being written or removed, or was."""
    return any((folder / "checkpoints").glob("*.part"))


def kill_ranks(layout: dict[str, Any], processes: int, kills: int, steps: int, folder: Path, **changes: Any) -> None:
    """Kill a random rank again and again: in training, while a checkpoint is written, and while the ranks start."""
    train(tiny_run(folder / "alone", run__steps=steps, **LONG, **changes))
    where, draw, interrupted, resumed = folder / "killed", random.Random(time.time_ns()), 0, 0
    changes |= {f"parallel__{name}": value for name, value in layout.items()}
    config = tiny_run(where, run__steps=steps, **LONG, **changes)
    with torchrun(config, processes, "--max-restarts", str(kills)) as process:
        for kill in range(kills):
            wait_until(lambda: len(ranks_of(where)) == processes, process)
            alive = ranks_of(where)
            if kill % 5 == 4:
                time.sleep(draw.random() * 2)
            else:
                wait_until(lambda before=resumed: starts(where) > before, process)
                target = steps_done(where) + draw.randint(1, 5)
                wait_until(lambda target=target: steps_done(where) >= target, process)
                time.sleep(draw.random() * 0.05)
            if kill % 5 in (1, 3):
                wait_until(lambda: unfinished(where), process)
            os.kill(draw.choice(alive), signal.SIGKILL)
            wait_until(lambda alive=alive: not {*alive} & {*ranks_of(where)}, process, TIMEOUT + 15)
            interrupted += unfinished(where)
            resumed = starts(where)
            assert not [*filter(None, map(find_damage, list_checkpoints(where / "checkpoints")))]
        process.wait(timeout=300)
        said = Path(f"{where}.log").read_text()
        assert process.returncode == 0, said[-3000:]
        assert not marked(where)
    assert interrupted or kills < 5, "no kill fell into the writing of a checkpoint"
    assert said.count("resuming after step") >= kills // 2
    assert "Traceback" not in said
    assert not unfinished(where)
    one, other = ({line["step"]: line["loss"] for line in lines(run, "train")} for run in (folder / "alone", where))
    assert [*other] == [*range(1, steps + 1)]
    assert other == pytest.approx(one, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "asynchronous"), [({"fsdp": 2}, True), ({"pp": 2, "virtual_stages": 2}, False)], ids=["fsdp", "pp"]
)
def test_a_run_whose_ranks_are_killed_twenty_times_ends_with_the_same_losses(
    layout: dict[str, Any], asynchronous: bool, tmp_path: Path
) -> None:
    kill_ranks(layout, 2, 20, 200, tmp_path, run__asynchronous=asynchronous)


def run_two(code: str, config: TrainConfig) -> list[tuple[int, str]]:
    """The exit codes of two ranks that nobody restarts or stops, and what they said; `code` runs before training."""
    toml = Path(f"{config.run.folder}.toml")
    toml.write_text(config.to_toml())
    program = f"{code}\nfrom depthmix.cli import main\nraise SystemExit(main(['train', '--config', {str(toml)!r}]))"
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = []
    for rank in ("0", "1"):
        environment = {**CHILD, **common, "RANK": rank, "LOCAL_RANK": rank}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen([sys.executable, "-c", program], env=environment, **output))
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=30)
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"fsdp": 2}, {"pp": 2}], ids=["fsdp", "pp"])
def test_a_checkpoint_of_another_model_stops_every_rank_with_the_same_error(
    layout: dict[str, int], tmp_path: Path
) -> None:
    changes = LONG | {"run__steps": 2} | {f"parallel__{name}": value for name, value in layout.items()}
    train(tiny_run(tmp_path / "other", **LONG, run__steps=2, model__hidden=32))
    config = tiny_run(tmp_path / "run", **changes)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(config.to_toml())
    (tmp_path / "other" / "checkpoints").rename(tmp_path / "run" / "checkpoints")
    results = run_two("", config)
    assert [code for code, _ in results] == [2, 2], results
    assert "belongs to another model: model|sublayers.1.down_proj.weight has shape [16, 32], expected" in results[0][1]
    assert "Traceback" not in results[0][1] + results[1][1]
    # So does a folder that belongs to another run.
    (tmp_path / "run" / "config.toml").write_text(tiny_run(tmp_path / "run", **changes | {"run__seed": 1}).to_toml())
    results = run_two("", config)
    assert [code for code, _ in results] == [2, 2], results
    assert "contains a run with another configuration" in results[0][1]


FAIL_ALONE = """
import os
from depthmix.training import loop
step = loop.step
def fail_on_one_rank(run):
    if run.progress.step == 3 and os.environ["RANK"] == "{rank}":
        raise RuntimeError("only here")
    step(run)
loop.step = fail_on_one_rank
"""


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", [{"fsdp": 2}, {"pp": 2, "virtual_stages": 2}], ids=["fsdp", "pp"])
def test_a_rank_that_fails_alone_ends_the_others(layout: dict[str, int], rank: int, tmp_path: Path) -> None:
    changes = {f"parallel__{name}": value for name, value in layout.items()}
    config = tiny_run(tmp_path / "run", **LONG, run__asynchronous=True, **changes)
    results = run_two(FAIL_ALONE.format(rank=rank), config)
    assert [code for code, _ in results] == [1, 1], results
    assert "RuntimeError: only here" in results[rank][1]
    assert "Traceback" not in results[1 - rank][1]
    if rank == 1:
        assert "depthmix: rank 0: lost contact with another rank" in results[0][1]
    assert [find_damage(path) for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == [None]


def test_what_torchrun_starts_again_resumes_even_if_the_command_says_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, begun = tiny_run(tmp_path / "run"), []
    train(config)
    (tmp_path / "run" / "result.json").unlink()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(config, resume=False, report=lambda event: begun.append((event["kind"], event["step"])))
    assert begun[0] == ("begin", 12)
