"""A study: every arm with every seed, after a learning rate was chosen for each arm.

A run's folder is named by its arm and by the digests of its configuration and data, so that only an identical run
reuses what is in it, complete or interrupted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.data import Corpus
from depthmix.models import DecoderConfig
from depthmix.studies.arms import Arm, with_changes
from depthmix.studies.comparison import Comparison, Run, compare, read_run
from depthmix.studies.runs import Pool, Task, threads_per_run
from depthmix.support.checks import check_range
from depthmix.training import TrainConfig, open_corpus
from depthmix.training.build import check_outside_source

MOST = 1000  # largest number of seeds, and of runs at once


@dataclass(frozen=True, kw_only=True)
class Study:
    """What was run: complete tasks, the learning rates tried, and the reasons of failures."""

    arms: list[Arm]
    folder: Path
    done: list[Task]  # all complete ones, short and long
    sweeps: dict[str, dict[float, float | None]]
    failures: dict[str, str]
    corpus: Corpus
    jobs: int  # number of runs at once

    @property
    def tasks(self) -> list[Task]:
        """The complete long runs, without those of the learning-rate sweep."""
        return [task for task in self.done if not task.short]


def run_study(
    arms: Sequence[Arm],
    *,
    seeds: int,
    folder: Path,
    lrs: Sequence[float] = (),
    lr_share: float = 0.25,
    jobs: int = 1,
) -> Study:
    """Make all runs; a failure is reported, and the other runs continue.

    Args:
        arms: see `make_arms`.
        seeds: number of seeds, 0 … seeds − 1, the same for every arm: runs with equal seeds are paired.
        folder: folder of the study.
        lrs: learning rates. Of several, each arm uses its best in short runs with seed 0.
        lr_share: length of a short run, as a share of a long one.
        jobs: number of runs at once.
    """
    check_study(arms, seeds, lrs, lr_share, jobs)
    data = arms[0].config.data
    check_outside_source(data, folder)
    corpus = open_corpus(data)
    choices = list(dict.fromkeys(lrs)) if len(set(lrs)) > 1 else []
    short = [short_task(arm, lr, folder, corpus.digest, lr_share) for lr in choices for arm in arms]
    expected = [long_task(arm, seed, None, folder, corpus.digest) for seed in range(seeds) for arm in arms]
    pool = Pool(total=len(short) + len(expected), jobs=jobs)
    tried = pool.run(short, expected)
    best: dict[str, float | None] = {arm.label: lrs[0] if lrs and not choices else None for arm in arms}
    sweeps: dict[str, dict[float, float | None]] = {arm.label: {} for arm in arms if choices}
    for task, result in zip(short, tried, strict=True):
        sweeps[task.arm][task.config.optimizer.lr] = None if result is None else result.validation_loss
    for label, losses in sweeps.items():
        best[label] = best_rate(losses)
        if best[label] is None:
            pool.failures[label] = "every learning rate failed"
    trainable = [arm for arm in arms if arm.label not in pool.failures]
    long = [long_task(arm, seed, best[arm.label], folder, corpus.digest) for seed in range(seeds) for arm in trainable]
    pool.total = len(short) + len(long)
    results = zip((*short, *long), (*tried, *pool.run(long)), strict=True)
    done = [task for task, result in results if result is not None]
    return Study(
        arms=list(arms), folder=folder, done=done, sweeps=sweeps, failures=pool.failures, corpus=corpus, jobs=jobs
    )


def best_rate(losses: Mapping[float, float | None]) -> float | None:
    """The learning rate with the lowest loss; None if no run has a result."""
    complete = {lr: loss for lr, loss in losses.items() if loss is not None}
    return min(complete, key=lambda lr: complete[lr]) if complete else None


def read_runs(study: Study) -> list[Run]:
    """The long runs, with folders relative to the study's, so that the study can be moved."""
    return [
        dataclasses.replace(
            read_run(task.folder, arm=task.arm, seed=task.seed, lr=task.config.optimizer.lr),
            folder=task.folder.relative_to(study.folder).as_posix(),
        )
        for task in study.tasks
    ]


def compare_study(study: Study) -> Comparison:
    """Compare each arm with its baseline; an arm with the same configuration as its baseline is a control."""
    configs = {arm.label: arm.config for arm in study.arms}
    baselines = {arm.label: arm.baseline for arm in study.arms if arm.baseline is not None}
    controls = [label for label, base in baselines.items() if configs[label] == configs[base]]
    return compare(read_runs(study), baselines, controls)


