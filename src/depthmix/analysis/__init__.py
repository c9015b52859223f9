"""What a model's layers read: traces, the depth mixing matrix and its structure."""

from importlib import import_module
from types import ModuleType

from depthmix.analysis.magnitudes import Magnitudes, measuring
from depthmix.analysis.structure import effective_rank, row_sums, semiseparable_rank, sinks
from depthmix.analysis.trace import Trace, trace, tracing

__all__ = [
    "Magnitudes",
    "Trace",
    "effective_rank",
    "measuring",
    "row_sums",
    "semiseparable_rank",
    "sinks",
    "trace",
    "tracing",
]


def __getattr__(name: str) -> ModuleType:
    """`figures`, `invariants` and `plot` are imported on first use."""
    if name in ("figures", "invariants", "plot"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
