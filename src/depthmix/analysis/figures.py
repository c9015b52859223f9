"""Pictures of saved traces. Needs matplotlib: pip install 'depthmix[figures]'."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from depthmix.analysis.trace import Trace
from depthmix.support.files import replacing


def heat_map(trace: Trace, path: str | os.PathLike[str], title: str | None = None) -> None:
    """M of a trace as a PNG or, by the ending of `path`, SVG or PDF; see `mean_matrix`."""
    heat_maps([trace], path, [title or trace.mechanism], columns=1)


def heat_maps(
    traces: Sequence[Trace],
    path: str | os.PathLike[str],
    titles: Sequence[str],
    columns: int = 5,
    notes: Sequence[str] = (),
) -> None:
    """Several of them side by side, each on its own scale, blue above zero and red below."""
    figure = new_figure()
    rows = math.ceil(len(traces) / columns)
    size = 2.6 if len(traces) > 1 else 4.6
    figure.set_size_inches(size * columns, (size + 0.05) * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(traces) :]:
        axis.axis("off")
    for k, (trace, title) in enumerate(zip(traces, titles, strict=True)):
        matrix, description = mean_matrix(trace)
        note = ", ".join(filter(None, [notes[k] if notes else "", description]))
        draw_matrix(axes.flat[k], matrix, title, note, detailed=len(traces) == 1)
    save(figure, Path(path))


def weights_map(trace: Trace, path: str | os.PathLike[str], title: str | None = None) -> None:
    """Weights over sources, the mean over tokens and of the first head: a column for each source by its name."""
    if trace.weights is None:
        raise ValueError(f"{trace.mechanism} does not weight a list of sources; draw M with heat_map")
    weights = trace.weights.double().reshape(-1, *trace.weights.shape[trace.sources.dim() - 2 :]).mean(0)
    weights = weights if weights.dim() == 2 else weights[0]
    rows, columns = weights.shape
    unread = weights.new_ones(rows, columns).bool()
    for row, read in enumerate(trace.reads):
        unread[row, read] = False
    figure = new_figure()
    figure.set_size_inches(1.6 + 0.3 * columns, 1.6 + 0.22 * rows)
    axis = figure.subplots()
    axis.set_facecolor("0.93")
    shown = weights.masked_fill(unread, float("nan")).numpy()
    image = axis.imshow(shown, cmap="Blues", vmin=0, vmax=max(float(weights.max()), 1e-12), aspect="auto")
    for row, partial in enumerate(trace.partial):
        if partial:
            axis.text(trace.reads[row][-1], row, "+", ha="center", va="center", fontsize=8, color="0.4")
    axis.set_title(title or trace.mechanism, fontsize=10)
    axis.set_xlabel("source" + (" (+: still growing)" if any(trace.partial) else ""), fontsize=8)
    axis.set_ylabel("row", fontsize=8)
    axis.set_xticks(range(columns), trace.source_names, rotation=60, ha="right")
    axis.set_yticks(range(rows), [*map(str, range(1, rows)), "head"])
    axis.tick_params(labelsize=7, length=2)
    figure.colorbar(image, ax=axis, fraction=0.046, pad=0.03).ax.tick_params(labelsize=6, length=2)
    save(figure, Path(path))


def save(figure: Any, target: Path) -> None:
    with replacing(target) as part:
        figure.savefig(part, dpi=130, format=target.suffix[1:])


def mean_matrix(trace: Trace) -> tuple[Tensor, str]:
    """One matrix and its description: the mean over tokens, of the first head or channel where they differ."""
    M, words = trace.M.double(), []
    if trace.kind in ("head", "channel"):
        words = [f"{trace.kind} {trace.channels[0] if trace.channels else 0}"]
        M = M[..., 0, :, :]
    M = M.reshape(-1, *M.shape[-2:])
    if trace.kind == "operator":
        words = ["gains of writes"]
    if len(M) > 1:
        words.append(f"mean of {len(M)} tokens")
    return M.mean(0), ", ".join(words)


def draw_matrix(axis: Any, matrix: Tensor, title: str, note: str, detailed: bool) -> None:
    n = matrix.shape[-1]
    limit = max(float(matrix.abs().max()), 1e-12)
    above = matrix.new_ones(n, n).triu(1).bool()
    axis.set_facecolor("0.93")
    image = axis.imshow(matrix.masked_fill(above, float("nan")).numpy(), cmap="RdBu", vmin=-limit, vmax=limit)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("source v" if not note else f"source v\n({note})", fontsize=8)
    axis.set_ylabel("row", fontsize=8)
    ticks = [0, (n - 1) // 2, n - 1]
    axis.set_xticks(ticks)
    axis.set_yticks(ticks, [str(t + 1) for t in ticks[:-1]] + ["head"])
    axis.tick_params(labelsize=7, length=2)
    bar = axis.figure.colorbar(image, ax=axis, fraction=0.046, pad=0.03)
    bar.ax.tick_params(labelsize=6, length=2)
    if detailed:
        axis.set_xticks(range(n))
        axis.set_yticks(range(n), [*map(str, range(1, n)), "head"])


def new_figure() -> Any:
    """A figure of its own: nothing of the user's pyplot or backend is touched."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ModuleNotFoundError("figures need matplotlib; install it with: pip install 'depthmix[figures]'") from None
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    return figure
