"""What all figures share: axes, colours, ticks, labels and legends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from depthmix.support.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEEDS_MATPLOTLIB = "figures need matplotlib; install it with: pip install 'depthmix[figures]'"
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's
BLACK, BLUE, ORANGE, GREEN = COLOURS[:4]
GREY, PALE = "#9a9a9a", "#d4d4d4"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", ":", "-.")
MOST_TICKS = 9
MOST_ACROSS = 7  # along x, where words stand beside each other
MOST_NAMES = 13  # of words along an axis
MOST_INSIDE = 4  # of lines in a legend inside the axes


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


def style(k: int) -> dict[str, Any]:
    """Colour, line and marker of the k-th of several lines."""
    line = LINES[k // len(COLOURS) % len(LINES)]
    return {"color": COLOURS[k % len(COLOURS)], "linestyle": line, "marker": MARKERS[k % len(MARKERS)]}


def label_axes(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(x, fontsize=8)
    ax.set_ylabel(y, fontsize=8)
    ax.tick_params(labelsize=7, length=2)


def show_grid(ax: Axes) -> None:
    ax.grid(color="0.92", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def show_legend(ax: Axes, *, below: bool = False, columns: int = 2, handles: Sequence[Any] | None = None) -> None:
    """Inside the axes, or below them: where it is long, it would cover what is drawn."""
    from matplotlib.transforms import ScaledTranslation

    shown = ax.get_legend_handles_labels()[0] if handles is None else list(handles)
    figure: Any = ax.get_figure(root=True)
    look: dict[str, Any] = {"handles": shown, "fontsize": 7, "frameon": False, "handlelength": 1.8, "labelspacing": 0.3}
    if shown and (below or len(shown) > MOST_INSIDE):
        lower = ax.transAxes + ScaledTranslation(0, -26 / 72, figure.dpi_scale_trans)
        where: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": lower}
        ax.legend(ncols=columns, columnspacing=1, **where, **look)
    elif shown:
        ax.legend(borderaxespad=0.3, **look)


def colour_bar(ax: Axes, mappable: Any, words: str = "", **options: Any) -> Any:
    from matplotlib.colors import LogNorm

    bar: Any = ax.figure.colorbar(mappable, ax=ax, fraction=0.046, pad=0.03, **options)
    if isinstance(bar.norm, LogNorm):
        log_ticks(bar.ax.yaxis, *mappable.get_clim())
    bar.ax.tick_params(labelsize=6, length=2)
    bar.outline.set_linewidth(0.6)
    if words:
        bar.set_label(words, fontsize=7)
    return bar


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Plain numbers, and enough of them where the axis spans less than a few powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def few(count: int, most: int = MOST_TICKS) -> list[int]:
    """At most `most` of the first `count` numbers, evenly spaced, with the first and the last."""
    step = math.ceil(count / most)
    return [*range(0, count - step, step), count - 1]


def readers(sublayers: int) -> list[str]:
    """Names of the rows of M."""
    return [*map(str, range(1, sublayers + 1)), "head"]


def count_ticks(axis: Any) -> None:
    """Numbers of tokens as 500k or 2M."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(EngFormatter(sep=""))


def plain(text: str) -> str:
    """Text of a file as matplotlib shows it unchanged: without formulas, control characters and a leading _."""
    shown = printable(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}; expected one of {', '.join(map(repr, choices))}")


def check_limit(limit: float | None) -> None:
    if limit is not None and not (0 < limit < math.inf):
        raise ValueError(f"limit={limit}; expected a positive number, or None for the largest magnitude")
