"""Figures of a saved result. Needs matplotlib: pip install 'depthmix[figures]'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from depthmix.analysis.figures import new_figure, save
from depthmix.bench.mixing import MIXING, MIXING_CPU
from depthmix.bench.read import BOTH, FORWARD
from depthmix.bench.report import CONTROL, Report, Row

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # safe for colour blindness
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WAYS = (FORWARD, BOTH)
BOUND = {"color": "0.25", "linestyle": "--", "linewidth": 1.2}


def draw_all(report: Report, folder: Path) -> dict[str, Path]:
    """A PNG for each part that was measured, by its name."""
    report = replace(report, rows=[row for row in report.rows if row.figure is not None])
    drawn = {}
    parts = {
        "read": draw_read,
        "mixing": draw_mixing,
        "step": draw_step,
        "decoder": draw_decoder,
        "memory": draw_memory,
        "growth": draw_growth,
    }
    for name, draw in parts.items():
        if (figure := draw(report)) is not None:
            drawn[name] = folder / f"{name}.png"
            save(figure, drawn[name])
    return drawn


def draw_read(report: Report) -> Any:
    rows = [row for row in report.of("read") if row.unit == "passes"]
    if not rows:
        return None
    shape = report.sizes["read"]
    title = f"One read of {shape['sources']} sources, {shape['tokens']} tokens, D = {shape['dim']}"
    series = {way: {r.what.removesuffix(f", {way}"): r for r in rows if r.what.endswith(f", {way}")} for way in WAYS}
    figure, axis = labelled(series, title, "time in passes over the sources (log scale; less is better)")
    axis.set_xscale("log")
    axis.axvline(1, color="0.6", linewidth=1)
    low, high = axis.get_xlim()
    ticks = [t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low <= t <= high]
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.minorticks_off()
    legend_below(figure, axis)
    return figure


def draw_mixing(report: Report) -> Any:
    size = report.sizes["step"]
    title = f"The time of mixing: {size['depth']} sublayers, D = {size['dim']}, {size['tokens']} tokens"
    if not report.of(MIXING):
        return None
    return draw_ratios(report, (MIXING, MIXING_CPU, "step"), title)


def draw_step(report: Report) -> Any:
    size = report.sizes["step"]
    title = f"A network of {size['depth']} sublayers, D = {size['dim']}, {size['tokens']} tokens"
    return draw_ratios(report, ("step", "compiled step", "forward", "compiled forward"), title)


def draw_decoder(report: Report) -> Any:
    model = report.sizes["decode"]["model"]
    title = f"The decoder with {2 * model['layers']} sublayers, D = {model['dim']}"
    return draw_ratios(report, ("decode", "compiled decode", "value step"), title)


def draw_ratios(report: Report, parts: Sequence[str], title: str) -> Any:
    series = {part: {r.what: r for r in report.of(part)} for part in parts if report.of(part)}
    if not series:
        return None
    figure, axis = labelled(series, title, "time relative to the plain residual (less is better)")
    axis.axvline(1, color="0.6", linewidth=1)
    legend_below(figure, axis)
    return figure


def labelled(series: dict[str, dict[str, Row]], title: str, unit: str) -> tuple[Any, Any]:
    """One line per variant: a point with its interval for each series, its bound as a dashed mark."""
    names = list(dict.fromkeys(name for rows in series.values() for name in rows))
    figure = new_figure()
    figure.set_size_inches(8, 1.4 + 0.22 * len(names) * (len(series) + 0.6))
    axis = figure.subplots()
    bounded = False
    height = 0.8 / len(series)
    for k, (label, rows) in enumerate(series.items()):
        at = [names.index(name) + (k - (len(series) - 1) / 2) * height for name in rows]
        points(axis, [*rows.values()], at, k, label)
        for row, y in zip(rows.values(), at, strict=True):
            if row.bound is not None:
                label_once = "" if bounded else "target: at most"
                axis.vlines(row.bound, y - height / 2, y + height / 2, **BOUND, label=label_once)
                bounded = True
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlabel(unit)
    axis.set_title(title, fontsize=11)
    axis.grid(axis="x", color="0.92")
    axis.set_axisbelow(True)
    return figure, axis


def legend_below(figure: Any, axis: Any) -> None:
    """Outside the axes: inside it would lie on the points."""
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def points(axis: Any, rows: Sequence[Row], at: Sequence[float], k: int, label: str) -> None:
    middle = [row.figure for row in rows]
    axis.errorbar(middle, at, xerr=spread(rows), fmt=MARKERS[k], color=COLOURS[k], label=label, capsize=3, markersize=5)


def spread(rows: Sequence[Row]) -> list[list[float]]:
    """Distances of the interval's ends from the figure, as error bars want them."""
    ends = [(r.figure or 0.0, r.low, r.high) for r in rows]
    low = [figure - (figure if low is None else low) for figure, low, _ in ends]
    return [low, [(figure if high is None else high) - figure for figure, _, high in ends]]


