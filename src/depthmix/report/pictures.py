"""The main figures of a report as files, PNG and SVG. Needs matplotlib: pip install 'depthmix[figures]'."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from depthmix.analysis import Survey, plot
from depthmix.analysis.figures import new_figure, save
from depthmix.report.reading import DAMAGE, SavedRun, sentence
from depthmix.support.terminal import say

Draw = Callable[[Any], Any]  # into axes
KINDS = ("png", "svg")
WIDE, SQUARE = (6.6, 3.6), (4.6, 4.4)  # inches: two columns of a paper, or one
DEPTHS = ("state_norm", "output_norm", "gradient_norm", "contribution", "embedding_share", "locality")


def draw_figures(runs: Sequence[SavedRun], folder: Path) -> list[Path]:
    """Every figure that there is data for; one that cannot be drawn is left out, with a message."""
    written = []
    for name, (size, draw) in [*comparing(runs), *(each for run in runs for each in of_run(run))]:
        figure = new_figure()
        figure.set_size_inches(*size)
        try:
            draw(figure.subplots())
            for kind in KINDS:
                path = folder / f"{name}.{kind}"
                save(figure, path)
                written.append(path)
        except DAMAGE as error:
            say(f"the figure {name} is left out: {sentence(error)}")
    return written


Figures = Iterator[tuple[str, tuple[tuple[float, float], Draw]]]


def comparing(runs: Sequence[SavedRun]) -> Figures:
    """All runs in one figure: losses, and each magnitude over depth."""
    losing = [run for run in runs if (run.folder / "metrics.jsonl").is_file()]
    if losing:
        yield "losses", (WIDE, partial(draw_losses, losing))
    for series in DEPTHS:
        recorded = [run for run in losing if run.of_kind("depth") and run.of_kind("depth")[-1].get(series)]
        if recorded:
            yield series, (WIDE, partial(draw_depth, recorded, series))


def draw_losses(runs: Sequence[SavedRun], ax: Any) -> None:
    plot.loss_curves([run.folder for run in runs], ax, labels=[run.name for run in runs])


def draw_depth(runs: Sequence[SavedRun], series: Any, ax: Any) -> None:
    for run in runs:
        plot.depth_norms(run.folder, ax, series=series, label=run.name)


def of_run(run: SavedRun) -> Figures:
    """What one run reads, what matters, and the routes between; with a trace and an ablation."""
    stem = re.sub(r"[^A-Za-z0-9._=+-]+", "_", run.name).strip("_") or "run"
    survey = Survey.load(run.folder) if run.trace is not None else None
    if survey is not None:
        yield f"{stem}-M", (SQUARE, lambda ax: plot.mixing_matrix(survey, ax, title=run.name))
        if survey.figures["source_names"]:
            yield f"{stem}-weights", (SQUARE, lambda ax: plot.source_weights(survey, ax, title=run.name))
        if "values_mean" in survey.tensors:
            yield f"{stem}-values", (SQUARE, lambda ax: plot.value_matrix(survey, ax, title=run.name))
        yield f"{stem}-routes", (WIDE, lambda ax: plot.routes(survey, run.ablation, ax, title=run.name))
    if run.ablation is not None:
        yield f"{stem}-importance", (WIDE, lambda ax: plot.importance(run.ablation or {}, survey, ax, title=run.name))
