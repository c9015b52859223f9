"""Runs in separate processes, several at once if requested: a crash of one does not affect the others.

Complete runs are reused, interrupted ones are resumed, and failures are reported with their reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from depthmix.support.files import write_text
from depthmix.support.terminal import Progress, describe_signal, end_children, say, start_child
from depthmix.training import Result, TrainConfig, flops_per_token
from depthmix.training.folder import finished_result, run_lock, stop_signals

LOG, REQUESTED = "log.txt", "asked.toml"
PAUSE = 0.5  # seconds between checks of the child processes


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run of a study."""

    arm: str
    seed: int
    config: TrainConfig  # with its folder
    short: bool = False  # a run of the learning-rate sweep

    @property
    def label(self) -> str:
        return f"{self.arm}, lr {self.config.optimizer.lr:g}" if self.short else f"{self.arm}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder)

    @cached_property  # counting builds a model, and the estimate of the time left needs it often
    def flops(self) -> float:
        config = self.config
        return flops_per_token(config.model, config.data.tokens_per_row) * config.run.steps * config.tokens_per_step


@dataclass
class Pace:
    """Estimate how long work will take from the seconds per FLOP so far; by arm if known."""

    spent: dict[str, tuple[float, float]] = field(default_factory=dict)  # seconds and FLOPs by arm

    def add(self, arm: str, seconds: float, flops: float) -> None:
        before = self.spent.get(arm, (0.0, 0.0))
        self.spent[arm] = (before[0] + seconds, before[1] + flops)

    def seconds_for(self, work: Iterable[tuple[str, float]]) -> float | None:
        """Seconds for the remaining (arm, FLOPs), one after the other; None before any work was done."""
        seconds, flops = (sum(part) for part in zip(*self.spent.values(), strict=True)) if self.spent else (0.0, 0.0)
        if not flops:
            return None
        known = {arm: spent[0] / spent[1] for arm, spent in self.spent.items() if spent[1]}
        return sum(known.get(arm, seconds / flops) * each for arm, each in work)


@dataclass(kw_only=True)
class Child:
    """A run in progress."""

    task: Task
    title: str
    process: subprocess.Popen[bytes]
    begun: float
    first: int  # steps that were complete before

    @property
    def steps(self) -> int:
        return self.task.config.run.steps

    def share(self, done: int) -> float:
        """The share of the whole run that this process has done."""
        return max(done - self.first, 0) / self.steps


@dataclass(kw_only=True)
class Pool:
    """Make runs, `jobs` at once, each with its share of the threads."""

    total: int  # number of runs
    jobs: int = 1
    begun: int = 0  # number of runs begun, including those already complete
    pace: Pace = field(default_factory=Pace)
    failures: dict[str, str] = field(default_factory=dict)  # by label: the reason why there is no result
    running: list[Child] = field(default_factory=list)
    results: dict[str, Result | None] = field(default_factory=dict)  # by label
    blocked: set[str] = field(default_factory=set)  # by label: waiting for another process, and reported

    def run(self, tasks: Sequence[Task], later: Sequence[Task] = ()) -> list[Result | None]:
        """The result of each task, new or reused; None if it failed. `later` counts towards the time left."""
        waiting = list(tasks)
        with stop_signals() as stop_requested, Progress(self.total) as progress:
            try:
                while waiting or self.running:
                    for task in waiting[:]:
                        if len(self.running) < self.jobs and self.begin_run(task):
                            waiting.remove(task)
                    if waiting or self.running:
                        time.sleep(PAUSE)
                    for child in [child for child in self.running if child.process.poll() is not None]:
                        self.running.remove(child)
                        self.end_run(child)
                    if stop_requested():
                        raise KeyboardInterrupt
                    if self.running and progress.due():
                        self.show_progress(progress, [*waiting, *later])
            finally:
                end_children([child.process for child in self.running])
        return [self.results[task.label] for task in tasks]

    def begin_run(self, task: Task) -> bool:
        """Start a run, or find its result; False while another process trains in its folder."""
        title = f"[{self.begun + 1}/{self.total}] {task.label}"
        try:
            task.folder.mkdir(parents=True, exist_ok=True)
            if not is_free(task.folder):
                if task.label not in self.blocked:
                    say(f"{title}: another process is training in {task.folder}; waiting for it")
                self.blocked.add(task.label)
                return False
            self.begun += 1
            self.results[task.label] = result = find_result(task)
            if result is not None:
                say(f"{title}: already complete, loss {result.validation_loss:.4f}")
            else:
                first = steps_done(task.folder)
                process = start(task, threads_per_run(self.jobs))
                self.running.append(Child(task=task, title=title, process=process, begun=time.monotonic(), first=first))
        except OSError as error:  # such as a full disk or a read-only folder
            self.fail(task, title, str(error))
        return True

    def end_run(self, child: Child) -> None:
        """Record the result of a process that has ended."""
        task, seconds = child.task, time.monotonic() - child.begun
        try:
            result, problem = find_result(task), ""
        except OSError as error:
            result, problem = None, str(error)
        if result is None:
            self.fail(task, child.title, problem or failure_reason(child.process.returncode, task.folder / LOG))
            return
        self.results[task.label] = result
        self.pace.add(task.arm, seconds, child.share(child.steps) * task.flops)
        say(f"{child.title}: loss {result.validation_loss:.4f}, {result.tokens_per_second:,.0f} tokens/s")

    def fail(self, task: Task, title: str, reason: str) -> None:
        self.results[task.label], self.failures[task.label] = None, reason
        say(f"{title}: failed: {reason}")

    def show_progress(self, progress: Progress, later: Sequence[Task]) -> None:
        """Show the step of each run and the time left for all."""
        pace = Pace(dict(self.pace.spent))
        lines, work, done = [], [(task.arm, task.flops) for task in later], float(self.begun - len(self.running))
        for child in self.running:
            steps = steps_done(child.task.folder)
            pace.add(child.task.arm, time.monotonic() - child.begun, child.share(steps) * child.task.flops)
            work.append((child.task.arm, (1 - steps / child.steps) * child.task.flops))
            lines.append(f"{child.title}: step {steps} of {child.steps}")
            done += steps / child.steps
        seconds = pace.seconds_for(work)
        left = None if seconds is None else seconds / min(self.jobs, len(work))
        progress.show(done, "; ".join(lines), left)


def threads_per_run(jobs: int) -> int:
    """Threads of a run if `jobs` runs share the machine."""
    return max(1, torch.get_num_threads() // jobs)


def is_free(folder: Path) -> bool:
    """Whether no process trains there, such as a child of a killed study or of another study."""
    try:
        with run_lock(folder):
            return True
    except ValueError:
        return False


def find_result(task: Task) -> Result | None:
    """The result of a complete run of this configuration; a damaged one is removed, and then created again."""
    try:
        return finished_result(task.config)
    except ValueError as error:
        say(f"{error}; creating it again")
        (task.folder / "result.json").unlink()
        return None


def start(task: Task, threads: int) -> subprocess.Popen[bytes]:
    write_text(task.folder / REQUESTED, task.config.to_toml())
    words = ("train", "--config", str(task.folder / REQUESTED))
    with (task.folder / LOG).open("ab") as log:
        return start_child(
            "depthmix", *words, threads=threads, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )


def steps_done(folder: Path) -> int:
    """Completed steps, from the last complete line of a run's metrics."""
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


def failure_reason(code: int, log: Path) -> str:
    """The signal that ended a run, or the last line of its log."""
    if ending := describe_signal(code):
        return f"{ending} (see {log})"
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1] if lines else f'exit code {code}, without a result'} (see {log})"
