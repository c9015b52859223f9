"""Plots of a trace into axes of matplotlib, for notebooks and papers: `dm.plot`. `figures` writes them to files.

Needs matplotlib: pip install 'depthmix[figures]'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from depthmix.analysis.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["mixing_matrix", "source_weights", "value_matrix"]

NEEDS_MATPLOTLIB = "figures need matplotlib; install it with: pip install 'depthmix[figures]'"
MOST_TICKS = 9


def mixing_matrix(
    trace: Trace,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    limit: float | None = None,
    colorbar: bool = True,
) -> Axes:
    """Draw M of a trace: a row for each reader, a column for each source, blue above zero and red below.

    It is the mean over tokens, of the first head or channel where they differ; the label of the sources says so.

    Args:
        trace: what `dm.trace` or `dm.Trace.load` returns.
        ax: axes to draw into. None: new ones, of a new figure of pyplot.
        title: of the axes. None: the mechanism's name.
        limit: colours span −limit to limit, and entries beyond are clipped. None: the largest magnitude in M.
        colorbar: whether the axes get a colour bar of their own.
    """
    check_trace("mixing_matrix", trace)
    matrix, description = mean_matrix(trace)
    n = matrix.shape[-1]
    readers, sources = [*map(str, range(1, n)), "head"], [str(i) for i in range(n)]
    axes = draw_triangle(ax, matrix, readers, sources, limit, colorbar)
    label(axes, trace.mechanism if title is None else title, "source" + (f"\n({description})" if description else ""))
    return axes


def value_matrix(
    trace: Trace,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    limit: float | None = None,
    colorbar: bool = True,
) -> Axes:
    """Draw how attention layers mix values over depth (`trace.values`): a row for each attention layer, a column for
    each layer whose raw value it holds. The mean over tokens, of the first key-value head.

    Arguments as in `mixing_matrix`.
    """
    check_trace("value_matrix", trace)
    if trace.values is None:
        raise ValueError(
            "this trace has no values: no attention of the model mixes values over depth; draw M with mixing_matrix"
        )
    values = trace.values.cpu().double()[..., 0, :, :].flatten(0, -3)  # [token, row, source]
    layers = [str(i + 1) for i in range(values.shape[-1])]
    axes = draw_triangle(ax, values.mean(0), layers, layers, limit, colorbar)
    words = ["attention layers", "head 0" if trace.values.shape[-3] > 1 else "", mean_of(len(values))]
    label(axes, "values" if title is None else title, f"source\n({', '.join(filter(None, words))})")
    return axes


def source_weights(trace: Trace, ax: Axes | None = None, *, title: str | None = None, colorbar: bool = True) -> Axes:
    """Draw the weights over sources (`trace.weights`): a row for each reader, a column for each source by its name.
    The mean over tokens, of the first head.

    What a row does not read is grey; + marks a source that is still growing, the running sum of a block.
    Arguments as in `mixing_matrix`.
    """
    check_trace("source_weights", trace)
    if trace.weights is None:
        raise ValueError(f"{trace.mechanism} does not weight a list of sources; draw M with mixing_matrix")
    weights = trace.weights.cpu().double()
    weights = weights.reshape(-1, *weights.shape[trace.sources.dim() - 2 :]).mean(0)
    weights = weights if weights.dim() == 2 else weights[0]
    unread = weights.new_ones(weights.shape).bool()
    for row, read in enumerate(trace.reads):
        unread[row, read] = False
    axes, rows = new_axes(ax), len(weights)
    show(axes, weights, unread, colorbar, cmap="Blues", vmin=0.0, vmax=largest(weights), aspect="auto")
    for row, partial in enumerate(trace.partial):
        if partial:
            axes.text(trace.reads[row][-1], row, "+", ha="center", va="center", fontsize=8, color="0.4")
    axes.set_xticks(range(weights.shape[1]), trace.source_names, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(rows), [*map(str, range(1, rows)), "head"])
    growing = " (+: still growing)" if any(trace.partial) else ""
    label(axes, trace.mechanism if title is None else title, f"source{growing}")
    return axes


def mean_matrix(trace: Trace) -> tuple[Tensor, str]:
    """One matrix and its description: the mean over tokens, of the first head or channel where they differ."""
    M, words = trace.M.cpu().double(), []
    if trace.kind in ("head", "channel"):
        words = [f"{trace.kind} {trace.channels[0] if trace.channels else 0}"]
        M = M[..., 0, :, :]
    M = M.reshape(-1, *M.shape[-2:])
    if trace.kind == "operator":
        words = ["gains of writes"]
    return M.mean(0), ", ".join(filter(None, [*words, mean_of(len(M))]))


def mean_of(tokens: int) -> str:
    return f"mean of {tokens} tokens" if tokens > 1 else ""


def draw_triangle(
    ax: Axes | None,
    matrix: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    limit: float | None,
    colorbar: bool,
) -> Axes:
    """A lower triangular matrix with the same colour for the same magnitude above and below zero."""
    if limit is not None and not (0 < limit < math.inf):
        raise ValueError(f"limit={limit}; expected a positive number, or None for the largest magnitude")
    span = largest(matrix) if limit is None else limit
    above = matrix.new_ones(matrix.shape).triu(1).bool()
    axes = new_axes(ax)
    show(axes, matrix, above, colorbar, cmap="RdBu", vmin=-span, vmax=span)
    n = len(rows)
    step = math.ceil(n / MOST_TICKS)
    ticks = [*range(0, n - step, step), n - 1]
    axes.set_xticks(ticks, [columns[t] for t in ticks])
    axes.set_yticks(ticks, [rows[t] for t in ticks])
    return axes


def show(ax: Axes, matrix: Tensor, hidden: Tensor, colorbar: bool, *, vmin: float, vmax: float, **style: Any) -> None:
    ax.set_facecolor("0.93")
    image = ax.imshow(matrix.masked_fill(hidden, float("nan")).numpy(), vmin=vmin, vmax=vmax, **style)
    if colorbar:
        extend = {(True, True): "both", (True, False): "min", (False, True): "max", (False, False): "neither"}
        clipped = bool((matrix < vmin).any()), bool((matrix > vmax).any())
        bar = ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03, extend=extend[clipped])
        bar.ax.tick_params(labelsize=6, length=2)


def label(ax: Axes, title: str, source: str) -> None:
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(source, fontsize=8)
    ax.set_ylabel("reader", fontsize=8)
    ax.tick_params(labelsize=7, length=2)


def largest(matrix: Tensor) -> float:
    """The largest finite magnitude; never 0, since colours need a range."""
    return max(float(matrix.abs().nan_to_num(0, 0, 0).max()), 1e-12)


def new_axes(ax: Axes | None) -> Axes:
    """`ax` itself, or new axes of pyplot."""
    try:
        from matplotlib.axes import Axes
    except ImportError:
        raise ModuleNotFoundError(NEEDS_MATPLOTLIB) from None
    if ax is None:
        from matplotlib import pyplot

        return pyplot.subplots(layout="constrained")[1]
    if not isinstance(ax, Axes):
        raise TypeError(
            f"ax is a {type(ax).__name__}; expected matplotlib Axes, such as plt.subplots() returns "
            "(one element if it returns an array)"
        )
    return ax


def check_trace(function: str, trace: Trace) -> None:
    if not isinstance(trace, Trace):
        raise TypeError(
            f"{function} got a {type(trace).__name__}; expected a Trace, as dm.trace(model, tokens) or "
            "dm.Trace.load(path) returns it"
        )
