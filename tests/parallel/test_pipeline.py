"""Pipelines in real processes give the gradients of one process and send what their plan says, byte for byte.

Processes are started once for each number of ranks and run all cases of it; a test reports every case that is wrong.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import depthmix as dm
from depthmix.mechanisms import kv_mechanism

ROOT = Path(__file__).parent.parent.parent
SINGLE, MULTI = ("GPipe", "1F1B"), ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
TOLERANCE = 1e-11


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_ranks(commands: list[list[str]], folder: Path, seconds: float) -> list[str]:
    """Start a process for each rank, wait for all of them, and return what they printed."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(commands))}
    common |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    logs, processes = [], []
    for rank, command in enumerate(commands):
        logs.append(folder / f"{rank}.log")
        environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}  # as torchrun sets them
        with logs[-1].open("wb") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    end = time.monotonic() + seconds
    try:
        for process in processes:
            process.wait(timeout=max(0.1, end - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=30)
    for process, log in zip(processes, logs, strict=True):
        assert process.returncode == 0, log.read_text()[-3000:]
    return [log.read_text() for log in logs]


def run_cases(
    cases: list[dict[str, Any]], ranks: int, folder: Path, seconds: float, worker: str = "tests.parallel.worker"
) -> list[list[dict[str, Any]]]:
    """The results of each rank, in the order of the cases."""
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks([[sys.executable, "-m", worker, str(folder)]] * ranks, folder, seconds)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def case(mechanism: str, **settings: Any) -> dict[str, Any]:
    options = dict(dm.mechanism(mechanism).variants[0])
    base = {"mechanism": mechanism, "options": options, "depth": 9, "virtual": 2, "cache": True}
    return base | {"schedule": "Interleaved1F1B", "microbatches": 4} | settings


def mistakes(case: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a case, from the results of all ranks."""
    found = []
    difference, name = max(result["difference"] for result in results)
    if not difference <= TOLERANCE:
        found.append(f"gradient of {name} differs by {difference:.1e}")
    losses = [loss for result in results for loss in result["loss"]]
    if len(losses) != 2 or not max(losses) <= TOLERANCE:
        found.append(f"losses differ by {losses}")
    if sorted(n for result in results for n in result["names"]) != results[0]["all_names"]:
        found.append("stages do not hold every parameter once")
    if not all(result["same_names"] for result in results):
        found.append("names of stages are not those of the network")
    runs = 2 * 2 * case["microbatches"]  # two steps, two directions
    for unit in ("tensors", "bytes"):
        sent, planned = sum(r["sent"].get(unit, 0) for r in results), runs * results[0]["planned"][unit]
        if sent != planned:
            found.append(f"{sent} {unit} sent, {planned} planned")
    if sum(result["own_count"] for result in results) != runs * results[0]["planned"]["bytes"]:
        found.append("sent_bytes is not what was sent")
    if any(result["left"] for result in results):
        found.append("the store is not empty after a step")
    if any(peak != planned for peak, planned in (result["stored"] for result in results)):
        found.append(f"stored, planned: {[result['stored'] for result in results]}")
    return found


def refuse_mistakes(
    cases: list[dict[str, Any]],
    results: list[list[dict[str, Any]]],
    find: Callable[[dict[str, Any], list[dict[str, Any]]], list[str]],
) -> None:
    """Fail with everything that `find` says of each case, from the results of all ranks."""
    wrong = {
        str(case): found
        for number, case in enumerate(cases)
        if "run" not in case and (found := find(case, [of_rank[number] for of_rank in results]))
    }
    assert not wrong, "\n".join(f"{name}: {'; '.join(found)}" for name, found in wrong.items())


def check(cases: list[dict[str, Any]], ranks: int, folder: Path, seconds: float = 1200) -> list[list[dict[str, Any]]]:
    results = run_cases(cases, ranks, folder, seconds)
    refuse_mistakes(cases, results, mistakes)
    return results


ON_TWO = [
    *(case(name, cache=cache) for name in dm.list_mechanisms() for cache in (True, False)),
    *(case(name, virtual=1, schedule="1F1B") for name in ("block_attnres", "mhc", "residual")),
    *(case("block_attnres", schedule=schedule, depth=8, options={"block_sublayers": 3}) for schedule in MULTI[1:]),
    case("block_attnres", virtual=1, schedule="GPipe"),
    case("attnres", schedule="InterleavedZeroBubble", virtual=3),  # tensors with two readers, whose gradients add up
    case("attnres", schedule="ZBVZeroBubble", placement="v"),
    case("block_attnres", kv="depth_attention", kv_options={"stride": 2}, options={"block_sublayers": 3}),
    case("block_attnres", recompute=True),
    case("block_attnres", shared=True, sizes=[1, 5, 1, 2]),
]


def test_two_ranks_give_the_gradients_of_one_process_and_send_what_was_planned(tmp_path: Path) -> None:
    last = case("attnres", run="miscounted")
    results = check([*ON_TWO, last], 2, tmp_path)
    errors = [of_rank[-1]["error"] for of_rank in results]
    assert all(errors), "a wrong number of deposits must stop the step on every rank"
    assert any("gradients of 1 stages of this rank; expected 2" in error for error in errors), errors


def test_the_example_trains_as_one_process_does_and_sends_less_with_the_cache(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "pipeline_gpt.py")
    outputs = run_ranks([[sys.executable, script]] * 2, tmp_path, 1200)
    (text,) = [output for output in outputs if "losses:" in output]
    found = re.findall(r"cache=(\w+): ([\d,]+) bytes sent, ([\d,]+) planned; losses differ by (\S+) from", text)
    sent = {cache: int(count.replace(",", "")) for cache, count, _, _ in found}
    assert sent["True"] < sent["False"]
    for _, count, planned, off in found:
        assert count == planned
        assert float(off) < 1e-12


@pytest.mark.full
def test_200_steps_on_two_ranks_leave_nothing_behind(tmp_path: Path) -> None:
    cases = [case("block_attnres", run="many", steps=100, microbatches=2, cache=cache) for cache in (True, False)]
    for of_rank in run_cases(cases, 2, tmp_path, 1200):
        for result in of_rank:
            (few, resident), (many, resident_after) = result["alive"]
            assert many == few, "tensors alive after 200 steps and after 100"
            assert resident_after - resident < 2048, "KiB"


EVERYTHING_ON_TWO = [
    *(
        case(name, options=dict(options))
        for name in dm.list_mechanisms()
        for options in dm.mechanism(name).variants[1:]
    ),
    *(case(name, schedule=schedule) for name in dm.list_mechanisms() for schedule in MULTI[1:]),
    *(
        case(name, virtual=1, schedule=schedule, cache=cache)
        for name in dm.list_mechanisms()
        for schedule in SINGLE
        for cache in (True, False)
    ),
    *(
        case(name, placement="v", schedule=schedule, cache=cache)
        for name in ("block_attnres", "attnres", "mrla", "mhc")
        for schedule in ("ZBVZeroBubble", "DualPipeV")
        for cache in (True, False)
    ),
    *(
        case("block_attnres", kv=name, kv_options=dict(options), options={"block_sublayers": 3}, schedule=schedule)
        for name in dm.list_mechanisms(kind="kv")
        for options in kv_mechanism(name).variants
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
    ),
    *(
        case(name, recompute=True, schedule=schedule)
        for name in ("attnres", "block_attnres", "ddl")
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
    ),
    *(case("block_attnres", repeat=1, schedule=schedule) for schedule in MULTI),
    case("block_attnres", virtual=1, schedule="InterleavedZeroBubble"),
    case("block_attnres", microbatches=1),
    case("attnres", virtual=4, microbatches=6),
]
ON_FOUR = [
    *(
        case(name, depth=16, options=options, schedule=schedule, cache=cache)
        for name, options in (("block_attnres", {"block_sublayers": 2}), ("attnres", {}))
        for schedule in MULTI
        for cache in (True, False)
    ),
    case("block_attnres", depth=16, options={"block_sublayers": 5}, placement="v", schedule="ZBVZeroBubble"),
]


@pytest.mark.full
def test_every_mechanism_schedule_and_option_on_two_ranks(tmp_path: Path) -> None:
    check(EVERYTHING_ON_TWO, 2, tmp_path, 3600)


@pytest.mark.full
def test_four_ranks_with_two_stages_each(tmp_path: Path) -> None:
    results = check(ON_FOUR, 4, tmp_path, 3600)
    assert [results[0][number]["planned"]["tensors"] for number in (0, 1)] == [21, 35]
