"""Pipelines in real processes give the gradients of one process and send what their plan says, byte for byte.

Processes are started once for each number of ranks and run all cases of it; a test reports every case that is wrong.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import depthmix as dm

ROOT = Path(__file__).parent.parent.parent
SINGLE, MULTI = ("GPipe", "1F1B"), ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
TOLERANCE = 1e-11


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)


def run_cases(cases: list[dict[str, Any]], ranks: int, folder: Path, seconds: float) -> list[list[dict[str, Any]]]:
    """The results of each rank, in the order of the cases."""
    (folder / "cases.json").write_text(json.dumps(cases))
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    base, port = [sys.executable, "-m", "tests.parallel.worker"], free_port()
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    processes = [
        start([*base, str(rank), str(ranks), str(port), str(folder)], environment, logs[rank]) for rank in range(ranks)
    ]
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


def check(cases: list[dict[str, Any]], ranks: int, folder: Path, seconds: float = 300) -> list[list[dict[str, Any]]]:
    results = run_cases(cases, ranks, folder, seconds)
    wrong = {
        str(case): found
        for number, case in enumerate(cases)
        if "run" not in case and (found := mistakes(case, [of_rank[number] for of_rank in results]))
    }
    assert not wrong, "\n".join(f"{name}: {'; '.join(found)}" for name, found in wrong.items())
    return results


ON_TWO = [
    *(case(name, cache=cache) for name in dm.list_mechanisms() for cache in (True, False)),
    *(case(name, virtual=1, schedule="1F1B") for name in ("block_attnres", "mhc", "residual")),
    *(case("block_attnres", schedule=schedule, depth=8, options={"block_sublayers": 3}) for schedule in MULTI[1:]),
    case("block_attnres", virtual=1, schedule="GPipe"),
    case("attnres", schedule="InterleavedZeroBubble"),
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
