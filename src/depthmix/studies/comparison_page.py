"""The page of a comparison, in Markdown: generated, not typed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from depthmix.analysis.statistics import CONFIDENCE, Estimate
from depthmix.studies import depth
from depthmix.studies.comparison import AXES, MARGIN, SPREAD, Axis, Comparison, Crossing, Row, interval_of
from depthmix.studies.comparison_figures import Sweeps
from depthmix.studies.page import Provenance, edge_notes, figure_lines, markdown_table, provenance_lines, sweep_table


def render(
    comparison: Comparison, sweeps: Sweeps, provenance: Provenance, figures: Mapping[str, Path], page_folder: Path
) -> str:
    """Links to figures are relative to `page_folder`, the folder of the page."""
    lines = ["# Comparison", "", f"    {provenance.command}", ""]
    lines += [f"- {line}" for line in verdict_lines(comparison)]
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


def verdict_lines(comparison: Comparison) -> list[str]:
    """What the page begins with and the command line prints: every verdict, and what limits all of them."""
    if not comparison.rows:
        return ["One arm: there is nothing to compare it with."]
    compared = [row for row in comparison.rows if row.seeds]
    lines = [row.verdict for row in comparison.rows]
    if len(compared) > 1 and any(row.difference is not None and row.difference.low is not None for row in compared):
        lines.append(
            f"Each {CONFIDENCE:.0%} interval holds on its own: with {len(compared)} arms, the chance that at least one "
            "of them misses the true difference is larger."
        )
    controls = {row.baseline: row.control for row in compared if row.control is not None}
    for base, deviation in controls.items():
        lines.append(f"Control: {base}, trained again, differs from itself by {deviation:.2f} in tokens/s.")
    if compared and not controls:
        lines.append(
            "No control: nothing shows how much tokens/s vary on this machine by themselves. Repeat the baseline in "
            "--mixers to add one."
        )
    return lines


LOSS_HEADINGS = ("arm", "parameters", "lr", "seeds", "final loss", "sd", "against", "difference", "95 % interval")
LOSS_NOTE = (
    "Nats per token, on the same validation tokens for every run. Differences are paired by seed (same order of the "
    "data, same initial weights where shapes agree); their interval is Student's, over seeds."
)
COST_HEADINGS = ("arm", "against", "tokens/s", "95 % interval", "peak memory", "parameters")
COST_NOTE = (
    "Ratios to the baseline, paired by seed; memory is that of the whole process. Runs are separate processes at "
    "different times, so tokens/s and wall-clock include what else the machine did meanwhile. They are undecided where "
    f"a control (the baseline, trained again) differs from its baseline by more than {MARGIN}, or where the largest "
    f"ratio of a seed is more than {SPREAD} times the smallest; without a control they are not checked. To measure "
    "speed, use `depthmix bench`, where mechanisms take turns in one process."
)
SPEED_HEADINGS = ("arm", "against", *AXES.values(), "baseline's tokens for the same loss", "curves cross at")
SPEED_NOTE = (
    "How much of the baseline's tokens, seconds and FLOPs one of the arm's is worth, at the point where the better of "
    "two runs reaches the final loss of the other. There the better run is still in the middle of its learning-rate "
    "schedule and the other at the end; with a schedule of that length the better run would reach this loss sooner, so "
    "the factors are biased towards 1. With several seeds, curves count as crossing only where the paired interval "
    "excludes 0 on both sides."
)
UNKNOWN = "cannot tell"


def console_losses(comparison: Comparison) -> tuple[Sequence[str], list[Sequence[str]]]:
    """The table of the losses for 80 columns."""
    shown = [k for k, heading in enumerate(LOSS_HEADINGS) if heading not in ("parameters", "sd", "against")]
    return [LOSS_HEADINGS[k] for k in shown], [[row[k] for k in shown] for row in loss_cells(comparison)]


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
        cells.append((*mine, row.baseline if row else "", signed(d.mean) if d else "", interval_of(d, "+.4f")))
    return cells


def signed(value: float) -> str:
    return f"{round(value, 4) + 0.0:+.4f}"  # no minus before a zero


def cost_cells(row: Row) -> Sequence[str]:
    speed, memory = row.tokens_per_second, row.memory
    share = "" if row.parameters is None else f"{row.parameters:.4f}"
    speed_pair = (factor(speed), interval_of(speed, ".3f"))
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
    return [
        line for row in rows if row.unknown for line in ("", f"{row.arm}: {UNKNOWN}, because {row.unknown}. {remedy}.")
    ]


def crossed_at(crossings: Sequence[Crossing], axis: Axis) -> str:
    """The last one matters: curves of one seed that lie close together cross many times."""
    last = crossings[-1]
    before = f", the last of {len(crossings)} crossings" if len(crossings) > 1 else ""
    return f"{amount(last.at, axis)} ({last.ahead} ahead after{before})"


def amount(value: float, axis: Axis) -> str:
    return f"{value:,.0f} s" if axis == "seconds" else f"{value:,.0f} tokens"


def factor(e: Estimate | None) -> str:
    return "" if e is None else f"{e.mean:.3f}×"


def bracketed(e: Estimate | None) -> str:
    words = interval_of(e, ".2f")
    return f"({words})" if words else ""
