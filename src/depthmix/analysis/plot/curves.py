"""Norms over depth, depth over training, and losses: `depth_norms`, `over_training`, `loss_curves`."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from depthmix.analysis.magnitudes import Magnitudes
from depthmix.analysis.plot.axes import (
    MOST_ACROSS,
    check_choice,
    colour_bar,
    count_ticks,
    few,
    label_axes,
    log_ticks,
    new_axes,
    plain,
    readers,
    show_grid,
    show_legend,
    style,
)
from depthmix.analysis.plot.runs import (
    NORMS,
    OF_READERS,
    SERIES,
    Folder,
    depth_lines,
    known,
    numbers,
    others,
    run_lines,
)
from depthmix.analysis.survey_file import Survey
from depthmix.support.checks import user_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = Literal[
    "state_norm",
    "output_norm",
    "gradient_norm",
    "read_norm",
    "read_gradient_norm",
    "contribution",
    "stream_distance",
    "weight_entropy",
    "weight_spread",
    "locality",
    "embedding_share",
]
OF_A_PASS = (*NORMS, "stream_distance")


def depth_norms(
    source: Survey | Magnitudes | Folder,
    ax: Axes | None = None,
    *,
    series: Series = "state_norm",
    label: str | None = None,
    log: bool = True,
    colour: str | None = None,
    title: str = "",
) -> Axes:
    """Draw norms over depth as a line. Call it again with the same axes and another label to compare models.

    Args:
        source: a survey; a `dm.analysis.Magnitudes`; or the folder of a run, whose last recording is drawn.
        ax: axes to draw into. None: new ones, of a new figure of pyplot.
        series: "state_norm" (of what a write changes: the stream, the running sum of a block, a new output; the root
            mean square over streams), "output_norm", "gradient_norm" (of outputs), "read_norm", "read_gradient_norm",
            "contribution" (output over state) or "stream_distance"; for a folder also what `over_training` draws.
        label: of the line in the legend. None: no legend.
        log: whether the norms have a logarithmic axis.
        colour: of the line. None: the next one of a palette that is safe for colour blindness.
    """
    values = numbers(series_of(source, series))
    axes = new_axes(ax)
    k = len(axes.lines)
    look = {**style(k), **({} if colour is None else {"color": colour})}
    step = max(1, len(values) // 8)
    look.update(linewidth=1.3, markersize=3.5, markevery=(k % step, step), label=label)
    axes.plot(range(1, len(values) + 1), values, **look)
    if log and series in NORMS:
        axes.set_yscale("log")
        log_ticks(axes.yaxis, *axes.get_ylim())
    words = SERIES[series] if axes.get_ylabel() in ("", SERIES[series]) else "norm"
    label_depth(axes, title, words, len(values), series in OF_READERS)
    show_grid(axes)
    show_legend(axes)
    return axes


def series_of(source: object, series: str) -> Sequence[Any]:
    check_choice("series", series, tuple(SERIES))
    if isinstance(source, (str, os.PathLike)):
        return list(depth_lines(source, series)[-1][series])
    if isinstance(source, Magnitudes):
        content = source.to_dict()
    elif isinstance(source, Survey):
        content = source.figures["magnitudes"] or {}
    else:
        raise TypeError(
            f"depth_norms got a {type(source).__name__}; expected a Survey, a dm.analysis.Magnitudes or the folder of "
            "a run"
        )
    if not known(content.get(series)):
        raise ValueError(f"these magnitudes have no {series}; {others(content)}")
    return list(content[series])


def label_depth(ax: Axes, title: str, words: str, count: int, head: bool) -> None:
    names = readers(count - 1) if head else [str(i + 1) for i in range(count)]
    ticks = few(count, MOST_ACROSS)
    ax.set_xticks([t + 1 for t in ticks], [names[t] for t in ticks])
    label_axes(ax, title, "sublayer", words)


def over_training(
    folder: Folder,
    ax: Axes | None = None,
    *,
    series: Series = "output_norm",
    view: Literal["map", "lines"] = "map",
    log: bool = True,
    title: str = "",
    colorbar: bool = True,
) -> Axes:
    """Draw how a quantity over depth changes during training, from the recordings of a run.

    Args:
        folder: of a run, whose metrics.jsonl has recordings over depth (`run.depth_every`).
        ax: axes to draw into. None: new ones, of a new figure of pyplot.
        series: "output_norm", "gradient_norm", "state_norm", "contribution", "read_norm", "read_gradient_norm",
            "stream_distance", "weight_entropy", "weight_spread", "locality" or "embedding_share".
        view: "map": tokens along x, sublayers along y, the quantity as colour; "lines": a line over depth for each
            recording, coloured by its tokens.
        log: whether norms have a logarithmic scale.
        colorbar: whether the axes get a colour bar of their own.
    """
    check_choice("series", series, tuple(SERIES))
    check_choice("view", view, ("map", "lines"))
    lines = depth_lines(folder, series)
    rows = [numbers(line[series]) for line in lines]
    tokens = [int(line["tokens"]) for line in lines]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"the recordings of {folder} differ in their number of sublayers; expected those of one model")
    draw = draw_map if view == "map" else draw_lines
    return draw(new_axes(ax), tokens, rows, series, log and series in NORMS, title, colorbar)


def draw_map(
    ax: Axes, tokens: list[int], rows: list[list[float]], series: str, log: bool, title: str, colorbar: bool
) -> Axes:
    from matplotlib.colors import LogNorm, Normalize

    count = len(rows[0])
    finite = [v for row in rows for v in row if math.isfinite(v) and (v > 0 or not log)] or [1.0]
    low, high = min(finite), max(finite)
    norm = (LogNorm if log else Normalize)(low, high if high > low else low + (abs(low) or 1.0))
    columns = [[row[i] for row in rows] for i in range(count)]
    ax.set_facecolor("0.93")
    depths = [i + 0.5 for i in range(count + 1)]
    mesh = ax.pcolormesh(edges(tokens), depths, columns, norm=norm, cmap="viridis", rasterized=True)
    names = readers(count - 1) if series in OF_READERS else [str(i + 1) for i in range(count)]
    ticks = few(count)
    ax.set_yticks([t + 1 for t in ticks], [names[t] for t in ticks])
    count_ticks(ax.xaxis)
    label_axes(ax, title, "tokens of training", "sublayer")
    if colorbar:
        colour_bar(ax, mesh, SERIES[series])
    return ax


def edges(centres: Sequence[float]) -> list[float]:
    """Borders of cells around each recording; the outer ones are as far away as the inner ones."""
    if len(centres) == 1:
        return [centres[0] - 0.5, centres[0] + 0.5]
    inner = [(a + b) / 2 for a, b in itertools.pairwise(centres)]
    return [2 * centres[0] - inner[0], *inner, 2 * centres[-1] - inner[-1]]


def draw_lines(
    ax: Axes, tokens: list[int], rows: list[list[float]], series: str, log: bool, title: str, colorbar: bool
) -> Axes:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colours: Any = ScalarMappable(Normalize(0, max(tokens) or 1), colormaps["viridis"])
    for count, row in zip(tokens, rows, strict=True):
        ax.plot(range(1, len(row) + 1), row, linewidth=1.1, color=colours.to_rgba(count))
    if log:
        ax.set_yscale("log")
        log_ticks(ax.yaxis, *ax.get_ylim())
    label_depth(ax, title, SERIES[series], len(rows[0]), series in OF_READERS)
    show_grid(ax)
    if colorbar:
        bar = colour_bar(ax, colours, "tokens of training")
        count_ticks(bar.ax.yaxis)
    return ax


def loss_curves(
    folders: Folder | Sequence[Folder],
    ax: Axes | None = None,
    *,
    axis: Literal["tokens", "seconds"] = "tokens",
    labels: Sequence[str] | None = None,
    train: bool = True,
    title: str = "",
) -> Axes:
    """Draw the losses of runs: of training thin, of validation with a marker for each.

    The y axis spans what follows the first fifth of each run, whose fall would flatten the rest.

    Args:
        folders: of one run or of several.
        ax: axes to draw into. None: new ones, of a new figure of pyplot.
        axis: "tokens", or "seconds" of training.
        labels: one for each run. None: the names of the folders.
        train: whether losses of training are drawn too; they are if a run has no validation.
    """
    check_choice("axis", axis, ("tokens", "seconds"))
    given = [folders] if isinstance(folders, (str, os.PathLike)) else list(folders)
    if not given:
        raise ValueError("folders is empty; expected the folder of a run, or a list of them")
    names = [plain(name) for name in folder_names(given)] if labels is None else list(labels)
    if len(names) != len(given):
        raise ValueError(f"{len(names)} labels for {len(given)} runs; expected one for each run")
    curves = [(read_curve(folder, "train", axis), read_curve(folder, "validation", axis)) for folder in given]
    for folder, (training, validation) in zip(given, curves, strict=True):
        if not training[0] and not validation[0]:
            raise ValueError(f"{folder} has no losses yet; expected the folder of a run that has made a step")
    axes = new_axes(ax)
    for name, (training, validation) in zip(names, curves, strict=True):
        draw_losses(axes, name, training if train or not validation[0] else NO_CURVE, validation)
    axes.set_ylim(*around([loss for line in axes.lines if line.get_gid() for loss in after_fall(line)]))
    words = "tokens of training" if axis == "tokens" else "seconds of training"
    label_axes(axes, title, words, "loss (nats per token)")
    if axis == "tokens":
        count_ticks(axes.xaxis)
    show_grid(axes)
    show_legend(axes)
    return axes


Curve: TypeAlias = "tuple[list[float], list[float]]"
NO_CURVE: Curve = ([], [])


def read_curve(folder: Folder, kind: str, axis: str) -> Curve:
    lines = [line for line in run_lines(folder, kind) if axis in line and "loss" in line]
    return [float(line[axis]) for line in lines], numbers([line["loss"] for line in lines])


def draw_losses(ax: Axes, name: str, training: Curve, validation: Curve) -> None:
    look = style(sum(line.get_gid() == "run" for line in ax.lines))
    main = {"linewidth": 1.3, "label": name, "gid": "run", **look}
    thin = {**look, "linewidth": 0.6, "alpha": 0.45, "marker": None, "gid": "training of a run"}
    if training[0]:
        ax.plot(*training, **(thin if validation[0] else {**main, "marker": None}))
    if validation[0]:
        ax.plot(*validation, **main, markersize=3.5, markevery=max(1, len(validation[0]) // 12))


def after_fall(line: Any) -> list[float]:
    xs, losses = line.get_data()
    return [float(loss) for x, loss in zip(xs, losses, strict=True) if x >= xs[-1] / 5 and math.isfinite(loss)]


def around(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.06 * (high - low) or 0.01
    return low - room, high + room


def folder_names(folders: Sequence[Folder]) -> list[str]:
    """Names of folders, with those above them where two are the same."""
    paths = [user_path(folder).absolute() for folder in folders]
    for parts in range(1, 4):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names
