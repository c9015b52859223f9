"""Figures of a comparison and of a scaling study. Needs matplotlib: pip install 'depthmix[figures]'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthmix.analysis.figures import new_figure, save
from depthmix.analysis.statistics import Estimate, estimate, interpolate
from depthmix.studies.comparison import Axis, Comparison, Row, Run
from depthmix.studies.depth import CURVES, curve

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # safe for colour blindness
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", ":", "-.")
POINTS = 61  # on a mean curve
BARS = 6  # on a curve of differences
UNITS: dict[Axis, tuple[str, float]] = {
    "tokens": ("tokens (millions)", 1e6),
    "seconds": ("seconds of training, including other load on the machine", 1.0),
    "flops": ("compute (PFLOP)", 1e15),
}
Sweeps = Mapping[str, Mapping[float, float | None]]  # of an arm: final loss by learning rate, None where a run failed


def draw_comparison(comparison: Comparison, sweeps: Sweeps, folder: Path) -> dict[str, Path]:
    """Every figure that there is data for, by its name."""
    figures = {
        "tokens": draw_curves(comparison, "tokens"),
        "seconds": draw_curves(comparison, "seconds"),
        "differences": draw_differences(comparison),
        "learning_rates": draw_sweeps(sweeps),
        "depth": draw_depth(comparison),
    }
    drawn = {}
    for name, figure in figures.items():
        if figure is not None:
            drawn[name] = folder / f"{name}.png"
            save(figure, drawn[name])
    return drawn


def style(k: int) -> dict[str, Any]:
    return {"color": COLOURS[k % len(COLOURS)], "linestyle": LINES[k // len(COLOURS) % len(LINES)]}


def draw_curves(comparison: Comparison, axis: Axis) -> Any:
    """Validation loss of every run, thin, and of every arm's mean; below it the paired differences, if any."""
    arms = comparison.arms
    if not arms:
        return None
    label, unit = UNITS[axis]
    figure = new_figure()
    rows = [row for row in comparison.rows if row.seeds]
    heights = (3, 2) if rows else (3,)
    figure.set_size_inches(8, 1.36 * sum(heights))
    above, *rest = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    places = {arm: (0.12 * k / len(arms), 0.12) for k, arm in enumerate(arms)}  # of markers: none hides another
    for k, arm in enumerate(arms):
        runs = [*comparison.of(arm).values()]
        for run in runs if len(runs) > 1 else []:
            above.plot([x / unit for x in run.axis(axis)], run.losses, linewidth=0.6, alpha=0.4, **style(k))
        grid, means = mean_curve(runs, axis)
        values = [mean.mean for mean in means]
        look = {"marker": MARKERS[k % len(MARKERS)], "markevery": places[arm], "markersize": 4, **style(k)}
        above.plot([x / unit for x in grid], values, linewidth=1.6, label=arm, **look)
    late = [loss for run in comparison.runs for loss in run.losses[len(run.losses) // 5 :]]
    above.set_ylim(*around(late))  # the fall of the first fifth would flatten the rest
    above.set_ylabel("validation loss (nats per token)")
    for below in rest:
        draw_paired(below, comparison, rows, axis)
    (above, *rest)[-1].set_xlabel(label)
    for part in (above, *rest):
        part.grid(color="0.92")
        part.set_axisbelow(True)
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def draw_paired(panel: Any, comparison: Comparison, rows: Sequence[Row], axis: Axis) -> None:
    arms, ends = comparison.arms, [0.0]
    for row in rows:
        pairs = [(comparison.of(row.arm)[s], comparison.of(row.baseline)[s]) for s in row.seeds]
        ends += draw_difference(panel, pairs, axis, arms.index(row.arm), len(arms))
    panel.set_ylim(*around(ends))
    panel.axhline(0, color="0.5", linewidth=1)
    several = any(len(row.seeds) > 1 for row in rows)
    panel.set_ylabel("minus its baseline" + ("\n(bars: 95 % interval)" if several else ""))


def draw_difference(panel: Any, pairs: Sequence[tuple[Run, Run]], axis: Axis, k: int, arms: int) -> list[float]:
    """One arm's, with bars at some points, beside those of other arms; returns what the scale must hold of it."""
    grid, means = mean_difference(pairs, axis)
    values = [mean.mean for mean in means]
    xs = [x / UNITS[axis][1] for x in grid]
    step = max(1, len(xs) // BARS)
    at = range(len(xs) - 1 - step * k // arms, 0, -step) if len(xs) > 1 else range(1)
    panel.plot(xs, values, linewidth=1.4, **style(k))
    sides = [[values[i] - (means[i].low or 0.0) for i in at], [(means[i].high or 0.0) - values[i] for i in at]]
    panel.errorbar(
        [xs[i] for i in at],
        [values[i] for i in at],
        yerr=sides if len(pairs) > 1 else None,
        fmt=MARKERS[k % len(MARKERS)],
        color=style(k)["color"],
        markersize=4,
        linewidth=0.8,
        capsize=2,
    )
    last = [end for end in (means[-1].low, means[-1].high) if end is not None]
    return [*values[len(values) // 3 :], *last]  # the first third would flatten the rest


def around(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.01
    return low - room, high + room


def grid_of(runs: Sequence[Run], axis: Axis) -> list[float]:
    """Points that every run covers."""
    begin, end = max(run.axis(axis)[0] for run in runs), min(run.axis(axis)[-1] for run in runs)
    return [begin + (end - begin) * i / (POINTS - 1) for i in range(POINTS)] if begin < end else [end]


def mean_curve(runs: Sequence[Run], axis: Axis) -> tuple[list[float], list[Estimate]]:
    grid = grid_of(runs, axis)
    curves = [(run.axis(axis), run.losses) for run in runs]
    return grid, [estimate([interpolate(x, xs, losses) for xs, losses in curves]) for x in grid]


def mean_difference(pairs: Sequence[tuple[Run, Run]], axis: Axis) -> tuple[list[float], list[Estimate]]:
    grid = grid_of([run for pair in pairs for run in pair], axis)
    curves = [[(run.axis(axis), run.losses) for run in pair] for pair in pairs]
    return grid, [estimate([interpolate(x, *arm) - interpolate(x, *base) for arm, base in curves]) for x in grid]


def draw_differences(comparison: Comparison) -> Any:
    """Final losses against the baseline's: every pair, their mean and its interval."""
    rows = [row for row in comparison.rows if row.difference is not None]
    if not rows:
        return None
    figure = new_figure()
    figure.set_size_inches(8, 1.5 + 0.45 * len(rows))
    axis = figure.subplots()
    for y, row in enumerate(rows):
        d = row.difference
        assert d is not None
        axis.plot(d.values, [y + 0.18] * len(d.values), "|", color="0.45", markersize=8)
        error = None if d.low is None or d.high is None else [[d.mean - d.low], [d.high - d.mean]]
        colour = COLOURS[1] if d.excludes(0) else "0.35"
        axis.errorbar([d.mean], [y], xerr=error, fmt="o", color=colour, capsize=4, markersize=6)
    axis.axvline(0, color="0.5", linewidth=1)
    axis.set_yticks(range(len(rows)), [f"{row.arm}\n− {row.baseline}" for row in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    several = any(row.difference is not None and row.difference.low is not None for row in rows)
    note = "dots with bars: mean and 95 % interval" if several else "dots: one seed, no interval"
    axis.set_xlabel(f"difference of the final validation loss (left is better; {note}; ticks: seeds)", fontsize=9)
    axis.grid(axis="x", color="0.92")
    axis.set_axisbelow(True)
    return figure


def draw_depth(comparison: Comparison) -> Any:
    """What the last recording says of each sublayer, the mean over seeds: a panel for each curve."""
    curves = {name: {arm: curve([*comparison.of(arm).values()], name) for arm in comparison.arms} for name in CURVES}
    curves = {name: arms for name, arms in curves.items() if any(arms.values())}
    if not curves:
        return None
    figure = new_figure()
    figure.set_size_inches(8, 2.4 * -(-len(curves) // 2))
    panels = figure.subplots(-(-len(curves) // 2), min(2, len(curves)), sharex=True, squeeze=False)
    for panel, (name, arms) in zip(panels.flat, curves.items(), strict=False):
        for k, (arm, values) in enumerate(arms.items()):
            panel.plot(range(1, len(values) + 1), values, linewidth=1.3, label=arm, **style(k))
        panel.set_yscale("log")
        panel.set_title(name, fontsize=9)
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
    for panel in panels[-1]:
        panel.set_xlabel("sublayer", fontsize=8)
    handles = panels.flat[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def draw_sweeps(sweeps: Sweeps) -> Any:
    """Final loss of the short runs against their learning rate, the best one filled."""
    complete = {arm: {lr: loss for lr, loss in sorted(s.items()) if loss is not None} for arm, s in sweeps.items()}
    complete = {arm: losses for arm, losses in complete.items() if losses}
    if not complete:
        return None
    figure = new_figure()
    figure.set_size_inches(8, 4.2)
    axis = figure.subplots()
    for k, (arm, losses) in enumerate(complete.items()):
        marker = MARKERS[k % len(MARKERS)]
        lrs, values = [*losses], [*losses.values()]
        axis.plot(lrs, values, marker=marker, markerfacecolor="white", label=arm, **style(k))
        best = min(losses, key=lambda lr: losses[lr])
        axis.plot([best], [losses[best]], marker=marker, color=style(k)["color"])
    ticks = sorted({lr for losses in complete.values() for lr in losses})
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{lr:g}" for lr in ticks])
    axis.minorticks_off()
    axis.set_xlabel("learning rate of short runs (filled: chosen for the long ones)")
    axis.set_ylabel("final validation loss")
    axis.grid(color="0.92")
    axis.set_axisbelow(True)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure
