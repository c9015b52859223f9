"""Pure tensor functions; their plain torch forms are in reference.py, attend/reference.py and kda/reference.py."""

from depthmix.ops.attend import (
    ReadOptions,
    attend,
    check_sources,
    fold,
    key_of,
    merge,
    normed_scores,
    read_many,
    read_one,
    scores,
    sharing_pays,
    using,
    weighted_mixture,
)
from depthmix.ops.delta import normed_delta
from depthmix.ops.grouped import grouped_linear, plain_grouped_linear
from depthmix.ops.kda import kda, log_decay, unit_vectors
from depthmix.ops.memory import empty_cache, keep_freed_memory
from depthmix.ops.reference import (
    KeyNorm,
    accumulator,
    delta_rule,
    elu1,
    linear,
    rms_norm,
    unit_key,
    wide,
)
from depthmix.ops.short_conv import ValidFirst, causal_conv
from depthmix.ops.sinkhorn import sinkhorn
from depthmix.ops.streams import head_products, normed_linear, read_streams, weighted_sum, write_streams

__all__ = [
    "KeyNorm",
    "ReadOptions",
    "ValidFirst",
    "accumulator",
    "attend",
    "causal_conv",
    "check_sources",
    "delta_rule",
    "elu1",
    "empty_cache",
    "fold",
    "grouped_linear",
    "head_products",
    "kda",
    "keep_freed_memory",
    "key_of",
    "linear",
    "log_decay",
    "merge",
    "normed_delta",
    "normed_linear",
    "normed_scores",
    "plain_grouped_linear",
    "read_many",
    "read_one",
    "read_streams",
    "rms_norm",
    "scores",
    "sharing_pays",
    "sinkhorn",
    "unit_key",
    "unit_vectors",
    "using",
    "weighted_mixture",
    "weighted_sum",
    "wide",
    "write_streams",
]
