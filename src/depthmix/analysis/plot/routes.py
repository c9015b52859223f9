"""The strongest routes from sources to readers as arcs: `routes`.

Axes: n = L+1 readers (rows) and sources (columns).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from depthmix.analysis.ablation import Ablation
from depthmix.analysis.plot.axes import (
    BLACK,
    BLUE,
    GREY,
    MOST_ACROSS,
    ORANGE,
    PALE,
    check_limit,
    colour_bar,
    few,
    label_axes,
    new_axes,
    show_legend,
)
from depthmix.analysis.plot.effects import effects_of
from depthmix.analysis.plot.sources import check_survey, mechanism_of, tensor_of
from depthmix.analysis.survey_file import Survey

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDEST = 5.0  # points
READERS = {"attn": BLUE, "mlp": ORANGE, "head": BLACK}
Route = tuple[int, int]  # row and column of M, from 0
Effects = Mapping[Route, "float | None"]


def routes(
    survey: Survey,
    ablation: Ablation | Mapping[str, Any] | None = None,
    ax: Axes | None = None,
    *,
    most: int = 20,
    limit: float | None = None,
    title: str | None = None,
    colorbar: bool = True,
) -> Axes:
    """Draw the strongest routes as arcs from a source (0: the embedding) to the sublayer that reads it, or the head.

    An arc is as wide as the source's share of the read, by projection; it is dashed where the share is negative. Reads
    of attention are above the line, those of MLPs below it. What the first sublayer reads, all of it the embedding, is
    left out.

    Args:
        survey: what `Survey.load(folder)` returns.
        ablation: what `ablate` returns, or the content of a run's ablation.json. Colours are then the change of the
            loss when a route is cut, and routes that were not cut are pale. None: colours are the kind of the reader.
        ax: axes to draw into. None: new ones, of a new figure of pyplot.
        most: how many routes.
        limit: colours of effects span −limit to limit. None: the largest effect of a route that is drawn.
        title: of the axes. None: the mechanism's name.
        colorbar: whether the axes get a colour bar of the effects.
    """
    check_survey("routes", survey)
    if not isinstance(most, int) or most < 1:
        raise ValueError(f"most={most!r}; expected a whole number above 0")
    check_limit(limit)
    share = tensor_of(survey, "share", "make the survey again with this version")
    chosen, kinds = strongest(share, most), [*survey.figures["kinds"], "head"]
    effects = None if ablation is None else route_effects(ablation)
    if effects is not None and not set(effects) & set(chosen):
        raise ValueError(
            f"none of the {len(chosen)} strongest routes was cut in this ablation; cut them, or raise most"
        )
    axes = new_axes(ax)
    colours = None if effects is None else effect_colours([effects.get(route) for route in chosen], limit)
    largest = max(abs(float(share[route])) for route in chosen)
    for row, column in reversed(chosen):  # the strongest above the others
        colour: Any = READERS.get(kinds[row], GREY)
        if effects is not None and colours is not None:
            effect = effects.get((row, column))
            colour = PALE if effect is None else colours.to_rgba(effect)
        size = float(share[row, column])
        draw_arc(axes, column, row + 1, -1 if kinds[row] == "mlp" else 1, size, WIDEST * abs(size) / largest, colour)
    reach = 1.1 * math.sqrt(max(row + 1 - column for row, column in chosen))
    axes.set_ylim(-reach if any(kinds[row] == "mlp" for row, _ in chosen) else -0.3, reach)
    label_nodes(axes, len(share), mechanism_of(survey) if title is None else title)
    show_widths(axes, largest, [] if effects is not None else sorted({kinds[row] for row, _ in chosen}))
    if colours is not None and colorbar:
        colour_bar(axes, colours, "change of the loss when cut (nats)")
    return axes


def strongest(share: Tensor, most: int) -> list[Route]:
    n = len(share)
    found = [(row, i) for row in range(1, n) for i in range(row + 1) if math.isfinite(v := float(share[row, i])) and v]
    if not found:
        raise ValueError("this survey has no routes: no share is finite and other than 0; check the model's health")
    return sorted(found, key=lambda route: -abs(float(share[route])))[:most]


def route_effects(ablation: Ablation | Mapping[str, Any]) -> dict[Route, float | None]:
    cut = [effect for effect in effects_of("routes", ablation) if effect["kind"] == "route"]
    return {(effect["row"], effect["source"]): effect["loss"]["mean"] for effect in cut}


def effect_colours(effects: list[float | None], limit: float | None) -> Any:
    """Blue: the loss falls without the route, orange: it rises; grey, which white paper does not hide, for none."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    span = limit or max([abs(effect) for effect in effects if effect is not None], default=0.0) or 1e-12
    return ScalarMappable(Normalize(-span, span), LinearSegmentedColormap.from_list("effect", [BLUE, GREY, ORANGE]))


def draw_arc(ax: Axes, start: int, end: int, side: int, share: float, width: float, colour: Any) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    height = side * math.sqrt(end - start) / 0.75  # the peak of the curve is at 3/4 of its handles
    path = Path([(start, 0), (start, height), (end, height), (end, 0)], [Path.MOVETO, *[Path.CURVE4] * 3])
    line = "--" if share < 0 else "-"
    look: dict[str, Any] = {
        "linewidth": width,
        "edgecolor": colour,
        "linestyle": line,
        "capstyle": "butt",
        "alpha": 0.85,
    }
    ax.add_patch(PathPatch(path, facecolor="none", gid=f"route {start}→{end}", **look))


def label_nodes(ax: Axes, n: int, title: str) -> None:
    """A node for the embedding, each sublayer and the head."""
    ax.plot(range(n + 1), [0] * (n + 1), "o", color="0.2", markersize=2.5, zorder=3)
    names = ["0", *map(str, range(1, n)), "head"]
    ticks = few(n + 1, MOST_ACROSS)
    ax.set_xticks(ticks, [names[t] for t in ticks])
    ax.set_xlim(-0.7, n + 0.7)
    label_axes(ax, title, "source (0: embedding) and reader", "read by")
    low, high = ax.get_ylim()
    sides = {0.5 * high: "attention", 0.5 * low: "MLPs"}
    ax.set_yticks([*sides], [*sides.values()], rotation=90, va="center", fontsize=7)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def show_widths(ax: Axes, largest: float, kinds: list[str]) -> None:
    """A legend of widths, and of colours if they are kinds."""
    from matplotlib.lines import Line2D

    names = {"attn": "attention", "mlp": "MLP"}
    lines = [Line2D([], [], color=READERS.get(kind, GREY), linewidth=2, label=names.get(kind, kind)) for kind in kinds]
    for part in (1.0, 0.5, 0.25):
        words = f"share {part * largest:.2g}"
        lines.append(Line2D([], [], color="0.5", linewidth=WIDEST * part, label=words))
    show_legend(ax, below=True, columns=3, handles=lines)
