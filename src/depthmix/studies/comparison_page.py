"""The page of a comparison, in Markdown: generated, not typed."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthmix.studies.comparison import AXES, MARGIN, SPREAD, Axis, Comparison, Crossing, Row
from depthmix.studies.comparison_figures import Sweeps
from depthmix.studies.statistics import Estimate

CAPTIONS = {
    "tokens": "Loss against tokens",
    "seconds": "Loss against wall-clock",
    "differences": "Paired differences of the final loss",
    "learning_rates": "Learning rates",
    "scaling": "Loss against compute",
}


@dataclass(frozen=True, kw_only=True)
class About:
    """How the runs were made, as the page and the JSON tell it."""

    command: str
    machine: str
    data: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)  # by run: why it has no result


def render(comparison: Comparison, sweeps: Sweeps, about: About, figures: Mapping[str, Path], beside: Path) -> str:
    """Links to figures are relative to `beside`, the folder of the page."""
    lines = ["# Comparison", "", f"    {about.command}", ""]
    lines += [f"- {row.verdict}" for row in comparison.rows] or ["One arm: nothing to compare it with."]
    lines += ["", "## Final validation loss", "", *table(LOSS_HEADINGS, loss_cells(comparison))]
    lines += ["", LOSS_NOTE, *picture(figures, "differences", beside)]
    lines += picture(figures, "tokens", beside) + picture(figures, "seconds", beside)
    if comparison.rows:
        lines += ["", "## Cost", "", *table(COST_HEADINGS, [cost_cells(row) for row in comparison.rows])]
        lines += ["", COST_NOTE]
        lines += [
            "",
            "## Effective speed-up",
            "",
            *table(SPEED_HEADINGS, [speed_cells(row) for row in comparison.rows]),
        ]
        lines += ["", SPEED_NOTE]
    if sweeps:
        lines += ["", "## Learning rates", "", *sweep_table(sweeps), *edge_notes(sweeps)]
        lines += picture(figures, "learning_rates", beside)
    lines += how(about)
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
    told = (f"undecided ({row.undecided})", "") if row.undecided else (factor(speed), interval(speed, ".3f"))
    return (row.arm, row.baseline, *told, factor(memory), share)


def speed_cells(row: Row) -> Sequence[str]:
    if not row.seeds:
        return (row.arm, row.baseline, *[""] * (len(AXES) + 2))
    ups = {axis: f"{factor(e)} {bracketed(e)}".strip() for axis, e in row.speed_ups.items()}
    axes: list[Axis] = ["tokens", "seconds"]
    if row.undecided:
        ups["seconds"], axes = "undecided", ["tokens"]
    need = row.needed.get("tokens")
    crossed = [crossed_at(row.crossings[axis], axis) for axis in axes if row.crossings[axis]]
    return (
        row.arm,
        row.baseline,
        *(ups[axis] for axis in AXES),
        "beyond the run" if need is None else amount(need, "tokens"),
        "; ".join(crossed) or "nowhere",
    )


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


def sweep_table(sweeps: Sweeps) -> list[str]:
    lrs = sorted({lr for losses in sweeps.values() for lr in losses})
    cells = []
    for arm, losses in sweeps.items():
        best = best_of(losses)
        cells.append([arm, *(sweep_cell(losses, lr, best) for lr in lrs)])
    return [
        "Final validation loss of short runs with one seed; the best of an arm is taken.",
        "",
        *table(["arm", *(f"{lr:g}" for lr in lrs)], cells),
    ]


def sweep_cell(losses: Mapping[float, float | None], lr: float, best: float | None) -> str:
    if lr not in losses:
        return ""
    loss = losses[lr]
    return "failed" if loss is None else f"**{loss:.4f}**" if lr == best else f"{loss:.4f}"


def best_of(losses: Mapping[float, float | None]) -> float | None:
    """The learning rate with the lowest loss."""
    whole = {lr: loss for lr, loss in losses.items() if loss is not None}
    return min(whole, key=lambda lr: whole[lr]) if whole else None


def edge_notes(sweeps: Sweeps) -> list[str]:
    """Where the best learning rate is the last one tried, a better one may lie beyond."""
    edge = [arm for arm, losses in sweeps.items() if len(losses) > 1 and best_of(losses) in (min(losses), max(losses))]
    if not edge:
        return []
    return [
        "",
        f"The best learning rate is the first or last that was tried for {', '.join(edge)}: try more beyond it.",
    ]


def how(about: About) -> list[str]:
    lines = ["", "## How it was made", "", f"{about.machine}. Data: {about.data}."]
    lines += ["", *(f"- {name}: {value}" for name, value in about.settings.items())]
    if about.failures:
        lines += ["", "Runs without a result:", "", *(f"- {run}: {why}" for run, why in about.failures.items())]
    return lines


def table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Only columns that have something to say."""
    shown = [k for k in range(len(headings)) if any(row[k] for row in cells)]
    lines = ["| " + " | ".join(headings[k] for k in shown) + " |", "|" + "---|" * len(shown)]
    return lines + ["| " + " | ".join(row[k] for k in shown) + " |" for row in cells]


def picture(figures: Mapping[str, Path], name: str, beside: Path) -> list[str]:
    if name not in figures:
        return []
    link = Path(os.path.relpath(figures[name], beside)).as_posix()
    return ["", f"![{CAPTIONS[name]}]({link})"]
