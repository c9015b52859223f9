"""The document that the page of a report draws: one JSON object from what runs and a study have saved.

Axes: T' token, G group of channels, H head, n = L + 1 rows, C source.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthmix.analysis.evidence import Evidence
from depthmix.analysis.health import check_health
from depthmix.report.dynamics import curves, over_training, packed_snapshots, patterns
from depthmix.report.facts import facts, hashes
from depthmix.report.findings import check_findings
from depthmix.report.observations import Arm
from depthmix.report.packed import pack, plain
from depthmix.report.reading import (
    ABLATION,
    PROBLEMS,
    TRACE,
    SavedRun,
    SavedTrace,
    attempt,
    check_folder,
    is_study,
    read_run_folder,
    unique_names,
)
from depthmix.report.study import SavedStudy, arms_of_runs, choose_runs, read_study
from depthmix.support.files import version

FORMAT = 1
TENSORS = (  # of trace.safetensors, as they are; the tables of tokens are apart
    *("M_mean", "M_std", "M_quantiles", "contribution", "share"),
    *("weights_mean", "weights_std", "values_mean"),
)
HALF = ("M_std", "M_quantiles", "weights_std")  # drawn as colours and bands only
TABLE_BYTES = 320_000  # of one run's table of tokens: six runs and the page then stay below 6 MB
NO_TRACE = "There is no trace of a longer text, so matrices and row statistics are those of training's fixed batch"
NO_ABLATION = "There is no ablation, so causal importance is not shown"
SAVED_ONLY = "`depthmix report` without --saved-only measures it"
NO_WEIGHTS = "this folder has no weights to measure with"


@dataclass(kw_only=True)
class Opened:
    """What a report is made of."""

    title: str
    runs: list[SavedRun]  # shown, one for each arm of a study
    arms: list[Arm]  # with all seeds
    study: SavedStudy | None = None


def open_folders(folders: Sequence[Path], progress: Callable[[int], None] = lambda done: None) -> Opened:
    """Read one study, or any number of runs; `progress` is called with the number of runs read."""
    if not folders:
        raise ValueError("no folder is given; expected those of runs, or that of one study")
    for folder in folders:
        check_folder(folder)
    studies = [folder for folder in folders if is_study(folder)]
    if studies and len(folders) > 1:
        raise ValueError(
            f"{studies[0]} is a study and not the only folder; expected either one study or runs. Its runs are under "
            f"{studies[0] / 'runs'}"
        )
    if studies:
        study = read_study(studies[0])
        runs, arms = choose_runs(study, progress)
        return Opened(title=f"Study {studies[0].resolve().name}", runs=runs, arms=arms, study=study)
    runs = []
    for folder, name in zip(folders, unique_names(folders), strict=True):
        runs.append(read_run_folder(folder, name))
        progress(len(runs))
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    return Opened(title=title, runs=runs, arms=arms_of_runs(runs))


def make_document(opened: Opened, command: str) -> dict[str, Any]:
    """The whole document of a report; every number in it is finite or null."""
    noted = opened.runs[0].missing if opened.runs else []
    findings = attempt(noted, "The findings cannot be checked", lambda: check_findings(opened.arms))
    compared = attempt(noted, "Patterns cannot be compared", lambda: patterns(opened.runs))
    study = None
    if opened.study is not None:
        content = opened.study.content
        shown = ", ".join(run.name for run in opened.runs)
        note = f"one run for each arm, the first seed with most data: {shown}"
        study = {**content, "about": {**content["about"], "runs shown": note}}
    document = {
        "format": FORMAT,
        "kind": "report",
        "title": opened.title,
        "made": describe_making(command),
        "study": study,
        "findings": None if findings is None else [finding.to_dict() for finding in findings],
        "patterns": compared,
        "runs": [describe_run(run) for run in opened.runs],
    }
    checked: dict[str, Any] = plain(document)
    return checked


def describe_making(command: str) -> dict[str, str]:
    return {
        "command": command,
        "depthmix": version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def describe_run(run: SavedRun) -> dict[str, Any]:
    """One run as the page draws it; a part that cannot be shown is null, and `missing` says why."""
    missing = run.missing
    options = {key: value for key, value in run.choice("mixer").items() if key != "name"}
    described = {
        "name": run.name,
        "mechanism": run.mechanism,
        "options": options,
        "kv_mechanism": run.kv_mechanism,
        "depth": run.depth,
        "kinds": run.kinds,
        "dim": run.dim or 0,
        "seed": run.seed,
        "finished": run.result is not None,
        "facts": attempt(missing, "The facts cannot be shown", lambda: facts(run)) or [],
        "hashes": hashes(run),
        "curves": curves(run),
        "over_training": attempt(missing, "Magnitudes over training cannot be shown", lambda: over_training(run)),
        "snapshots": attempt(missing, "The snapshots cannot be shown", lambda: packed_snapshots(run)),
        "trace": attempt(missing, PROBLEMS[TRACE], lambda: describe_trace(run.trace, missing)),
        "ablation": run.ablation,
        "health": attempt(missing, "Health cannot be checked", lambda: health_of(run)) or [],
    }
    explain_missing(run)
    return {**described, "missing": list(dict.fromkeys(missing))}


def explain_missing(run: SavedRun) -> None:
    """Why there is no trace and no ablation, unless something said so before."""
    reason = SAVED_ONLY if run.has_weights else NO_WEIGHTS
    said = "\n".join(run.missing)
    if run.trace is None and PROBLEMS[TRACE] not in said:
        run.missing.append(f"{NO_TRACE}: {reason}.")
    if run.ablation is None and PROBLEMS[ABLATION] not in said:
        run.missing.append(f"{NO_ABLATION}: {reason}.")


def health_of(run: SavedRun) -> list[dict[str, str]]:
    return [health.to_dict() for health in check_health(evidence_of(run))]


def evidence_of(run: SavedRun) -> Evidence:
    """What the checks of health need, from the trace and the recordings of training."""
    content = run.trace.content if run.trace is not None else {}
    tensors = run.trace.tensors if run.trace is not None else {}
    lines = run.of_kind("depth")
    weighted = (content or (lines[-1] if lines else {})).get("shares_of") == "weights"
    snapshot = run.snapshots[-1] if run.snapshots else None
    reads = content.get("reads") or (snapshot.reads if snapshot is not None else [])
    names = content.get("source_names") or (snapshot.source_names if snapshot is not None else [])
    parts = tensors.get("contribution")
    return Evidence(
        mechanism=run.mechanism,
        lines=lines,
        trace=content or None,
        reads=reads if weighted else None,
        names=names if weighted else (),
        M=tensors["M_mean"].mean(0).tolist() if tensors else None,
        contribution=None if parts is None else parts.tolist(),
        precision=str(run.section("run").get("precision", "float32")),
    )


def describe_trace(trace: SavedTrace | None, missing: list[str]) -> dict[str, Any] | None:
    if trace is None:
        return None
    content = {key: value for key, value in trace.content.items() if key != "table"}
    tensors = {
        name: pack(trace.tensors[name], "f16" if name in HALF else "f32") for name in TENSORS if name in trace.tensors
    }
    return {**content, "tensors": tensors, "table": token_table(trace, missing)}


def token_table(trace: SavedTrace, missing: list[str]) -> dict[str, Any] | None:
    """Matrices and weights of single tokens: the first of them, as many as there is room for."""
    saved, M = trace.content.get("table"), trace.tensors.get("table_M")
    if not isinstance(saved, dict) or M is None:
        return None
    weights = trace.tensors.get("table_weights")
    size = 2 * sum(array[0].size for array in (M, weights) if array is not None and len(array))
    count = min(len(M), len(saved["tokens"]), TABLE_BYTES // max(size, 1))
    if count < len(M):
        missing.append(f"To stay small, the page has matrices of {count} tokens, the first of {len(M)} in the trace.")
    return {
        "tokens": saved["tokens"][:count],
        "loss": saved["loss"][:count],
        "M": pack(grouped(M)[:count], "f16"),
        "weights": None if weights is None else pack(weights[:count], "f16"),
        "values": None,
        "source_names": trace.content.get("source_names") or [],
        "reads": trace.content.get("reads") or [],
    }


def grouped(M: np.ndarray) -> np.ndarray:
    """[T', G, n, n], also where there is one group without an axis of its own."""
    return M[:, None] if M.ndim == 3 else M
