"""Pictures of traces as files; `plot` draws them. Needs matplotlib: pip install 'depthmix[figures]'."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from depthmix.analysis.plot import NEEDS_MATPLOTLIB, check_trace, mixing_matrix, source_weights
from depthmix.analysis.trace import Trace
from depthmix.support.files import replacing


def heat_map(trace: Trace, path: str | os.PathLike[str], title: str | None = None) -> None:
    """M of a trace as a PNG or, by the ending of `path`, SVG or PDF; see `plot.mixing_matrix`."""
    figure = new_figure()
    figure.set_size_inches(4.6, 4.65)
    mixing_matrix(trace, figure.subplots(), title=title)
    save(figure, Path(path))


def weights_map(trace: Trace, path: str | os.PathLike[str], title: str | None = None) -> None:
    """Weights over sources, a column for each source by its name; see `plot.source_weights`."""
    check_trace("weights_map", trace)
    figure = new_figure()
    if trace.weights is not None:  # otherwise source_weights says so
        rows, columns = trace.weights.shape[-2:]
        figure.set_size_inches(1.6 + 0.3 * columns, 1.6 + 0.22 * rows)
    source_weights(trace, figure.subplots(), title=title)
    save(figure, Path(path))


def save(figure: Any, target: Path, dpi: int = 130) -> None:
    with replacing(target) as part:
        figure.savefig(part, dpi=dpi, format=target.suffix[1:])


def new_figure() -> Any:
    """A figure of its own: nothing of the user's pyplot or backend is touched."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ModuleNotFoundError(NEEDS_MATPLOTLIB) from None
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    return figure
