"""A study: every arm with every seed, one run after the other, each in a process of its own.

A crash of one run does not touch the others. What is complete is used again, what was interrupted goes on: a run's
folder is named by its arm and by the digests of its configuration and data, so it can only be found by an equal one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthmix.training.arms import Arm, changed
from depthmix.training.config import TrainConfig
from depthmix.training.data import Corpus, prepare
from depthmix.training.flops import flops_per_token
from depthmix.training.folder import Result, finished, locked, write_text

TRAIN = (sys.executable, "-m", "depthmix", "train", "--config")  # and the file
LOG, ASKED = "log.txt", "asked.toml"
EVERY = 20.0  # seconds between lines of progress where stderr is no terminal
PAUSE = 0.5  # seconds between looks at a child


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


@dataclass(frozen=True, kw_only=True)
class Study:
    """What was run: finished tasks, the learning rates tried, and why some have no result."""

    arms: list[Arm]
    tasks: list[Task]  # the long ones that are complete
    sweeps: dict[str, dict[float, float | None]]
    failures: dict[str, str]
    corpus: Corpus


@dataclass
class Clock:
    """How long all that is left may take, from the seconds that a FLOP took so far; an arm by its own pace if known."""

    total: int
    done: int = 0
    spent: dict[str, tuple[float, float]] = field(default_factory=dict)  # of an arm: seconds and FLOPs

    def took(self, arm: str, seconds: float, flops: float) -> None:
        before = self.spent.get(arm, (0.0, 0.0))
        self.spent[arm] = (before[0] + seconds, before[1] + flops)

    def left(self, work: Sequence[tuple[str, float]]) -> float | None:
        """Seconds for (arm, FLOPs) still to do; None before anything was done."""
        seconds, flops = (sum(part) for part in zip(*self.spent.values(), strict=True)) if self.spent else (0.0, 0.0)
        if not flops:
            return None
        pace = {arm: own[0] / own[1] for arm, own in self.spent.items() if own[1]}
        return sum(pace.get(arm, seconds / flops) * each for arm, each in work)


def run_study(
    arms: Sequence[Arm], *, seeds: int, folder: Path, lrs: Sequence[float] = (), sweep_share: float = 0.25
) -> Study:
    """All runs; those that fail are told and the others go on.

    Args:
        arms: see `make_arms`.
        seeds: 0 … seeds − 1, the same for every arm: runs with equal seeds are pairs.
        folder: of the study.
        lrs: learning rates. Several are tried for every arm with seed 0 in short runs, and the best is taken.
        sweep_share: length of a short run, as a share of a long one.
    """
    check(arms, seeds, lrs, sweep_share)
    data = arms[0].config.data
    corpus = prepare(data.source, tokenizer=data.tokenizer, folder=data.path, validation=data.validation)
    choices = list(dict.fromkeys(lrs)) if len(set(lrs)) > 1 else []
    short = [short_task(arm, lr, folder, corpus.digest, sweep_share) for arm in arms for lr in choices]
    guessed = [long_task(arm, seed, None, folder, corpus.digest) for seed in range(seeds) for arm in arms]
    clock = Clock(total=len(short) + len(guessed))
    failures: dict[str, str] = {}
    sweeps: dict[str, dict[float, float | None]] = {arm.label: {} for arm in arms if choices}
    for k, task in enumerate(short):
        result = attempt(task, clock, [*short[k + 1 :], *guessed], failures)
        sweeps[task.arm][task.config.optimizer.lr] = None if result is None else result.validation_loss
    best: dict[str, float | None] = {arm.label: lrs[0] if lrs and not choices else None for arm in arms}
    for label, losses in sweeps.items():
        whole = {lr: loss for lr, loss in losses.items() if loss is not None}
        if not whole:
            failures[label] = "no learning rate led to a result"
        best[label] = min(whole, key=lambda lr: whole[lr]) if whole else None
    able = [arm for arm in arms if arm.label not in failures]
    long = [long_task(arm, seed, best[arm.label], folder, corpus.digest) for seed in range(seeds) for arm in able]
    clock.total = len(short) + len(long)
    done = [task for k, task in enumerate(long) if attempt(task, clock, long[k + 1 :], failures) is not None]
    return Study(arms=list(arms), tasks=done, sweeps=sweeps, failures=failures, corpus=corpus)


def check(arms: Sequence[Arm], seeds: int, lrs: Sequence[float], sweep_share: float) -> None:
    if seeds < 1:
        raise ValueError(f"seeds={seeds}; expected at least 1")
    if not all(lr > 0 for lr in lrs):
        raise ValueError(f"lrs={list(lrs)}; expected learning rates above 0")
    if not 0 < sweep_share <= 1:
        raise ValueError(f"sweep_share={sweep_share}; expected a share of a run, above 0 and at most 1")
    if lrs and len({arm.config.optimizer.lr for arm in arms if arm.size == arms[0].size}) > 1:
        raise ValueError("optimizer.lr is varied as well as lrs; expected one of them")
    for name in ("source", "tokenizer", "validation", "tokens_per_row"):
        if len(values := {getattr(arm.config.data, name) for arm in arms}) > 1:
            raise ValueError(f"data.{name} differs between arms ({values}): their losses could not be compared")


def short_task(arm: Arm, lr: float, folder: Path, data: str, share: float) -> Task:
    steps = max(1, round(arm.config.run.steps * share))
    config = changed(arm.config, lr, steps=steps, seed=0, validate_every=0, depth_every=0)
    return Task(arm=arm.label, seed=0, config=placed(config, folder, f"{arm.label} lr {lr:g}", data), short=True)


def long_task(arm: Arm, seed: int, lr: float | None, folder: Path, data: str) -> Task:
    config = changed(arm.config, lr, seed=seed)
    return Task(arm=arm.label, seed=seed, config=placed(config, folder, f"{arm.label} seed {seed}", data))


def placed(config: TrainConfig, folder: Path, words: str, data: str) -> TrainConfig:
    """In a folder that only an equal configuration on equal data has."""
    mark = hashlib.sha256(f"{config.digest}\n{data}".encode()).hexdigest()[:10]
    slug = re.sub(r"[^A-Za-z0-9._=+-]+", "_", words)
    return changed(config, folder=str(folder / "runs" / f"{slug}_{mark}"))


def attempt(task: Task, clock: Clock, later: Sequence[Task], failures: dict[str, str]) -> Result | None:
    """The result of a run, made or found; None where it failed, with the reason in `failures`."""
    clock.done += 1
    head = f"[{clock.done}/{clock.total}] {task.label}"
    try:
        free(task.folder, head)
        result = complete(task)
        if result is not None:
            say(f"{head}: complete already, loss {result.validation_loss:.4f}")
            return result
        why = run_child(task, head, clock, later)
        result = complete(task)
    except OSError as error:  # a full disk, a folder that may not be written
        result, why = None, str(error)
    if result is None:
        failures[task.label] = why or "it ended without a result"
        say(f"{head}: failed: {failures[task.label]}")
    else:
        say(f"{head}: loss {result.validation_loss:.4f}, {result.tokens_per_second:,.0f} tokens/s")
    return result


def complete(task: Task) -> Result | None:
    """A finished run of this configuration; a damaged result is made again from its checkpoint."""
    try:
        return finished(task.config)
    except ValueError as error:
        say(f"{error}; making it again")
        (task.folder / "result.json").unlink()
        return None


def free(folder: Path, head: str) -> None:
    """Wait while another process trains there: the child of a study that was killed, or another study."""
    folder.mkdir(parents=True, exist_ok=True)
    told = False
    while True:
        try:
            locked(folder / "lock").close()
            return
        except ValueError:
            if not told:
                say(f"{head}: another process trains in {folder}; waiting for it")
            told = True
            time.sleep(PAUSE)


def run_child(task: Task, head: str, clock: Clock, later: Sequence[Task]) -> str | None:
    """Train in a process of its own; why it failed, or None."""
    write_text(task.folder / ASKED, task.config.to_toml())
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    begun, first = time.monotonic(), steps_done(task.folder)
    with (task.folder / LOG).open("ab") as log:
        child = subprocess.Popen(
            [*TRAIN, str(task.folder / ASKED)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C comes to us; we hand it on and wait for the checkpoint
        )
        try:
            watch(child, task, head, clock, later, first or 0)
        except BaseException:
            child.terminate()
            child.wait()
            raise
    share = 1 - (first or 0) / task.config.run.steps
    clock.took(task.arm, time.monotonic() - begun, max(share, 0.0) * task.flops)
    return None if child.returncode == 0 else reason(child.returncode, task.folder / LOG)


def watch(
    child: subprocess.Popen[bytes], task: Task, head: str, clock: Clock, later: Sequence[Task], first: int
) -> None:
    terminal = sys.stderr.isatty()
    begun = shown = time.monotonic()
    steps = task.config.run.steps
    while child.poll() is None:
        time.sleep(PAUSE)
        now = time.monotonic()
        if now - shown < (1.0 if terminal else EVERY):
            continue
        shown, done = now, steps_done(task.folder) or 0
        share, rest = max(done - first, 0) / steps, (1 - done / steps) * task.flops
        here = Clock(total=0, spent=dict(clock.spent))
        here.took(task.arm, now - begun, share * task.flops)
        left = here.left([(task.arm, rest), *((other.arm, other.flops) for other in later)])
        words = "" if left is None else f"; all that is left: about {duration(left)}"
        text = f"{head}: step {done} of {steps}{words}"
        print(f"\r{text}\033[K" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
    if terminal:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def steps_done(folder: Path) -> int | None:
    """From the last whole line of a run's metrics."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def reason(code: int, log: Path) -> str:
    """What a child said last."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}" + ("; is there enough memory?" if name == "SIGKILL" else "") + f" (see {log})"
    return f"{lines[-1] if lines else f'exit code {code}'} (see {log})"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def settings(study: Study, **more: Any) -> Mapping[str, Any]:
    """What a page tells of a study."""
    first = study.arms[0].config
    model = dataclasses.asdict(first.optimizer)
    return {
        "optimizer": ", ".join(f"{k} {v}" for k, v in model.items() if k != "lr"),
        "schedule": ", ".join(f"{k} {v}" for k, v in dataclasses.asdict(first.schedule).items()),
        "batch": f"{first.tokens_per_step:,} tokens, rows of {first.data.tokens_per_row}",
        "validation": f"{first.run.validate_batches} batches of {first.data.rows} rows, always the same",
        **more,
    }
