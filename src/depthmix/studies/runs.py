"""Runs in processes of their own, several at once if asked: a crash of one does not touch the others.

What is complete is used again, what was interrupted goes on, and what fails is told with its reason.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from depthmix.support.files import write_text
from depthmix.training.config import TrainConfig
from depthmix.training.flops import flops_per_token
from depthmix.training.folder import Result, finished_result, run_lock, stop_signals

TRAIN = (sys.executable, "-m", "depthmix", "train", "--config")  # and the file
LOG, ASKED = "log.txt", "asked.toml"
EVERY = 20.0  # seconds between lines of progress where stderr is no terminal
PAUSE = 0.5  # seconds between looks at the children


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run to make."""

    arm: str
    seed: int
    config: TrainConfig  # with its folder
    short: bool = False  # of the learning-rate sweep

    @property
    def label(self) -> str:
        return f"{self.arm}, lr {self.config.optimizer.lr:g}" if self.short else f"{self.arm}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder)

    @property
    def flops(self) -> float:
        config = self.config
        return flops_per_token(config.model, config.data.tokens_per_row) * config.run.steps * config.tokens_per_step


@dataclass
class Clock:
    """How long all that is left may take, from the seconds that a FLOP took so far; an arm by its own pace if known."""

    total: int
    done: int = 0
    spent: dict[str, tuple[float, float]] = field(default_factory=dict)  # of an arm: seconds and FLOPs

    def took(self, arm: str, seconds: float, flops: float) -> None:
        before = self.spent.get(arm, (0.0, 0.0))
        self.spent[arm] = (before[0] + seconds, before[1] + flops)

    def left(self, work: Iterable[tuple[str, float]]) -> float | None:
        """Seconds for (arm, FLOPs) still to do, one after the other; None before anything was done."""
        seconds, flops = (sum(part) for part in zip(*self.spent.values(), strict=True)) if self.spent else (0.0, 0.0)
        if not flops:
            return None
        pace = {arm: own[0] / own[1] for arm, own in self.spent.items() if own[1]}
        return sum(pace.get(arm, seconds / flops) * each for arm, each in work)


@dataclass(kw_only=True)
class Child:
    """A run that is being made."""

    task: Task
    head: str
    process: subprocess.Popen[bytes]
    begun: float
    first: int  # steps that were done before

    @property
    def steps(self) -> int:
        return self.task.config.run.steps

    def share(self, done: int) -> float:
        """Of the whole run, what this process has done."""
        return max(done - self.first, 0) / self.steps


