"""What one token reads in one row: `token_row`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from depthmix.analysis.plot.axes import (
    BLUE,
    MOST_NAMES,
    ORANGE,
    check_choice,
    few,
    label_axes,
    new_axes,
    plain,
    show_grid,
)
from depthmix.analysis.plot.sources import Source, check_source, mechanism_of, pick
from depthmix.analysis.survey_file import Survey
from depthmix.analysis.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def token_row(
    trace: Source,
    token: int | tuple[int, ...],
    row: int,
    ax: Axes | None = None,
    *,
    quantity: Literal["M", "weights"] = "M",
    head: int = 0,
    mean: bool = True,
    title: str | None = None,
) -> Axes:
    """Draw one row of one token as bars: what this token reads there from each source.

    Args:
        trace: what `dm.trace` or `dm.Trace.load` returns, or a survey, which keeps the rows of its first tokens.
        token: its number from 0, counted through all sequences; or its place, such as (sequence, position).
        row: from 0: row r belongs to sublayer r+1; −1 is the head's.
        ax: axes to draw into. None: new ones, of a new figure of pyplot.
        quantity: "M", or "weights" over the sources that the mechanism weights.
        head: which head, or which of the kept channels, from 0.
        mean: whether a line across each bar marks the mean over the tokens.
        title: of the axes. None: the token and the reader.
    """
    check_source("token_row", trace)
    check_choice("quantity", quantity, ("M", "weights"))
    table, lead, names = table_of(trace, quantity, head)  # [T, n, C]
    rows = table.shape[-2]
    if not -rows <= row < rows:
        raise ValueError(f"row={row}; expected a whole number from 0 to {rows - 1}, or −1 for the head's")
    index, row = place_of(token, lead), row % rows
    columns = range(row + 1) if quantity == "M" else reads_of(trace)[row]
    if not columns:
        raise ValueError(f"row={row} of {mechanism_of(trace)} has no weights: it is a plain sum; draw quantity='M'")
    values, means = ([float(t[row, i]) for i in columns] for t in (table[index], table.mean(0)))
    axes, places = new_axes(ax), range(len(values))
    axes.bar(places, values, width=0.75, color=[BLUE if value >= 0 else ORANGE for value in values])
    axes.axhline(0, color="0.5", linewidth=0.8)
    if mean and len(table) > 1:
        axes.plot(places, means, "_", color="black", markersize=8, markeredgewidth=1.2)
    ticks = few(len(values), MOST_NAMES)
    shown = [plain(names[columns[t]]) for t in ticks]
    turned: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(ticks, shown, **(turned if max(map(len, shown)) > 3 else {}))
    reader = "head" if row == rows - 1 else f"sublayer {row + 1}"
    line = f" (line: mean of {len(table):,} tokens)" if mean and len(table) > 1 else ""
    words = name_token(trace, index, reader) if title is None else title
    label_axes(axes, words, f"source{line}", label_of(trace, quantity))
    show_grid(axes)
    axes.grid(axis="x", visible=False)
    return axes


def table_of(source: Source, quantity: str, head: int) -> tuple[Tensor, tuple[int, ...], list[str]]:
    """[T, n, C] of one head, the shape that T was flattened from, and the names of the columns."""
    if isinstance(source, Survey):
        tensor, count = source.tensors.get(f"table_{quantity}"), 1
        names = source.figures["source_names"]
        grouped = True
    else:
        tensor, count = (source.M if quantity == "M" else source.weights), source.sources.dim() - 2
        names = source.source_names
        grouped = tensor is not None and tensor.dim() > count + 2
    if tensor is None:
        raise ValueError(f"{mechanism_of(source)} does not weight a list of sources; draw quantity='M'")
    tensor = tensor.detach().cpu().double()
    lead = tuple(tensor.shape[:count])
    tensor = pick(tensor.movedim(count, 0), head) if grouped else tensor
    tensor = tensor.reshape(-1, *tensor.shape[-2:])
    return tensor, lead, [str(i) for i in range(tensor.shape[-1])] if quantity == "M" else names


def place_of(token: int | tuple[int, ...], lead: tuple[int, ...]) -> int:
    """The number of a token, counted through all sequences."""
    total = int(torch.Size(lead).numel())
    if isinstance(token, tuple):
        inside = len(token) == len(lead) and all(0 <= t < size for t, size in zip(token, lead, strict=True))
        if not inside:
            most = ", ".join(str(size - 1) for size in lead)
            raise ValueError(f"token={token}; expected {len(lead)} whole numbers from 0, at most ({most})")
        index = 0
        for t, size in zip(token, lead, strict=True):
            index = index * size + t
        return index
    if not 0 <= token < total:
        raise ValueError(f"token={token}; expected a whole number from 0 to {total - 1}")
    return token


def reads_of(source: Source) -> list[list[int]]:
    return source.reads if isinstance(source, Trace) else source.figures["reads"]


def name_token(source: Source, index: int, reader: str) -> str:
    text = "" if isinstance(source, Trace) else f" {source.figures['table']['tokens'][index]!r}"
    return plain(f"token {index}{text}, {reader}")


def label_of(source: Source, quantity: str) -> str:
    kind = source.kind if isinstance(source, Trace) else source.figures["kind"]
    return "weight" if quantity == "weights" or kind != "operator" else "gain of the write"
