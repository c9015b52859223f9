"""Paired timing: variants take turns in one process, and only ratios within a round count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

MARGIN = 0.03  # where the control differs from itself by more, nothing is decided


@dataclass(frozen=True)
class Ratio:
    """Time of a variant over that of the baseline, over paired rounds."""

    median: float
    low: float  # quarter of the rounds lie below
    high: float  # quarter of the rounds lie above
    rounds: int

    def verdict(self, bound: float) -> str:
        """Against an upper bound: holds, fails, or undecided where the middle half straddles it."""
        if self.low <= bound <= self.high:
            return "undecided"
        return "holds" if self.median <= bound else "fails"


def measure(
    variants: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    warmup: int = 1,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict[str, list[float]]:
    """Seconds of each variant in each round; the order rotates, so that no one always follows the same other."""
    names = list(variants)
    for _ in range(warmup):
        for name in names:
            variants[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in progress(range(rounds)):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            begun = time.perf_counter()
            variants[name]()
            times[name].append(time.perf_counter() - begun)
    return times


def ratio(times: Mapping[str, list[float]], name: str, baseline: str, scale: float = 1.0) -> Ratio:
    """Of `name` to `scale` times the baseline, round by round."""
    each = sorted(a / (b * scale) for a, b in zip(times[name], times[baseline], strict=True))
    quarters = statistics.quantiles(each, n=4) if len(each) > 1 else [each[0]] * 3
    return Ratio(statistics.median(each), quarters[0], quarters[2], len(each))