@dataclass(kw_only=True)
class Pool:
    """Makes runs, `jobs` at once, each with its share of the threads."""

    clock: Clock
    jobs: int = 1
    failures: dict[str, str] = field(default_factory=dict)  # by label: why there is no result
    running: list[Child] = field(default_factory=list)
    results: dict[str, Result | None] = field(default_factory=dict)  # by label
    blocked: set[str] = field(default_factory=set)  # told to wait for another process

    def run(self, tasks: Sequence[Task], later: Sequence[Task] = ()) -> list[Result | None]:
        """The result of each task, made or found; None where it failed. `later` counts for the time left."""
        waiting, shown = list(tasks), time.monotonic()
        with stop_signals() as asked:
            try:
                while waiting or self.running:
                    for task in waiting[:]:
                        if len(self.running) < self.jobs and self.begin(task):
                            waiting.remove(task)
                    if waiting or self.running:
                        time.sleep(PAUSE)
                    for child in [child for child in self.running if child.process.poll() is not None]:
                        self.running.remove(child)
                        self.end(child)
                    if asked():
                        raise KeyboardInterrupt
                    if self.running and time.monotonic() - shown >= (1.0 if sys.stderr.isatty() else EVERY):
                        self.show([*waiting, *later])
                        shown = time.monotonic()
            finally:
                for child in self.running:
                    child.process.terminate()  # it writes a checkpoint
                for child in self.running:
                    child.process.wait()
        return [self.results[task.label] for task in tasks]

    def begin(self, task: Task) -> bool:
        """Start a run, or find its result; False while another process trains in its folder."""
        head = f"[{self.clock.done + 1}/{self.clock.total}] {task.label}"
        try:
            task.folder.mkdir(parents=True, exist_ok=True)
            if not free(task.folder):
                if task.label not in self.blocked:
                    say(f"{head}: another process trains in {task.folder}; waiting for it")
                self.blocked.add(task.label)
                return False
            self.clock.done += 1
            self.results[task.label] = found = complete(task)
            if found is not None:
                say(f"{head}: complete already, loss {found.validation_loss:.4f}")
            else:
                first = steps_done(task.folder)
                process = start(task, threads_of(self.jobs))
                self.running.append(Child(task=task, head=head, process=process, begun=time.monotonic(), first=first))
        except OSError as error:  # a full disk, a folder that may not be written
            self.fail(task, head, str(error))
        return True

    def end(self, child: Child) -> None:
        """What a process that has ended leaves."""
        task, took = child.task, time.monotonic() - child.begun
        try:
            result, why = complete(task), ""
        except OSError as error:
            result, why = None, str(error)
        if result is None:
            self.fail(task, child.head, why or reason(child.process.returncode, task.folder / LOG))
            return
        self.results[task.label] = result
        self.clock.took(task.arm, took, child.share(child.steps) * task.flops)
        say(f"{child.head}: loss {result.validation_loss:.4f}, {result.tokens_per_second:,.0f} tokens/s")

    def fail(self, task: Task, head: str, why: str) -> None:
        self.results[task.label], self.failures[task.label] = None, why
        say(f"{head}: failed: {why}")

    def show(self, later: Sequence[Task]) -> None:
        """Where each run is, and when all will be done."""
        here = Clock(total=0, spent=dict(self.clock.spent))
        words, rest = [], [(task.arm, task.flops) for task in later]
        for child in self.running:
            done = steps_done(child.task.folder)
            here.took(child.task.arm, time.monotonic() - child.begun, child.share(done) * child.task.flops)
            rest.append((child.task.arm, (1 - done / child.steps) * child.task.flops))
            words.append(f"{child.head}: step {done} of {child.steps}")
        left = here.left(rest)
        if left is not None:
            words.append(f"all that is left: about {duration(left / min(self.jobs, len(rest)))}")
        line = "; ".join(words)
        if sys.stderr.isatty():
            print(f"\r{line[: shutil.get_terminal_size().columns - 1]}\033[K", end="", file=sys.stderr, flush=True)
        else:
            say(line)


def threads_of(jobs: int) -> int:
    """Of each run, where so many share the machine."""
    return max(1, torch.get_num_threads() // jobs)


def free(folder: Path) -> bool:
    """Whether nobody trains there: the child of a study that was killed, or another study."""
    try:
        with run_lock(folder):
            return True
    except ValueError:
        return False


def complete(task: Task) -> Result | None:
    """A finished run of this configuration; a damaged result is made again from its checkpoint."""
    try:
        return finished_result(task.config)
    except ValueError as error:
        say(f"{error}; making it again")
        (task.folder / "result.json").unlink()
        return None


def start(task: Task, threads: int) -> subprocess.Popen[bytes]:
    write_text(task.folder / ASKED, task.config.to_toml())
    source = str(Path(__file__).parents[2])
    paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    with (task.folder / LOG).open("ab") as log:
        return subprocess.Popen(
            [*TRAIN, str(task.folder / ASKED)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl-C comes to us; we hand it on and wait for the checkpoint
        )


def steps_done(folder: Path) -> int:
    """From the last whole line of a run's metrics."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def reason(code: int, log: Path) -> str:
    """What a child said last."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}" + ("; is there enough memory?" if name == "SIGKILL" else "") + f" (see {log})"
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1] if lines else f'exit code {code}, without a result'} (see {log})"


def say(text: str) -> None:
    """On a line of its own; on a terminal in the place of the progress."""
    print(f"\r\033[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
