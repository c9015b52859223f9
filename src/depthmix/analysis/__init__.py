"""What a model's layers read: traces, the depth mixing matrix and its structure."""

from depthmix.analysis.structure import effective_rank, row_sums, semiseparable_rank, sinks
from depthmix.analysis.trace import Trace, trace

__all__ = ["Trace", "effective_rank", "row_sums", "semiseparable_rank", "sinks", "trace"]
