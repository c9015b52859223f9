"""Benchmarks, for an installed package: `depthmix bench`."""

from depthmix.bench.memory import kept_bytes_per_token
from depthmix.bench.model import Size
from depthmix.bench.processes import ChildFailed, Job, run_child, run_jobs
from depthmix.bench.report import CONTROL, Report, Row, ratio_rows
from depthmix.bench.suite import PARTS, Part, Settings, run_suite
from depthmix.bench.timing import Ratio, measure, paired, pool

__all__ = [
    "CONTROL",
    "PARTS",
    "ChildFailed",
    "Job",
    "Part",
    "Ratio",
    "Report",
    "Row",
    "Settings",
    "Size",
    "kept_bytes_per_token",
    "measure",
    "paired",
    "pool",
    "ratio_rows",
    "run_child",
    "run_jobs",
    "run_suite",
]
