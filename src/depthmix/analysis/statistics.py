"""Means of paired values with Student's interval, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
POWER = 0.80  # with which a difference of `visible` would be detected


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds with its confidence interval; one value alone has none."""

    mean: float
    low: float | None
    high: float | None
    visible: float | None  # a true value this far from 0 would be detected with power `POWER`
    values: tuple[float, ...]

    def excludes(self, value: float) -> bool:
        """Whether the interval lies on one side of `value`."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high

    def mapped(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of an increasing function of the value; its mean is the function of the mean."""
        ends = [None if end is None else function(end) for end in (self.low, self.high)]
        values = tuple(map(function, self.values))
        return Estimate(mean=function(self.mean), low=ends[0], high=ends[1], visible=None, values=values)


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The mean of independent values, with Student's interval if there are at least two."""
    n = len(values)
    if not n:
        raise ValueError("no values; expected at least one")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean=mean, low=None, high=None, visible=None, values=tuple(values))
    error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    half = student(confidence, n - 1) * error
    visible = half + student(2 * POWER - 1, n - 1) * error
    return Estimate(mean=mean, low=mean - half, high=mean + half, visible=visible, values=tuple(values))


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """The geometric mean of paired ratios."""
    return estimate([math.log(a / b) for a, b in zip(above, below, strict=True)]).mapped(math.exp)


def student(confidence: float, freedom: int) -> float:
    """t with P(|T| ≤ t) = confidence, by bisection over the angle θ = atan(t / √ν)."""
    if not 0 < confidence < 1 or freedom < 1:
        raise ValueError(
            f"confidence={confidence}, {freedom} degrees of freedom; expected a confidence in (0, 1) and at least 1"
        )
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle, freedom) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def inside(angle: float, freedom: int) -> float:
    """P(|T| ≤ √ν tan θ) for a whole number ν: a finite series (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    odd = freedom % 2
    cosine = math.cos(angle)
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Linear interpolation; xs ascend, and x lies within them."""
    for i in range(1, len(xs)):
        if x <= xs[i]:
            share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
            return ys[i - 1] + share * (ys[i] - ys[i - 1])
    return ys[-1]
