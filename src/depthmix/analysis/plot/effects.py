"""Mass against effect: `importance`. What was read, and what changes if it had not been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from depthmix.analysis.ablation import Ablation
from depthmix.analysis.plot.axes import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    check_choice,
    label_axes,
    new_axes,
    plain,
    show_grid,
    show_legend,
)
from depthmix.analysis.plot.sources import check_survey
from depthmix.analysis.survey_file import Survey

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {  # of a cut: its marker, colour and words for the legend
    "family": ("D", BLACK, "family of sources"),
    "source": ("o", BLUE, "source"),
    "route": ("^", ORANGE, "route"),
    "value": ("s", GREEN, "route of values"),
}
PLACES = [  # of a name beside its point, in points (1/72 inch)
    *((5, 3), (-5, 3), (5, -9), (-5, -9), (0, 6), (0, -12), (8, -3), (-8, -3)),
    *((10, 10), (-10, 10), (10, -16), (-10, -16), (0, 14), (0, -20), (16, 3), (-16, 3), (18, -12), (-18, -12)),
]
Effect = Mapping[str, Any]


def importance(
    ablation: Ablation | Mapping[str, Any],
    survey: Survey | None = None,
    ax: Axes | None = None,
    *,
    measure: Literal["loss", "kl"] = "loss",
    labels: int = 8,
    log: bool = False,
    title: str = "",
) -> Axes:
    """Draw the mass of each cut, the share of |M| in the rows that were cut, against what changed without it.

    Bars are intervals over sequences. Grey dashes are random cuts of as many connections, where there are some: an
    effect beyond them is due to these connections and not to their number.

    Args:
        ablation: what `ablate` returns, or the content of a run's ablation.json.
        survey: of the same model; names then say the kind of the sublayer, that of a source or the reader of a route.
        ax: axes to draw into. None: new ones, of a new figure of pyplot.
        measure: "loss", the change of the mean loss of a token; or "kl", the divergence of the predictions.
        labels: how many cuts get their names: families first, then those with the largest effects. A name that finds
            no room is left out.
        log: whether the axes are logarithmic: that of the change within a hundredth of the largest one is linear.
    """
    effects = effects_of("importance", ablation)
    check_choice("measure", measure, ("loss", "kl"))
    if survey is not None:
        check_survey("importance", survey)
    axes = new_axes(ax)
    if log:
        axes.set_xscale("log")
        largest = max(abs(number(effect[measure]["mean"])) for effect in effects) or 1.0
        axes.set_yscale("symlog", linthresh=largest / 100)
    axes.axhline(0, color="0.5", linewidth=0.8)
    controls = [(e["mass"], change) for e in effects for change in (e.get("controls") or {}).get(measure, [])]
    if controls:
        masses, changes = zip(*controls, strict=True)
        axes.plot(masses, changes, "_", color="0.6", markersize=6, markeredgewidth=0.8, label="random cuts of as many")
    for kind in KINDS:
        draw_kind(axes, [effect for effect in effects if effect["kind"] == kind], kind, measure)
    words = "change of the loss" if measure == "loss" else "divergence"
    label_axes(axes, title, "mass: share of |M| that was cut", f"{words} (nats per token)")
    show_grid(axes)
    show_legend(axes, below=True)
    named = sorted(effects, key=lambda e: (e["kind"] != "family", -abs(number(e[measure]["mean"]))))[: max(0, labels)]
    name_points(axes, [(e["mass"], e[measure]["mean"], name_of(e, survey)) for e in named])
    return axes


def effects_of(function: str, ablation: object) -> list[Effect]:
    content = ablation.to_dict() if isinstance(ablation, Ablation) else ablation
    if not isinstance(content, Mapping) or not isinstance(content.get("effects"), list):
        what = "a mapping without effects" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise TypeError(f"{function} got {what}; expected an Ablation, or the content of a run's ablation.json")
    if not content["effects"]:
        raise ValueError(f"{function} got an ablation without effects; expected one that cut something")
    return content["effects"]


def number(value: float | None) -> float:
    return 0.0 if value is None else value


def draw_kind(ax: Axes, effects: Sequence[Effect], kind: str, measure: str) -> None:
    if not effects:
        return
    marker, colour, words = KINDS[kind]
    means = [effect[measure]["mean"] for effect in effects]
    lows = [
        mean - low if (low := e[measure]["low"]) is not None else 0.0 for e, mean in zip(effects, means, strict=True)
    ]
    highs = [
        high - mean if (high := e[measure]["high"]) is not None else 0.0 for e, mean in zip(effects, means, strict=True)
    ]
    masses = [effect["mass"] for effect in effects]
    look: dict[str, Any] = {"color": colour, "markersize": 4, "elinewidth": 0.8, "capsize": 1.5, "capthick": 0.8}
    ax.errorbar(masses, means, yerr=[lows, highs], fmt=marker, label=words, **look)


def name_of(effect: Effect, survey: Survey | None) -> str:
    """Without what the marker says; with the kind of a source's or a reader's sublayer, if a survey knows it."""
    name, kind = plain(str(effect["name"]).removeprefix(f"{effect['kind']} ")), effect["kind"]
    if survey is None or kind not in ("source", "route"):
        return name
    kinds = ["embedding", *survey.figures["kinds"], "head"]
    sublayer = effect["source"] if kind == "source" else effect["row"] + 1
    if not 0 <= sublayer < len(kinds):
        raise ValueError(f"{effect['name']!r} is no cut of the survey's model: that has {len(kinds) - 2} sublayers")
    return f"{name} ({kinds[sublayer]})"


def name_points(ax: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """A name beside each point, where it covers no other name, no point and not the legend; otherwise none."""
    from matplotlib.transforms import Bbox

    figure: Any = ax.figure
    figure.draw_without_rendering()  # from here on it is known where points are
    marked = [line for line in ax.lines if line.get_marker() != "None"]
    spots = [spot for line in marked for spot in ax.transData.transform(line.get_xydata())]
    taken = [Bbox.from_bounds(x - 2.5, y - 2.5, 5, 5) for x, y in spots]
    if (legend := ax.get_legend()) is not None:
        taken.append(legend.get_window_extent())
    for x, y, name in points:
        for place in PLACES:
            text = write_beside(ax, name, (x, y), place)
            box = text.get_window_extent()
            if holds(ax.bbox, box) and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def write_beside(ax: Axes, name: str, point: tuple[float, float], place: tuple[int, int]) -> Any:
    side: Any = "center" if place[0] == 0 else "left" if place[0] > 0 else "right"
    return ax.annotate(name, point, place, textcoords="offset points", fontsize=6.5, ha=side, color="0.25")


def holds(outer: Any, inner: Any) -> bool:
    return bool(outer.x0 <= inner.x0 and inner.x1 <= outer.x1 and outer.y0 <= inner.y0 and inner.y1 <= outer.y1)
