"""What the last recording of each run says about its layers: curves over depth, and a row of a table for each arm."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from depthmix.studies.comparison import Comparison, Run

Line = Mapping[str, Any]  # of metrics.jsonl, kind "depth"; those of 0.1 have a few of the fields


def root_mean_square(values: Sequence[float]) -> float:
    return statistics.fmean(v * v for v in values) ** 0.5


def state_norms(line: Line) -> list[float]:
    return [root_mean_square(norms) for norms in line["state_norm"]]


def early_over_late(gradients: Sequence[float]) -> float:
    quarter = max(1, len(gradients) // 4)
    return statistics.fmean(gradients[:quarter]) / statistics.fmean(gradients[-quarter:])


CURVES: dict[str, Callable[[Line], Sequence[float]]] = {  # a number for each sublayer
    "norm of what the state holds": state_norms,
    "‖v‖ / ‖state‖": lambda line: line["contribution"],
    "norm of the output": lambda line: line["output_norm"],
    "norm of the output's gradient": lambda line: line["gradient_norm"],
}
COLUMNS: dict[str, tuple[Callable[[Line], float], str]] = {  # a number, and how it is written
    "largest state": (lambda line: max(state_norms(line)), ".3g"),
    "least ‖v‖/‖state‖": (lambda line: min(line["contribution"]), ".3g"),
    "gradient, early over late": (lambda line: early_over_late(line["gradient_norm"]), ".2f"),
    "embedding's share": (lambda line: line["sinks"][0], ".3f"),
    "before attention": (lambda line: statistics.fmean(line["embedding_share"][2:-1:2]), ".3f"),
    "before MLP": (lambda line: statistics.fmean(line["embedding_share"][1:-1:2]), ".3f"),
    "newest source's share": (lambda line: statistics.fmean(line["locality"][1:-1]), ".3f"),
    "effective rank": (lambda line: line["effective_rank"], ".2f"),
    "streams apart": (lambda line: line["stream_distance"][-1], ".3f"),
    "recording": (lambda line: line["recording_seconds"] / line["processor_seconds"], ".2%"),
}
HEADINGS = ("arm", *COLUMNS, "shares of")
NOTE = (
    "From the last recording of each run on a fixed batch, means over seeds. State: norm of what the state holds after "
    "a write (the stream; the running sum of a block; a new output; root mean square over streams). Gradient: mean "
    "norm over the outputs of the first quarter of the sublayers, over that of the last. Embedding's share: of all "
    "reading, of the weights over sources or, where there are none, of |M|; then its mean over the reads before "
    "attention and before MLPs, and the mean share of the newest source that a row reads. Streams apart: "
    "distance over norm after the last write. Recording: processor time of all recordings, as a share of the run's."
)


def recorded(runs: Sequence[Run], what: Callable[[Line], Any]) -> list[Any]:
    """Of all runs whose last recording has it."""
    found = []
    for run in runs:
        try:
            value = what(run.depth)
            found.append([float(v) for v in value] if isinstance(value, list) else float(value))
        except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
            continue
    return found


def curve(runs: Sequence[Run], name: str) -> list[float]:
    """Mean over runs, by sublayer; empty where none has recorded it."""
    return [statistics.fmean(column) for column in zip(*recorded(runs, CURVES[name]), strict=True)]


def depth_cells(comparison: Comparison) -> list[list[str]]:
    cells = []
    for arm in comparison.arms:
        runs = [*comparison.of(arm).values()]
        row = [arm]
        for what, form in COLUMNS.values():
            found = recorded(runs, what)
            row.append(f"{statistics.fmean(found):{form}}" if found else "")
        row.append(", ".join(dict.fromkeys(str(run.depth["shares_of"]) for run in runs if "shares_of" in run.depth)))
        cells.append(row)
    return cells
