"""Comparisons of many runs: arms, runs as processes, statistics, scaling laws, and their pages."""

from depthmix.studies.arms import Arm, Grid, Size, make_arms
from depthmix.studies.comparison import Comparison, compare, read_run
from depthmix.studies.scaling import fit
from depthmix.studies.study import Study, run_study

__all__ = ["Arm", "Comparison", "Grid", "Size", "Study", "compare", "fit", "make_arms", "read_run", "run_study"]
