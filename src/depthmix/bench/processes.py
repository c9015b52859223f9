"""Jobs in child processes, one after the other: the spread between processes is larger than that within one.

A job is the name of a function and its arguments; JSON carries it, and its result. The child is
`python -m depthmix.bench`: it reads the job from stdin and writes the result to stdout; stderr is the parent's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from depthmix import ops
from depthmix.support.terminal import describe_signal, end_children, format_duration, say, start_child, track


class ChildFailed(RuntimeError):
    """A child process ended without a result."""


@dataclass(frozen=True, kw_only=True)
class Job:
    label: str
    target: str  # "module:function"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    keep: bool = True  # freed memory stays with the process, see `ops.keep_freed_memory`; off where memory is measured
    seconds: float = 1.0  # a guess, corrected by what earlier jobs took; used for the time left only


def run_child(job: Job) -> Any:
    """The result of a job in a process of its own, with the parent's number of threads and the parent's package."""
    order = {"target": job.target, "arguments": job.arguments, "threads": torch.get_num_threads(), "keep": job.keep}
    process = start_child("depthmix.bench", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        output, _ = process.communicate(json.dumps(order).encode())
    finally:
        end_children([process])
    if ending := describe_signal(process.returncode):
        raise ChildFailed(f"{job.label}: the child process was {ending}")
    try:
        answer = json.loads(output)
    except ValueError:
        raise ChildFailed(f"{job.label}: the child process ended with code {process.returncode}, no result") from None
    if "error" in answer:
        raise ChildFailed(f"{job.label}: {answer['error']}")
    return answer["result"]


def end_with_parent() -> None:
    """On Linux, let the system end this process with the one that started it, however that ends: a benchmark that goes
    on unseen would falsify the next one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def child() -> int:
    """The other end of `run_child`."""
    end_with_parent()
    order = json.load(sys.stdin)
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what compilers and libraries print must not end up in the answer
    answer: dict[str, Any]
    try:
        torch.set_num_threads(order["threads"])
        if order["keep"]:
            ops.keep_freed_memory()
        module, _, name = order["target"].partition(":")
        answer = {"result": getattr(importlib.import_module(module), name)(**order["arguments"])}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    with answer_to:
        json.dump(answer, answer_to)
    return 1 if "error" in answer else 0


def run_jobs(jobs: Sequence[Job], journal: Path | None = None) -> list[Any]:
    """Results in order; before each job, one line names it and estimates the time left for all jobs.

    Each result is added to `journal` at once; a result that it already holds for the same job and code is used again.
    """
    results, guessed, spent = [], 0.0, 0.0
    took: dict[str, float] = {}
    known = read_journal(journal)
    for number, job in enumerate(jobs):
        mark = mark_of(job, number)
        if mark in known:
            say(f"[{number + 1}/{len(jobs)}] {job.label}: already measured")
            results.append(known[mark])
            continue
        pace = spent / guessed if guessed else 1.0
        left = sum(took.get(j.label, j.seconds * pace) for j in jobs[number:])
        say(f"[{number + 1}/{len(jobs)}] {job.label}; about {format_duration(left)} left in total")
        begun = time.monotonic()
        results.append(run_child(job))
        if journal is not None:
            with journal.open("a", encoding="utf-8") as file:  # a new line first: the last one may have been cut off
                file.write("\n" + json.dumps({"job": mark, "label": job.label, "result": results[-1]}))
        took[job.label] = time.monotonic() - begun
        spent += took[job.label]
        guessed += job.seconds
    return results


def mark_of(job: Job, number: int) -> str:
    """A digest of a job, its position, and the code that it runs."""
    identity = [
        job.label,
        job.target,
        dict(job.arguments),
        job.keep,
        torch.get_num_threads(),
        torch.__version__,
        number,
    ]
    return hashlib.sha256(f"{json.dumps(identity)} {code()}".encode()).hexdigest()


@functools.cache
def code() -> str:
    """A digest of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*")):
        if path.suffix in (".py", ".cpp"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def read_journal(journal: Path | None) -> dict[str, Any]:
    """Results by the marks of their jobs; an incomplete last line is ignored."""
    known: dict[str, Any] = {}
    for line in (
        journal.read_text(encoding="utf-8", errors="replace").splitlines()
        if journal is not None and journal.exists()
        else ()
    ):
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            known[entry["job"]] = entry["result"]
    return known


def progress(label: str) -> Any:
    """A wrapper of rounds that shows how many are done and the time left; it draws between rounds only."""
    return lambda rounds: track(rounds, f"  {label}", "rounds", len(rounds))


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """A function that returns the seconds since the block began."""
    begun = time.monotonic()
    yield lambda: time.monotonic() - begun


def merged(results: Iterable[Mapping[str, Mapping[str, list[float]]]]) -> dict[str, dict[str, list[list[float]]]]:
    """From {group: {variant: ratios}} of several processes to {group: {variant: [ratios of each process]}}."""
    groups: dict[str, dict[str, list[list[float]]]] = {}
    for result in results:
        for group, variants in result.items():
            for what, ratios in variants.items():
                groups.setdefault(group, {}).setdefault(what, []).append(ratios)
    return groups
