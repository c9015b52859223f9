"""Benchmarks, for an installed package: `depthmix bench`."""

from depthmix.bench.read import bench_growth, bench_read
from depthmix.bench.step import Size, bench_step, kept_bytes_per_token
from depthmix.bench.timing import MARGIN, Ratio, measure, ratio

__all__ = [
    "MARGIN",
    "Ratio",
    "Size",
    "bench_growth",
    "bench_read",
    "bench_step",
    "kept_bytes_per_token",
    "measure",
    "ratio",
]
