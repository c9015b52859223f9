"""Heat maps of M, of weights over sources and of mixed values: `mixing_matrix`, `source_weights`, `value_matrix`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from depthmix.analysis.plot.axes import MOST_NAMES, check_limit, colour_bar, few, label_axes, new_axes, plain, readers
from depthmix.analysis.plot.sources import (
    MEANINGS,
    Quantity,
    Rows,
    Source,
    check_source,
    choose_rows,
    mean_of,
    mean_values,
    mechanism_of,
    mixing,
    weights,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def mixing_matrix(
    trace: Source,
    ax: Axes | None = None,
    *,
    quantity: Quantity = "M_mean",
    rows: Rows = "all",
    head: int = 0,
    title: str | None = None,
    limit: float | None = None,
    colorbar: bool = True,
) -> Axes:
    """Draw M of a trace or a survey: a row for each reader, a column for each source, blue above zero and red below.

    It is the mean over tokens, of one head or channel where they differ; the label of the sources says so.

    Args:
        trace: what `dm.trace` or `dm.Trace.load` returns, or a survey.
        ax: axes to draw into. None: new ones, of a new figure of pyplot.
        quantity: "M_mean"; "M_std", its standard deviation over tokens; "contribution", the mean norm of what a source
            adds to a read; "share", the mean share of the read that this is, by projection: each row sums to 1.
        rows: "attn" or "mlp": only what sublayers of this kind read; needs a survey.
        head: which head, or which of the kept channels, from 0.
        title: of the axes. None: the mechanism's name.
        limit: colours span −limit to limit, and entries beyond are clipped. None: the largest magnitude in M.
        colorbar: whether the axes get a colour bar of their own.
    """
    check_source("mixing_matrix", trace)
    chosen = choose_rows(trace, rows)
    matrix, description = mixing(trace, quantity, head)
    n = matrix.shape[-1]
    names = [readers(n - 1)[row] for row in chosen]
    style: dict[str, Any] = {"words": MEANINGS.get(quantity, ""), "signed": quantity in ("M_mean", "share")}
    axes = draw_triangle(ax, matrix, chosen, names, [str(i) for i in range(n)], limit, colorbar, **style)
    label_matrix(axes, name_of(trace, rows) if title is None else title, f"\n({description})" if description else "")
    return axes


def value_matrix(
    trace: Source,
    ax: Axes | None = None,
    *,
    head: int = 0,
    title: str | None = None,
    limit: float | None = None,
    colorbar: bool = True,
) -> Axes:
    """Draw how attention layers mix values over depth (`trace.values`): a row for each attention layer, a column for
    each layer whose raw value it holds. The mean over tokens, of one key-value head.

    Arguments as in `mixing_matrix`.
    """
    check_source("value_matrix", trace)
    matrix, heads, tokens = mean_values(trace, head)
    layers = [str(i + 1) for i in range(len(matrix))]
    axes = draw_triangle(ax, matrix, range(len(matrix)), layers, layers, limit, colorbar)
    words = ["attention layers", f"head {head}" if heads > 1 else "", mean_of(tokens)]
    label_matrix(axes, "values" if title is None else title, f"\n({', '.join(filter(None, words))})")
    return axes


def source_weights(
    trace: Source,
    ax: Axes | None = None,
    *,
    quantity: Literal["weights_mean", "weights_std"] = "weights_mean",
    rows: Rows = "all",
    head: int = 0,
    title: str | None = None,
    colorbar: bool = True,
) -> Axes:
    """Draw the weights over sources (`trace.weights`): a row for each reader, a column for each source by its name.
    The mean over tokens or, with `quantity="weights_std"`, the standard deviation; of one head.

    What a row does not read is grey; + marks a source that is still growing, the running sum of a block.
    Arguments as in `mixing_matrix`.
    """
    check_source("source_weights", trace)
    chosen = choose_rows(trace, rows)
    matrix, names, reads, partial = weights(trace, quantity, head)
    unread = torch.ones_like(matrix).bool()
    for row, read in enumerate(reads):
        unread[row, read] = False
    axes, words = new_axes(ax), MEANINGS.get(quantity, "")
    shown, hidden = matrix[chosen], unread[chosen]
    show(axes, shown, hidden, colorbar, words, cmap="Blues", vmin=0.0, vmax=largest(shown), aspect="auto")
    for y, row in enumerate(chosen):
        if partial[row]:
            axes.text(reads[row][-1], y, "+", ha="center", va="center", fontsize=8, color="0.4")
    columns, ticks = few(len(names), MOST_NAMES), few(len(chosen), MOST_NAMES)
    turned: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(columns, [plain(names[i]) for i in columns], **turned)
    axes.set_yticks(ticks, [readers(len(matrix) - 1)[chosen[y]] for y in ticks])
    growing = " (+: still growing)" if any(partial[row] for row in chosen) else ""
    label_matrix(axes, name_of(trace, rows) if title is None else title, growing)
    return axes


def name_of(source: Source, rows: Rows) -> str:
    return mechanism_of(source) + {"all": "", "attn": ": attention", "mlp": ": MLPs"}[rows]


def label_matrix(ax: Axes, title: str, after: str) -> None:
    label_axes(ax, title, f"source{after}", "reader")


def draw_triangle(
    ax: Axes | None,
    matrix: Tensor,
    chosen: Sequence[int],
    rows: Sequence[str],
    columns: Sequence[str],
    limit: float | None,
    colorbar: bool,
    *,
    words: str = "",
    signed: bool = True,
) -> Axes:
    """The chosen rows of a lower triangular matrix; signed: the same colour for the same magnitude on both sides."""
    check_limit(limit)
    shown, above = (m[list(chosen)] for m in (matrix, torch.ones_like(matrix).triu(1).bool()))
    span = largest(shown) if limit is None else limit
    style: dict[str, Any] = {"cmap": "RdBu" if signed else "Blues", "vmin": -span if signed else 0.0, "vmax": span}
    axes = new_axes(ax)
    show(axes, shown, above, colorbar, words, **style)
    across, down = few(len(columns)), few(len(rows))
    axes.set_xticks(across, [columns[t] for t in across])
    axes.set_yticks(down, [rows[t] for t in down])
    return axes


def show(
    ax: Axes, matrix: Tensor, hidden: Tensor, colorbar: bool, words: str, *, vmin: float, vmax: float, **style: Any
) -> None:
    ax.set_facecolor("0.93")
    image = ax.imshow(matrix.masked_fill(hidden, float("nan")).numpy(), vmin=vmin, vmax=vmax, **style)
    if colorbar:
        seen = matrix[~hidden]
        extend = {(True, True): "both", (True, False): "min", (False, True): "max", (False, False): "neither"}
        clipped = bool((seen < vmin).any()), bool((seen > vmax).any())
        colour_bar(ax, image, words, extend=extend[clipped])


def largest(matrix: Tensor) -> float:
    """The largest finite magnitude; never 0, since colours need a range."""
    return max(float(matrix.abs().nan_to_num(0, 0, 0).max()), 1e-12)
