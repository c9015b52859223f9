"""Paired timing: variants take turns in one process, only ratios within a round count, and processes are pooled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import TypeVar

FEWEST = 6  # rounds of one process for which the range of the values is a 95 % confidence interval of the median
Samples = Sequence[Sequence[float]]  # the paired ratios of each process
Name = TypeVar("Name")


@dataclass(frozen=True)
class Ratio:
    """Time of a variant relative to the baseline, with the interval that its verdict is based on."""

    median: float
    low: float
    high: float

    def verdict(self, bound: float, drift: float = 0.0) -> str:
        """Of an upper bound: holds, fails, or undecided if it is no farther from the interval than `drift`."""
        if self.low - drift <= bound <= self.high + drift:
            return "undecided"
        return "holds" if self.median <= bound else "fails"


def measure(
    variants: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    warmup: int = 1,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict[str, list[float]]:
    """Seconds of each variant in each round."""
    clocks = {"wall": time.perf_counter}
    return measure_clocks(variants, clocks, rounds=rounds, warmup=warmup, progress=progress)["wall"]


def measure_clocks(
    variants: Mapping[Name, Callable[[], None]],
    clocks: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warmup: int = 1,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict[str, dict[Name, list[float]]]:
    """Seconds by each clock, for each variant and round; the order rotates, so that none is always first."""
    names = list(variants)
    for _ in range(warmup):
        for name in names:
            variants[name]()
    times: dict[str, dict[Name, list[float]]] = {clock: {name: [] for name in names} for clock in clocks}
    for turn in progress(range(rounds)):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            begun = {clock: read() for clock, read in clocks.items()}
            variants[name]()
            for clock, read in clocks.items():
                times[clock][name].append(read() - begun[clock])
    return times


def paired(times: Mapping[str, list[float]], name: str, baseline: str, scale: float = 1.0) -> list[float]:
    """Ratios of `name` to `scale` times the baseline, round by round."""
    return [a / (b * scale) for a, b in zip(times[name], times[baseline], strict=True)]


def pool(samples: Samples) -> Ratio:
    """The median of the processes' medians, with the interval from the smallest of them to the largest.

    For one process, its median with the 95 % confidence interval by order statistics, which does not include the larger
    spread between processes.
    """
    if not samples or not all(samples):
        raise ValueError(
            f"{len(samples)} processes with {[len(s) for s in samples]} rounds; expected at least 1 of each"
        )
    if len(samples) == 1:
        return Ratio(statistics.median(samples[0]), *median_interval(samples[0]))
    medians = [statistics.median(each) for each in samples]
    return Ratio(statistics.median(medians), min(medians), max(medians))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The narrowest symmetric pair of order statistics that contains the median with this confidence.

    Below `FEWEST` rounds no pair does; then it is the smallest and the largest value.
    """
    ordered, n = sorted(values), len(values)
    outside, k = 0.0, 0
    while k < n // 2:
        outside += 2 * comb(n, k) / 2**n  # the median lies beyond the k-th smallest or k-th largest
        if outside > 1 - confidence:
            break
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]
