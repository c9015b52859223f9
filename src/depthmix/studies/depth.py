"""The last recording of each run: curves over depth, and a table with a row for each arm."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from depthmix.studies.comparison import Comparison, Run

Line = Mapping[str, Any]  # of metrics.jsonl, kind "depth"; lines of 0.1 have only some of the fields


def root_mean_square(values: Sequence[float]) -> float:
    return statistics.fmean(v * v for v in values) ** 0.5


def state_norms(line: Line) -> list[float]:
    return [root_mean_square(norms) for norms in line["state_norm"]]


def early_over_late(gradients: Sequence[float]) -> float:
    quarter = max(1, len(gradients) // 4)
    return statistics.fmean(gradients[:quarter]) / statistics.fmean(gradients[-quarter:])


CURVES: dict[str, Callable[[Line], Sequence[float]]] = {  # one number for each sublayer
    "norm of the state": state_norms,
    "‖v‖ / ‖state‖": lambda line: line["contribution"],
    "norm of the output": lambda line: line["output_norm"],
    "norm of the output's gradient": lambda line: line["gradient_norm"],
}
COLUMNS: dict[str, tuple[Callable[[Line], float], str]] = {  # one number for each run, and its format
    "largest state norm": (lambda line: max(state_norms(line)), ".3g"),
    "smallest ‖v‖/‖state‖": (lambda line: min(line["contribution"]), ".3g"),
    "gradient norm, early / late": (lambda line: early_over_late(line["gradient_norm"]), ".2f"),
    "embedding's share": (lambda line: line["sinks"][0], ".3f"),
    "embedding's share before attention": (lambda line: statistics.fmean(line["embedding_share"][2:-1:2]), ".3f"),
    "embedding's share before MLP": (lambda line: statistics.fmean(line["embedding_share"][1:-1:2]), ".3f"),
    "newest source's share": (lambda line: statistics.fmean(line["locality"][1:-1]), ".3f"),
    "effective rank": (lambda line: line["effective_rank"], ".2f"),
    "stream distance": (lambda line: line["stream_distance"][-1], ".3f"),
    "recording time": (lambda line: line["recording_seconds"] / line["processor_seconds"], ".2%"),
}
HEADINGS = ("arm", *COLUMNS, "shares computed from")
NOTE = (
    "From the last recording of each run on a fixed batch, means over seeds. State norm: that of what a write changes "
    "(the stream; the running sum of a block; a new output; root mean square over streams). Gradient norm: mean over "
    "the outputs of the first quarter of the sublayers, divided by that of the last quarter. Embedding's share: its "
    "share of all reads, in the weights over sources or, if there are none, in |M|; then its mean over the reads "
    "before attention and before MLPs. Newest source's share: the mean share of the newest source that a row reads. "
    "Stream distance: distance between streams, divided by their norm, after the last write. Recording time: "
    "processor time of all recordings, as a share of the run's."
)


def recorded(runs: Sequence[Run], measure: Callable[[Line], Any]) -> list[Any]:
    """`measure` of the last recording of every run that has the fields."""
    values = []
    for run in runs:
        try:
            value = measure(run.depth)
            values.append([float(v) for v in value] if isinstance(value, list) else float(value))
        except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
            continue
    return values


def curve(runs: Sequence[Run], name: str) -> list[float]:
    """The mean over runs, by sublayer; empty if none has recorded it."""
    return [statistics.fmean(column) for column in zip(*recorded(runs, CURVES[name]), strict=True)]


def depth_cells(comparison: Comparison) -> list[list[str]]:
    cells = []
    for arm in comparison.arms:
        runs = [*comparison.of(arm).values()]
        row = [arm]
        for measure, form in COLUMNS.values():
            values = recorded(runs, measure)
            row.append(f"{statistics.fmean(values):{form}}" if values else "")
        row.append(", ".join(dict.fromkeys(str(run.depth["shares_of"]) for run in runs if "shares_of" in run.depth)))
        cells.append(row)
    return cells
