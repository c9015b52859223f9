"""Figures for notebooks and papers, drawn into axes of matplotlib: `dm.plot`. `figures` writes traces to files.

Every function takes `ax`, draws into it or into new axes, and returns the axes. Colours are safe for colour blindness,
and labels are readable at the width of one column of a paper (3.3 inches).

Needs matplotlib: pip install 'depthmix[figures]'.
"""

from depthmix.analysis.plot.axes import NEEDS_MATPLOTLIB as NEEDS_MATPLOTLIB
from depthmix.analysis.plot.curves import depth_norms, loss_curves, over_training
from depthmix.analysis.plot.effects import importance
from depthmix.analysis.plot.matrices import mixing_matrix, source_weights, value_matrix
from depthmix.analysis.plot.ranks import ranks
from depthmix.analysis.plot.routes import routes
from depthmix.analysis.plot.rows import token_row
from depthmix.analysis.plot.sources import check_trace as check_trace

__all__ = [
    "depth_norms",
    "importance",
    "loss_curves",
    "mixing_matrix",
    "over_training",
    "ranks",
    "routes",
    "source_weights",
    "token_row",
    "value_matrix",
]
