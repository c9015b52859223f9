"""How a run came to where it is: losses, magnitudes over depth and what layers read, over training.

Axes: S recording, P snapshot, L sublayers, n = L + 1 rows, C source that a mechanism names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from depthmix.analysis.evidence import Line, number, numbers, root_mean_square
from depthmix.report.packed import mean, pack, plain, thinned
from depthmix.report.reading import SavedRun, Snapshot

MOST_POINTS = 400  # of a curve of losses: about one for each pixel of a panel
MOST_RECORDINGS = 64
SNAPSHOT_BYTES = 80_000  # of all snapshots of a run in the page
FEWEST_SNAPSHOTS = 3


def state_norms(line: Line) -> list[float]:
    """Of what each write makes or changes; of several streams the root mean square."""
    given = line.get("state_norm")
    return [root_mean_square(numbers(norms)) for norms in given] if isinstance(given, list) else []


def field(name: str) -> Callable[[Line], list[float]]:
    return lambda line: numbers(line.get(name))


PER_SUBLAYER: dict[str, Callable[[Line], list[float]]] = {
    "state_norm": state_norms,
    "output_norm": field("output_norm"),
    "contribution": field("contribution"),
    "gradient_norm": field("gradient_norm"),
}
PER_ROW: dict[str, Callable[[Line], list[float]]] = {
    "read_norm": field("read_norm"),
    "entropy": field("weight_entropy"),
    "embedding_share": field("embedding_share"),
    "locality": field("locality"),
}


def curves(run: SavedRun) -> dict[str, Any]:
    """Losses against tokens and seconds: a training point is the mean of the steps around it, a validation itself."""
    train, validation = run.of_kind("train"), run.of_kind("validation")
    return {"train": curve(train, MOST_POINTS), "validation": curve(validation, MOST_POINTS)}


def curve(lines: Sequence[Line], most: int) -> dict[str, Any]:
    lines = [line for line in lines if math.isfinite(number(line.get("tokens")))]
    size = max(1, -(-len(lines) // most))
    groups = [lines[k : k + size] for k in range(0, len(lines), size)]
    return {
        "tokens": [plain(number(group[-1].get("tokens"))) for group in groups],
        "seconds": [plain(number(group[-1].get("seconds"))) for group in groups],
        "loss": [plain(mean(numbers([line.get("loss") for line in group]))) for group in groups],
    }


def over_training(run: SavedRun) -> dict[str, Any] | None:
    """Magnitudes and reads of each recording, in which the sums of blocks are named as what they are."""
    lines, depth = run.of_kind("depth"), run.depth
    lines = [line for line in lines if math.isfinite(number(line.get("step")))]
    if not lines or not depth:
        return None
    lines = [lines[k] for k in thinned(len(lines), MOST_RECORDINGS)]
    series = {name: pack([padded(read(line), depth) for line in lines]) for name, read in PER_SUBLAYER.items()}
    series |= {name: pack([padded(read(line), depth + 1) for line in lines]) for name, read in PER_ROW.items()}
    if any(partial_rows(run)):
        series["partial_norm"] = series["state_norm"]  # there a write changes the running sum of a block alone
    return {
        "tokens": [plain(number(line.get("tokens"))) for line in lines],
        "steps": [int(number(line["step"])) for line in lines],
        "series": series,
    }


def padded(values: Sequence[float], length: int) -> list[float]:
    return ([*values] + [math.nan] * length)[:length]


def partial_rows(run: SavedRun) -> list[bool]:
    """For each row, whether its newest source is a sum that still grows; empty if that is not known."""
    if run.snapshots and run.snapshots[-1].partial:
        return run.snapshots[-1].partial
    return [bool(flag) for flag in run.trace.content.get("partial") or []] if run.trace is not None else []


def packed_snapshots(run: SavedRun) -> dict[str, Any] | None:
    """M, weights and values over training: the first, the last, and as many between them as there is room for."""
    if not run.snapshots:
        return None
    first = run.snapshots[0]
    size = 2 * sum(a.size for a in (first.M, first.weights, first.values) if a is not None)
    shown = [run.snapshots[k] for k in thinned(len(run.snapshots), max(FEWEST_SNAPSHOTS, SNAPSHOT_BYTES // size))]
    tokens = {number(line.get("step")): number(line.get("tokens")) for line in run.lines}
    return {
        "steps": [s.step for s in shown],
        "tokens": [plain(tokens.get(s.step, math.nan)) for s in shown],
        "M": pack(np.stack([s.M for s in shown]), "f16"),
        "weights": stacked(shown, "weights"),
        "values": stacked(shown, "values"),
        "source_names": first.source_names,
        "reads": first.reads,
        "partial": first.partial,
    }


def stacked(snapshots: Sequence[Snapshot], name: str) -> dict[str, Any] | None:
    arrays = [getattr(snapshot, name) for snapshot in snapshots]
    return None if arrays[0] is None else pack(np.stack(arrays), "f16")


def correlate(first: np.ndarray, second: np.ndarray) -> tuple[float, list[float]]:
    """How alike two matrices M [n, n] read: Pearson's correlation over all rows together, and of each row.

    Each row of |M| is divided by its sum, and the equal share 1/(r+1) is subtracted from its r+1 sources. What is left
    sums to 0 in every row, so the correlation of a row is Pearson's. Rows of fewer than three sources have none (two
    numbers that sum to 0 always have ±1), and so have rows whose weights are equal.
    """
    a, b = deviations(first), deviations(second)
    rows = [math.nan, math.nan, *(cosine(x, y) for x, y in zip(a[2:], b[2:], strict=True))]
    return cosine(np.concatenate(a[2:]), np.concatenate(b[2:])) if len(a) > 2 else math.nan, rows[: len(a)]


def deviations(M: np.ndarray) -> list[np.ndarray]:
    """For each row, the shares of its sources beyond their equal share."""
    rows = []
    for r, row in enumerate(np.abs(M)):
        total = row[: r + 1].sum()
        rows.append(row[: r + 1] / total - 1 / (r + 1) if total > 0 else np.zeros(r + 1))
    return rows


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / size if size > 1e-12 else math.nan


def without_embedding(M: np.ndarray) -> np.ndarray:
    """M [n − 1, n − 1] of the outputs alone: row r + 1 and column i + 1 of M."""
    return M[1:, 1:]


def patterns(runs: Sequence[SavedRun]) -> list[dict[str, Any]] | None:
    """How much of Full AttnRes's pattern each run of Block AttnRes keeps, for runs of equal depth."""
    found = []
    for block in runs:
        for full in runs:
            if (block.mechanism, full.mechanism) == ("block_attnres", "attnres") and block.depth == full.depth:
                matrices = [last_matrix(run) for run in (block, full)]
                if matrices[0] is not None and matrices[1] is not None:
                    overall, rows = correlate(matrices[0], matrices[1])
                    words: Mapping[str, Any] = {"correlation": overall, "by_row": rows}
                    found.append(plain({"block": block.name, "full": full.name, **words}))
    return found or None


def last_matrix(run: SavedRun) -> np.ndarray | None:
    """The mean M at the end: of the trace, which reads most tokens, else of the last snapshot."""
    if run.trace is not None:
        return run.trace.tensors["M_mean"].mean(0)
    return run.snapshots[-1].M if run.snapshots else None
