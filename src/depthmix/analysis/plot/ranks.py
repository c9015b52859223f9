"""Ranks of M of several models: `ranks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from depthmix.analysis.plot.axes import BLACK, BLUE, ORANGE, label_axes, new_axes, plain, show_grid, show_legend
from depthmix.analysis.plot.sources import check_survey, mechanism_of
from depthmix.analysis.survey_file import Survey

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ranks(
    surveys: Survey | Mapping[str, Survey],
    ax: Axes | None = None,
    *,
    title: str = "",
) -> Axes:
    """Draw the ranks of M, a row for each model: the semiseparable rank, mean and largest over tokens; the effective
    rank, with its standard deviation over tokens; and what the mechanism's formula allows.

    Args:
        surveys: one survey, or surveys by the name of their row.
        ax: axes to draw into. None: new ones, of a new figure of pyplot.
    """
    named = {mechanism_of(surveys): surveys} if isinstance(surveys, Survey) else surveys
    if not isinstance(named, Mapping):
        check_survey("ranks", named)
    if not named:
        raise ValueError("surveys is empty; expected a survey, or surveys by name")
    for survey in named.values():
        check_survey("ranks", survey)
    contents = [survey.figures for survey in named.values()]
    if not any(content["rank"] or content["effective_rank"] for content in contents):
        raise ValueError("none of these models has a rank: their sources are multiplied by matrices, not by weights")
    axes = new_axes(ax)
    draw_ranks(axes, contents)
    for y, content in enumerate(contents):
        if not content["rank"]:
            axes.text(0.5, y, "no rank: operators", fontsize=7, color="0.4", va="center")
    axes.set_yticks(range(len(named)), [plain(name) for name in named])
    axes.set_ylim(len(named) - 0.4, -0.6)
    axes.set_xlim(left=0)
    label_axes(axes, title, "rank of M", "")
    show_grid(axes)
    show_legend(axes, below=True, columns=1)
    return axes


def draw_ranks(ax: Axes, contents: Sequence[Mapping[str, Any]]) -> None:
    exact = [(y, content["rank"]) for y, content in enumerate(contents) if content["rank"]]
    declared = [(y, rank["declared"]) for y, rank in exact if rank["declared"] is not None]
    soft = [(y, content["effective_rank"]) for y, content in enumerate(contents) if content["effective_rank"]]
    if declared:
        look: dict[str, Any] = {"markersize": 7, "markerfacecolor": "none", "color": BLACK, "markeredgewidth": 0.8}
        ax.plot([rank for _, rank in declared], [y for y, _ in declared], "D", label="allowed by the formula", **look)
    if exact:
        rows = [y for y, _ in exact]
        means, most = ([rank[name] for _, rank in exact] for name in ("mean", "max"))
        ax.hlines(rows, means, most, color=BLUE, linewidth=1.2)
        ax.plot(most, rows, "|", color=BLUE, markersize=8)
        ax.plot(means, rows, "s", color=BLUE, markersize=4, label="semiseparable: mean to largest")
    if soft:
        means, spread = ([rank[name] for _, rank in soft] for name in ("mean", "std"))
        look = {"fmt": "o", "color": ORANGE, "markersize": 4, "elinewidth": 0.8, "capsize": 2}
        ax.errorbar(means, [y + 0.22 for y, _ in soft], xerr=spread, label="effective: mean ± deviation", **look)