def check_study(arms: Sequence[Arm], seeds: int, lrs: Sequence[float], lr_share: float, jobs: int) -> None:
    for name, count in (("seeds", seeds), ("jobs", jobs)):
        check_range(name, count, 1, MOST)
    if not all(lr > 0 for lr in lrs):
        raise ValueError(f"lrs={list(lrs)}; expected learning rates above 0")
    if not 0 < lr_share <= 1:
        raise ValueError(f"lr_share={lr_share}; expected a share of a run, above 0 and at most 1")
    if lrs and len({arm.config.optimizer.lr for arm in arms if arm.size == arms[0].size}) > 1:
        raise ValueError("both optimizer.lr and lrs are varied; expected only one of them")
    for name in ("source", "tokenizer", "validation", "field", "tokens_per_row"):
        check_equal(f"data.{name}", {getattr(arm.config.data, name) for arm in arms}, f"set one data.{name} for all")
    rows = {arm.config.data.rows * arm.config.run.validate_batches for arm in arms}
    check_equal("data.rows × run.validate_batches", rows, "set one data.rows for all, and vary run.accumulate instead")


def check_equal(name: str, values: Collection[Any], hint: str) -> None:
    """Raise an error if arms differ: losses on different validation tokens cannot be compared."""
    if len(values) > 1:
        listed = ", ".join(sorted(map(str, values)))
        raise ValueError(
            f"{name} differs between arms ({listed}): they would not be validated on the same tokens; {hint}"
        )


def short_task(arm: Arm, lr: float, folder: Path, data: str, share: float) -> Task:
    steps = max(1, round(arm.config.run.steps * share))
    config = with_changes(arm.config, lr, steps=steps, seed=0, validate_every=0, depth_every=0)
    return Task(
        arm=arm.label, seed=0, config=with_run_folder(config, folder, f"{arm.label} lr {lr:g}", data), short=True
    )


def long_task(arm: Arm, seed: int, lr: float | None, folder: Path, data: str) -> Task:
    config = with_changes(arm.config, lr, seed=seed)
    return Task(arm=arm.label, seed=seed, config=with_run_folder(config, folder, f"{arm.label} seed {seed}", data))


def with_run_folder(config: TrainConfig, folder: Path, words: str, data: str) -> TrainConfig:
    """A copy with a folder that only an identical configuration on identical data has."""
    digest = hashlib.sha256(f"{config.digest}\n{data}".encode()).hexdigest()[:10]
    slug = re.sub(r"[^A-Za-z0-9._=+-]+", "_", words)
    return with_changes(config, folder=str(folder / "runs" / f"{slug}_{digest}"))


def describe_size(config: TrainConfig) -> str:
    steps, model = config.run.steps, config.model
    tokens = steps * config.tokens_per_step
    return f"{model.depth} sublayers of width {model.dim}, {tokens:,} tokens in {steps:,} steps"


def describe_attention(config: TrainConfig) -> dict[str, str]:
    """The kinds of attention of a decoder, where they are not grouped queries alone."""
    kinds = {*config.model.attention_kinds} if isinstance(config.model, DecoderConfig) else {"gqa"}
    return {} if kinds == {"gqa"} else {"attention": ", ".join(sorted(kinds))}


def describe_settings(study: Study, **more: Any) -> Mapping[str, Any]:
    """The settings of a study for its page, and the fields `more`."""
    first = study.arms[0].config
    sizes = {arm.size: arm.config for arm in reversed(study.arms)}  # the first arm of each
    return {
        "size": "; ".join(map(describe_size, reversed(sizes.values()))),
        **describe_attention(first),
        "optimizer": ", ".join(f"{k} {v}" for k, v in dataclasses.asdict(first.optimizer).items() if k != "lr"),
        "schedule": ", ".join(f"{k} {v}" for k, v in dataclasses.asdict(first.schedule).items()),
        "batch": f"{first.tokens_per_step:,} tokens, rows of {first.data.tokens_per_row}",
        "validation": f"{first.run.validate_batches} batches of {first.data.rows} rows, always the same",
        "runs": f"{study.jobs} at once, {threads_per_run(study.jobs)} threads each",
        **more,
    }
