"""Pure tensor functions of depth mixing. `depthmix.ops.reference` holds each of them in plain torch."""

from depthmix.ops.attend import attend, check_sources, merge, mixture, mixtures
from depthmix.ops.backend import sharing_pays, using
from depthmix.ops.delta import normed_delta
from depthmix.ops.grouped import grouped_linear, plain_grouped_linear
from depthmix.ops.memory import empty_cache, keep_freed_memory
from depthmix.ops.reference import (
    KeyNorm,
    accumulator,
    delta_rule,
    elu1,
    fold,
    key_of,
    linear,
    mix,
    rms_norm,
    scores,
    unit_key,
    wide,
)
from depthmix.ops.sinkhorn import sinkhorn
from depthmix.ops.streams import head_products, normed_linear, read_streams, weighted_sum, write_streams

__all__ = [
    "KeyNorm",
    "accumulator",
    "attend",
    "check_sources",
    "delta_rule",
    "elu1",
    "empty_cache",
    "fold",
    "grouped_linear",
    "head_products",
    "keep_freed_memory",
    "key_of",
    "linear",
    "merge",
    "mix",
    "mixture",
    "mixtures",
    "normed_delta",
    "normed_linear",
    "plain_grouped_linear",
    "read_streams",
    "rms_norm",
    "scores",
    "sharing_pays",
    "sinkhorn",
    "unit_key",
    "using",
    "weighted_sum",
    "wide",
    "write_streams",
]
