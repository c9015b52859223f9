"""Pictures of saved traces. Needs matplotlib: pip install 'depthmix[report]'."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from depthmix.analysis.trace import Trace


def heat_map(trace: Trace, path: str | os.PathLike[str], title: str | None = None) -> None:
    """M averaged over tokens (and heads or channels) as a PNG or, by the ending of `path`, SVG or PDF."""
    heat_maps([trace], path, [title or trace.mechanism], columns=1)


def heat_maps(
    traces: Sequence[Trace],
    path: str | os.PathLike[str],
    titles: Sequence[str],
    columns: int = 5,
    notes: Sequence[str] = (),
) -> None:
    """Several of them side by side, each on its own scale, blue above zero and red below."""
    plt = pyplot()
    rows = math.ceil(len(traces) / columns)
    size = 2.6 if len(traces) > 1 else 4.6
    figure, axes = plt.subplots(
        rows, columns, figsize=(size * columns, (size - 0.15) * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(traces) :]:
        axis.axis("off")
    for k, (trace, title) in enumerate(zip(traces, titles, strict=True)):
        draw(axes.flat[k], mean_matrix(trace), title, notes[k] if notes else "", detailed=len(traces) == 1)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}{target.suffix}")
    figure.savefig(beside, dpi=130)
    plt.close(figure)
    beside.replace(target)


def mean_matrix(trace: Trace) -> Tensor:
    n = trace.M.shape[-1]
    return trace.M.reshape(-1, n, n).double().mean(0)


def draw(axis: Any, matrix: Tensor, title: str, note: str, detailed: bool) -> None:
    n = matrix.shape[-1]
    limit = max(float(matrix.abs().max()), 1e-12)
    above = matrix.new_ones(n, n).triu(1).bool()
    image = axis.imshow(matrix.masked_fill(above, float("nan")), cmap="RdBu", vmin=-limit, vmax=limit)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("source v" if not note else f"source v   ({note})", fontsize=8)
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


def pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError("figures need matplotlib; install it with: pip install 'depthmix[report]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
