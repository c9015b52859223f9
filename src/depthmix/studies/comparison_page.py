"""The page of a comparison, in Markdown: generated, not typed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from depthmix.studies import depth
from depthmix.studies.comparison import AXES, MARGIN, SPREAD, Axis, Comparison, Crossing, Row
from depthmix.studies.comparison_figures import Sweeps
from depthmix.studies.page import Provenance, edge_notes, figure_lines, markdown_table, provenance_lines, sweep_table
from depthmix.studies.statistics import Estimate


def render(
    comparison: Comparison, sweeps: Sweeps, provenance: Provenance, figures: Mapping[str, Path], page_folder: Path
) -> str:
    """Links to figures are relative to `page_folder`, the folder of the page."""
    lines = ["# Comparison", "", f"    {provenance.command}", ""]
    lines += [f"- {row.verdict}" for row in comparison.rows] or ["One arm: nothing to compare it with."]
    lines += ["", "## Final validation loss", "", *markdown_table(LOSS_HEADINGS, loss_cells(comparison))]
    lines += ["", LOSS_NOTE, *figure_lines(figures, "differences", page_folder)]
    lines += figure_lines(figures, "tokens", page_folder) + figure_lines(figures, "seconds", page_folder)
    if comparison.rows:
        lines += ["", "## Cost", "", *markdown_table(COST_HEADINGS, [cost_cells(row) for row in comparison.rows])]
        lines += ["", COST_NOTE]
        lines += [
            "",
            "## Effective speed-up",
            "",
            *markdown_table(SPEED_HEADINGS, [speed_cells(row) for row in comparison.rows]),
        ]
        lines += ["", SPEED_NOTE, *unknown_lines(comparison.rows)]
    if any(run.depth for run in comparison.runs):
        lines += ["", "## Over depth", "", *markdown_table(depth.HEADINGS, depth.depth_cells(comparison))]
        lines += ["", depth.NOTE, *figure_lines(figures, "depth", page_folder)]
    if sweeps:
        lines += ["", "## Learning rates", "", *sweep_table(sweeps), *edge_notes(sweeps)]
        lines += figure_lines(figures, "learning_rates", page_folder)
    lines += provenance_lines(provenance)
    return "\n".join(lines) + "\n"


LOSS_HEADINGS = ("arm", "parameters", "lr", "seeds", "final loss", "sd", "against", "difference", "95 % interval")
LOSS_NOTE = (
    "Nats a token, on the same validation tokens for every run. Differences are paired by seed (same order of the "
    "data, same initial weights where shapes agree), their interval is Student's over seeds. Each interval holds with "
    "95 % on its own: among many arms some will miss."
)
COST_HEADINGS = ("arm", "against", "tokens/s", "95 % interval", "peak memory", "parameters")
COST_NOTE = (
    "Ratios to the baseline's, paired by seed; memory is that of the whole process. Each run is a process at a time of "
    "its own, so tokens/s and wall-clock hold what else the machine did meanwhile. They are undecided where a control "
    f"(the baseline once more) differs from its baseline by more than {MARGIN}, or the largest ratio of a seed is more "
    f"than {SPREAD} times the smallest; without a control they are not checked. The place for speed is `depthmix "
    "bench`, where mechanisms take turns in one process."
)
SPEED_HEADINGS = ("arm", "against", *AXES.values(), "baseline's tokens for the same loss", "curves cross at")
SPEED_NOTE = (
    "How much of the baseline's tokens, seconds and FLOPs one of the arm's is worth, where the better of two runs has "
    "reached the final loss of the other. There the better run is still on its way through its learning-rate schedule, "
    "the other at its end; with a schedule of its own length the better one would be there sooner, so the factors "
    "understate how far from 1 they are. With several seeds curves cross only where the paired interval excludes 0 on "
    "both sides."
)
UNKNOWN = "cannot tell"


def loss_cells(comparison: Comparison) -> list[Sequence[str]]:
    against = {row.arm: row for row in comparison.rows}
    cells: list[Sequence[str]] = []
    for arm in comparison.arms:
        runs = [*comparison.of(arm).values()]
        finals = [run.final for run in runs]
        spread = f"{statistics.stdev(finals):.4f}" if len(finals) > 1 else ""
        row = against.get(arm)
        d = row.difference if row is not None else None
        mine = (
            arm,
            f"{runs[0].parameters:,}",
            f"{runs[0].lr:g}",
            str(len(runs)),
            f"{statistics.mean(finals):.4f}",
            spread,
        )
        cells.append((*mine, row.baseline if row else "", signed(d.mean) if d else "", interval(d, "+.4f")))
    return cells


def signed(value: float) -> str:
    return f"{round(value, 4) + 0.0:+.4f}"  # no minus before a zero


def cost_cells(row: Row) -> Sequence[str]:
    speed, memory = row.tokens_per_second, row.memory
    share = "" if row.parameters is None else f"{row.parameters:.4f}"
    speed_pair = (factor(speed), interval(speed, ".3f"))
    pair = (f"undecided ({row.undecided})", "") if row.undecided else speed_pair
    return (row.arm, row.baseline, *pair, factor(memory), share)


def speed_cells(row: Row) -> Sequence[str]:
    if not row.seeds:
        return (row.arm, row.baseline, *[""] * (len(AXES) + 2))
    ups = {axis: UNKNOWN if row.unknown else f"{factor(e)} {bracketed(e)}".strip() for axis, e in row.speed_ups.items()}
    axes: list[Axis] = ["tokens", "seconds"]
    if row.undecided:
        ups["seconds"], axes = "undecided", ["tokens"]
    crossed = [crossed_at(row.crossings[axis], axis) for axis in axes if row.crossings[axis]]
    return (
        row.arm,
        row.baseline,
        *(ups[axis] for axis in AXES),
        needed_cell(row),
        "; ".join(crossed) or (UNKNOWN if row.unknown else "nowhere"),
    )


def needed_cell(row: Row) -> str:
    if (need := row.needed.get("tokens")) is not None:
        return amount(need, "tokens")
    beyond = row.difference is not None and any(value < 0 for value in row.difference.values)
    return "beyond the run" if beyond else UNKNOWN


def unknown_lines(rows: Sequence[Row]) -> list[str]:
    """Why the table has no factors for some arms, and what to do."""
    remedy = "Validate more often: set a smaller run.validate_every"
    return [line for row in rows if row.unknown for line in ("", f"{row.arm}: {UNKNOWN}, {row.unknown}. {remedy}.")]


def crossed_at(crossings: Sequence[Crossing], axis: Axis) -> str:
    """The last one matters; curves of one seed that run side by side cross over and over."""
    last = crossings[-1]
    before = f", the last of {len(crossings)} times" if len(crossings) > 1 else ""
    return f"{amount(last.at, axis)} ({last.ahead} ahead after{before})"


def amount(value: float, axis: Axis) -> str:
    return f"{value:,.0f} s" if axis == "seconds" else f"{value:,.0f} tokens"


def factor(e: Estimate | None) -> str:
    return "" if e is None else f"{e.mean:.3f}×"


def interval(e: Estimate | None, form: str) -> str:
    return "" if e is None or e.low is None or e.high is None else f"{e.low:{form}} to {e.high:{form}}"


def bracketed(e: Estimate | None) -> str:
    words = interval(e, ".2f")
    return f"({words})" if words else ""
