"""Pure tensor functions of depth mixing. `depthmix.ops.reference` holds each of them in plain torch."""

from depthmix.ops.attend import attend, check_sources, merge, mixture, mixtures
from depthmix.ops.backend import using
from depthmix.ops.reference import (
    accumulator,
    delta_rule,
    elu1,
    fold,
    key_of,
    linear,
    mix,
    read_streams,
    rms_norm,
    scores,
    weighted_sum,
    wide,
    write_streams,
)
from depthmix.ops.sinkhorn import sinkhorn

__all__ = [
    "accumulator",
    "attend",
    "check_sources",
    "delta_rule",
    "elu1",
    "fold",
    "key_of",
    "linear",
    "merge",
    "mix",
    "mixture",
    "mixtures",
    "read_streams",
    "rms_norm",
    "scores",
    "sinkhorn",
    "using",
    "weighted_sum",
    "wide",
    "write_streams",
]
