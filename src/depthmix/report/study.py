"""A study's folder: what `comparison.json` holds, its tables, and the runs that stand for its arms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.analysis.statistics import Estimate
from depthmix.report.observations import Arm, observe
from depthmix.report.reading import STUDY_FILE, SavedRun, is_run, read_run_folder
from depthmix.studies import Comparison
from depthmix.studies.comparison import Crossing, Row, Run
from depthmix.studies.comparison_page import (
    COST_HEADINGS,
    COST_NOTE,
    LOSS_HEADINGS,
    cost_cells,
    loss_cells,
    verdict_lines,
)
from depthmix.support.files import read_object

AGAIN = "The same `depthmix compare` command writes it again"


@dataclass(frozen=True, kw_only=True)
class SavedStudy:
    folder: Path
    comparison: Comparison
    content: dict[str, Any]  # "study" of the page


def read_study(folder: Path) -> SavedStudy:
    """A published study too, whose runs have no weights."""
    path = folder / STUDY_FILE
    saved = read_object(path, AGAIN, ("about", "runs", "rows"))
    try:
        comparison = comparison_of(saved)
        return SavedStudy(folder=folder, comparison=comparison, content=study_content(comparison, saved["about"]))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}). {AGAIN}") from error


def comparison_of(saved: Mapping[str, Any]) -> Comparison:
    """The comparison that `Comparison.to_dict` wrote."""
    runs = [Run(**known(Run, run)) for run in saved["runs"]]
    for run in runs:
        if not run.losses or not isinstance(run.arm, str) or not isinstance(run.seed, int):
            raise ValueError(f"a run of {run.arm!r} with seed {run.seed!r} has no losses")
        if not isinstance(run.folder, str) or not isinstance(run.depth, Mapping):
            raise ValueError(f"the run of {run.arm!r} with seed {run.seed!r} has folder {run.folder!r}")
    if not runs:
        raise ValueError("it has no runs")
    return Comparison(runs=runs, rows=[row_of(row) for row in saved["rows"]])


def known(cls: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `cls`; a later version may have written more."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in content.items() if name in names}


def row_of(content: Mapping[str, Any]) -> Row:
    fields = known(Row, content)
    for name in ("difference", "tokens_per_second", "memory"):
        fields[name] = estimate_of(fields.get(name))
    fields["speed_ups"] = {axis: estimate_of(e) for axis, e in fields["speed_ups"].items()}
    fields["crossings"] = {axis: [Crossing(**c) for c in each] for axis, each in fields["crossings"].items()}
    return Row(**fields)


def estimate_of(content: Mapping[str, Any] | None) -> Estimate | None:
    return None if content is None else Estimate(**content)


def study_content(comparison: Comparison, about: Mapping[str, Any]) -> dict[str, Any]:
    """Verdicts and tables as on the study's own page."""
    cost = [list(cost_cells(row)) for row in comparison.rows]
    settings = about.get("settings", {})
    facts = {name: about[name] for name in ("command", "machine", "data") if name in about}
    failures = {f"failed: {label}": why for label, why in about.get("failures", {}).items()}
    return {
        "verdicts": [str(line) for line in verdict_lines(comparison)],
        "losses": {"headings": list(LOSS_HEADINGS), "cells": [list(row) for row in loss_cells(comparison)]},
        "cost": {"headings": list(COST_HEADINGS), "cells": cost, "note": COST_NOTE.replace("`", "")},
        "about": {name: str(value) for name, value in {**facts, **settings, **failures}.items()},
    }


def choose_runs(
    study: SavedStudy, progress: Callable[[int], None] = lambda done: None
) -> tuple[list[SavedRun], list[Arm]]:
    """One run for each arm, the first seed that has most data, and what all seeds show at their end."""
    shown, arms, done = [], [], 0
    for label in study.comparison.arms:
        candidates: list[tuple[int, SavedRun]] = []
        for seed, compared in sorted(study.comparison.of(label).items()):
            candidates.append((seed, read_member(study.folder, compared)))
            progress(done := done + 1)
        _, best = max(candidates, key=lambda pair: (amount_of_data(pair[1]), -pair[0]))
        shown.append(best)
        arms.append(make_arm(label, candidates, study))
        for _, run in candidates:  # the other seeds are not shown: only what was observed is kept
            if run is not best:
                run.lines, run.snapshots = [], []
    return shown, arms


def read_member(folder: Path, run: Run) -> SavedRun:
    """A run of a study by its folder; where that is not there, what comparison.json holds of it."""
    name = f"{run.arm} (seed {run.seed})"
    inside = not Path(run.folder).is_absolute() and ".." not in Path(run.folder).parts
    path = folder / (run.folder if inside and run.folder else "none")  # nothing is read or measured outside the study
    if is_run(path):
        return read_run_folder(path, name)
    columns = zip(run.tokens, run.seconds, run.losses, strict=False)
    lines = [{"kind": "validation", "step": 0, "tokens": t, "seconds": s, "loss": loss} for t, s, loss in columns]
    lines += [dict(run.depth)] if run.depth else []
    return SavedRun(
        folder=path,
        name=name,
        lines=lines,
        result={"parameters": run.parameters, "flops": run.flops, "tokens_per_second": run.tokens_per_second},
        missing=[f"The run's folder is not there; all that is shown comes from {STUDY_FILE}."],
    )


def amount_of_data(run: SavedRun) -> tuple[int, ...]:
    """What a report can show of a run: measurements first, then what measures them, then recordings."""
    measured = (run.trace is not None) + (run.ablation is not None)
    return measured, int(run.has_weights), min(len(run.snapshots), 1), len(run.of_kind("depth"))


def make_arm(label: str, runs: Sequence[tuple[int, SavedRun]], study: SavedStudy) -> Arm:
    first = runs[0][1]
    lines = {seed: run.depth for seed, run in study.comparison.of(label).items()}
    observations = [observe(run, seed, lines.get(seed)) for seed, run in runs]
    return Arm(
        label=label,
        mechanism=mechanism_of(first),
        depth=first.depth,
        dim=first.dim,
        observations=[o for o in observations if o is not None],
    )


PAPER = {"window": "none", "mixing": "softmax", "heads": "1", "key_norm": "true", "score": "none"}  # of its models


def mechanism_of(run: SavedRun) -> str:
    """Its name, if the run's form of it is the paper's; otherwise with what is different."""
    if run.kv_mechanism is not None:
        return f"{run.mechanism}+{run.kv_mechanism}"
    options = {key: str(value).lower() for key, value in run.choice("mixer").items()}
    other = [f"{key}={options[key]}" for key, value in PAPER.items() if options.get(key, value) != value]
    return " ".join([run.mechanism, *other])


def arms_of_runs(runs: Sequence[SavedRun]) -> list[Arm]:
    """Single runs as arms: those of the same mechanism, options and size are seeds of one."""
    groups: dict[Any, list[SavedRun]] = {}
    for run in runs:
        options = tuple(sorted((key, str(value)) for key, value in run.choice("mixer").items()))
        groups.setdefault((mechanism_of(run), options, run.depth, run.dim), []).append(run)
    arms = []
    for (mechanism, _, depth, dim), members in groups.items():
        seeds: dict[int, SavedRun] = {}
        for run in members:
            seeds.setdefault(0 if run.seed is None else run.seed, run)  # a pair needs one run for each seed
        found = [o for seed, run in seeds.items() if (o := observe(run, seed)) is not None]
        arms.append(Arm(label=members[0].name, mechanism=mechanism, depth=depth, dim=dim, observations=found))
    return arms
