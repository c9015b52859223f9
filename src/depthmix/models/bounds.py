"""Where to divide a decoder into segments: evenly by the number of executions, or by their FLOPs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from typing import Literal

from depthmix.models.config import DecoderConfig
from depthmix.models.counting import execution_flops, spread
from depthmix.support.checks import check_range


def segment_bounds(
    config: DecoderConfig,
    segments: int,
    *,
    by: Literal["count", "flops"] = "count",
    tokens_per_row: int | None = None,
) -> list[tuple[int, int]]:
    """The bounds (lo, hi) of each segment, for `Segment(config, lo, hi)`.

    Args:
        config: the decoder. Its executions of sublayers are divided: attention and MLP count separately, a looped
            layer each time, so that 93 layers are 186 executions.
        segments: the number of segments, at most that of executions.
        by: "count": their lengths differ by at most 1, whatever the number of executions. "flops": the
            segment with the most FLOPs has as few as possible, and each of the others about an even share of the rest.
            The head counts as a part of the last execution; the embedding is a lookup, without FLOPs.
        tokens_per_row: length of the rows, which decides the cost of attention; needed for "flops".
    """
    if by not in ("count", "flops"):
        raise ValueError(f"by={by!r}; expected 'count' or 'flops'")
    check_range("segments", segments, 1, config.depth, remedy="A segment has at least one execution of a sublayer")
    if by == "count":
        ends = [0, *accumulate(spread(config.depth, segments))]
    elif tokens_per_row is None:
        raise ValueError("by='flops' without tokens_per_row; expected the number of tokens in a row, such as 2048")
    else:
        *flops, output = execution_flops(config, tokens_per_row)
        ends = divide([*flops[:-1], flops[-1] + output], segments)
    return list(pairwise(ends))


def divide(costs: list[int], parts: int) -> list[int]:
    """The ends of contiguous parts, none empty, whose largest cost is the least possible. Costs are positive."""
    sums, count = [0, *accumulate(costs)], len(costs)

    def starts(limit: int) -> list[int]:
        """For k = 0 … parts: from where on k parts of at most `limit` reach the end."""
        first = [count]
        for _ in range(parts):
            first.append(bisect_left(sums, sums[first[-1]] - limit))
        return first

    low, high = max(costs), sums[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if starts(middle)[-1] == 0 else (middle + 1, high)
    first, ends = starts(high), [0]
    for left in range(parts - 1, 0, -1):
        target = sums[ends[-1]] + (sums[-1] - sums[ends[-1]]) / (left + 1)  # an even share of the rest
        above = bisect_left(sums, target)
        nearest = above if sums[above] - target <= target - sums[above - 1] else above - 1
        least = max(ends[-1] + 1, first[left])
        most = min(bisect_right(sums, sums[ends[-1]] + high) - 1, count - left)
        ends.append(min(max(nearest, least), most))
    return [*ends, count]