def draw_memory(report: Report) -> Any:
    kept, peak = report.of("kept"), [row for row in report.of("peak") if row.figure is not None]
    panels = [(kept, "kept for the backward pass beyond the residual's\n(kB per token)", 1e-3)] if kept else []
    panels += [(peak, "peak of one training step\n(MB beyond the model itself)", 1.0)] if peak else []
    if not panels:
        return None
    figure = new_figure()
    figure.set_size_inches(5 * len(panels), 1.4 + 0.3 * max(len(rows) for rows, _, _ in panels))
    for axis, (rows, unit, scale) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        rows = sorted(rows, key=lambda row: row.figure or 0.0)
        axis.barh([row.what for row in rows], [(row.figure or 0.0) * scale for row in rows], color=COLOURS[0])
        for y, row in enumerate(rows):
            if row.bound is not None:
                axis.vlines(row.bound * scale, y - 0.45, y + 0.45, **BOUND, label="target: at most")
                legend_below(figure, axis)
        axis.invert_yaxis()
        axis.set_xlabel(unit)
        axis.grid(axis="x", color="0.92")
        axis.set_axisbelow(True)
    size = report.sizes["step"]
    figure.suptitle(f"Memory: {size['depth']} sublayers, D = {size['dim']}, {size['tokens']} tokens", fontsize=11)
    return figure


def draw_growth(report: Report) -> Any:
    panels = [
        ("sources", "number of sources", "time of a read per source,\nrelative to the fewest sources"),
        ("depth", "depth (sublayers)", "step relative to the residual"),
        ("width", "width D", "step relative to the residual"),
    ]
    panels = [panel for panel in panels if report.of(panel[0])]
    if not panels:
        return None
    figure = new_figure()
    figure.set_size_inches(4 * len(panels), 3.6)
    for axis, (part, across, up) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        rows = report.of(part)
        names = ["ops.attend"] if part == "sources" else list(dict.fromkeys(row.what for row in rows))
        for k, name in enumerate(names):
            line = rows if part == "sources" else [row for row in rows if row.what == name]
            k = len(COLOURS) - 1 if name == CONTROL else k % len(COLOURS)
            at, middle = [row.at for row in line], [row.figure for row in line]
            style = {"fmt": f"{MARKERS[k]}-", "color": COLOURS[k], "capsize": 3, "markersize": 5}
            axis.errorbar(at, middle, yerr=spread(line), label=name, **style)
        for row in rows:
            if row.bound is not None:
                axis.axhline(row.bound, **BOUND, label=f"target: at most, for {row.at}")
        axis.axhline(1, color="0.6", linewidth=1)
        ticks = sorted({row.at for row in rows if row.at is not None})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel(across)
        axis.set_ylabel(up)
        axis.grid(color="0.92")
        axis.legend(fontsize=8)
    return figure
