"""How loss falls with compute: power laws with intervals, and what a mechanism is worth in compute.

L(C) = e + a C^(−b), with e = 0 unless asked for, by least squares in ln L. The compute-equivalent factor is that of
arXiv 2603.15031: the compute that the baseline's law needs for the loss that the arm's law has at C, over C.

Axes: N sizes, P parameters of a law (ln a, b and, where fitted, e).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from depthmix.analysis.statistics import CONFIDENCE

Array = NDArray[np.float64]
DRAWS = 20_000
LARGEST = 300.0
STEPS = 400  # of the search for an irreducible loss


@dataclass(frozen=True, kw_only=True)
class Law:
    """L(C) = irreducible + a · (C / unit)^(−b)."""

    a: float
    b: float
    irreducible: float = 0.0
    unit: float = 1.0

    def loss(self, compute: float) -> float:
        return self.irreducible + self.a * (compute / self.unit) ** -self.b

    def compute(self, loss: float) -> float | None:
        """What it takes for this loss; None where the law never reaches it."""
        if loss <= self.irreducible or self.b <= 0:
            return None
        return self.unit * ((loss - self.irreducible) / self.a) ** (-1 / self.b)


def compute_equivalent(arm: Law, baseline: Law, compute: float) -> float | None:
    """The baseline's compute for the arm's loss at `compute`, over `compute`; None where it never reaches that."""
    needed = baseline.compute(arm.loss(compute))
    return None if needed is None else needed / compute


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A law through points, with what its intervals rest on."""

    law: Law
    compute: tuple[float, ...]
    losses: tuple[float, ...]
    residuals: tuple[float, ...]  # of ln L
    freedom: int  # sizes beyond the parameters; without any there are no intervals
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def has_irreducible(self) -> bool:
        """Whether that term was fitted."""
        return len(self.losses) - self.freedom > 2

    @property
    def theta(self) -> Array:
        floor = [self.law.irreducible] if self.has_irreducible else []
        return np.array([np.log(self.law.a), self.law.b, *floor])

    @property
    def design(self) -> Array:
        """Derivatives of ln L by the law's parameters, [N, P]."""
        return jacobian(self.theta, np.asarray(self.compute) / self.law.unit)


def fit(compute: Sequence[float], losses: Sequence[float], *, irreducible: bool = False) -> Fit:
    """Least squares in ln L; compute is counted in units of its geometric mean, so that a and b hardly correlate."""
    c, y = np.asarray(compute, float), np.asarray(losses, float)
    parameters = 3 if irreducible else 2
    if len(c) != len(y) or len(np.unique(c)) < parameters:
        raise ValueError(
            f"{len(c)} compute values and {len(y)} losses; expected at least {parameters} different sizes for a law of "
            f"{parameters} parameters"
        )
    if not (np.isfinite(c).all() and np.isfinite(y).all() and (c > 0).all() and (y > 0).all()):
        raise ValueError("compute and losses must be finite and above 0 for a fit in logarithms")
    unit = float(np.exp(np.log(c).mean()))
    x = c / unit
    theta = fit_line(np.log(x), np.log(y))
    if irreducible:
        theta = fit_with_floor(x, y)
    law = Law(
        a=float(np.exp(theta[0])), b=float(theta[1]), irreducible=float(theta[2]) if irreducible else 0.0, unit=unit
    )
    plain = Fit(
        law=law,
        compute=tuple(c.tolist()),
        losses=tuple(y.tolist()),
        residuals=tuple((np.log(y) - np.log(predicted(theta, x))).tolist()),
        freedom=len(c) - parameters,
    )
    drawn = draw_parameters([plain])
    if drawn is None:
        return plain
    a, b, e = np.exp(drawn[0][:, 0]), drawn[0][:, 1], drawn[0][:, 2:]
    named = {"a": a, "b": b, **({"irreducible": e[:, 0]} if irreducible else {})}
    return Fit(**{**vars(plain), "intervals": {name: central_interval(values) for name, values in named.items()}})


def fit_line(x: Array, y: Array) -> Array:
    """(ln a, b) of ln L = ln a − b ln C."""
    slope, start = np.polyfit(x, y, 1)
    return np.array([start, -slope])


def fit_with_floor(x: Array, y: Array) -> Array:
    """(ln a, b, e): the best e of many below the smallest loss, then Gauss–Newton steps, halved until they help."""
    starts = [np.append(fit_line(np.log(x), np.log(y - e)), e) for e in np.linspace(0, y.min(), STEPS, endpoint=False)]
    theta = min(starts, key=lambda t: misfit(t, x, y))
    for _ in range(100):
        step = np.linalg.lstsq(jacobian(theta, x), np.log(y) - np.log(predicted(theta, x)), rcond=None)[0]
        trials = [clipped(theta + step * 0.5**k, y) for k in range(20)]
        best = min(trials, key=lambda t: misfit(t, x, y))
        if misfit(best, x, y) >= misfit(theta, x, y) * (1 - 1e-12):
            break
        theta = best
    return theta


def clipped(theta: Array, y: Array) -> Array:
    return np.array([theta[0], theta[1], min(max(theta[2], 0.0), y.min() * (1 - 1e-6))])


def predicted(theta: Array, x: Array) -> Array:
    return (theta[2] if len(theta) > 2 else 0.0) + np.exp(theta[0]) * x ** -theta[1]


def misfit(theta: Array, x: Array, y: Array) -> float:
    return float(((np.log(y) - np.log(predicted(theta, x))) ** 2).sum())


def jacobian(theta: Array, x: Array) -> Array:
    power = np.exp(theta[0]) * x ** -theta[1]
    columns = [power, -power * np.log(x), *([np.ones_like(x)] if len(theta) > 2 else [])]
    return np.stack(columns, 1) / predicted(theta, x)[:, None]


def draw_parameters(fits: Sequence[Fit], seed: int = 0) -> list[Array] | None:
    """Parameters [DRAWS, P] of each law from Student's distribution around its fit; None without degrees of freedom.

    Laws over the same sizes are drawn together with the covariance of their residuals: what makes a size better or
    worse for both does not blur the factor between them.
    """
    freedom = min(f.freedom for f in fits)
    if freedom < 1:
        return None
    thetas = [f.theta for f in fits]
    inverses = [np.linalg.pinv(f.design) for f in fits]  # [P, N]: from residuals to parameters
    same = len({len(f.losses) for f in fits}) == 1
    blocks = []
    for i, one in enumerate(fits):
        row = []
        for j, other in enumerate(fits):
            paired = same or i == j
            shared = np.dot(one.residuals, other.residuals) / freedom if paired else 0.0
            row.append(shared * inverses[i] @ inverses[j].T if paired else np.zeros((len(thetas[i]), len(thetas[j]))))
        blocks.append(row)
    covariance = np.block(blocks)
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    root = vectors * np.sqrt(values.clip(min=0))
    random = np.random.default_rng(seed)
    spread = np.sqrt(freedom / random.chisquare(freedom, DRAWS))[:, None]
    drawn = np.concatenate(thetas) + random.standard_normal((DRAWS, len(root))) @ root.T * spread
    drawn = drawn.clip(-LARGEST, LARGEST)  # with one degree of freedom some lie beyond what exp can take
    return np.split(drawn, np.cumsum([len(t) for t in thetas])[:-1], axis=1)


def central_interval(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="nearest")
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True)
class Factor:
    """The compute-equivalent factor at one compute, with its interval.

    Without a factor the baseline's law never reaches the loss; with a lower end alone, it may never reach it.
    """

    compute: float
    factor: float | None
    low: float | None = None
    high: float | None = None

    @property
    def span(self) -> str:
        if self.low is None:
            return ""
        return f"{self.low:.2f} or more" if self.high is None else f"{self.low:.2f} to {self.high:.2f}"


def factor_between(arm: Fit, baseline: Fit, compute: float) -> Factor:
    """With the interval that the joint draws of both laws give; none without degrees of freedom."""
    value = compute_equivalent(arm.law, baseline.law, compute)
    drawn = draw_parameters([arm, baseline])
    if drawn is None:
        return Factor(compute=compute, factor=value)
    mine, theirs = drawn
    x, y = compute / arm.law.unit, compute / baseline.law.unit
    with np.errstate(all="ignore"):  # such draws are infinite, and so is then the interval's end
        loss = (mine[:, 2] if mine.shape[1] > 2 else 0.0) + np.exp(mine[:, 0]) * x ** -mine[:, 1]
        above = loss - (theirs[:, 2] if theirs.shape[1] > 2 else 0.0)
        factors = np.where(above > 0, (above / np.exp(theirs[:, 0])) ** (-1 / theirs[:, 1]) / y, np.inf)
    low, high = central_interval(np.where(theirs[:, 1] > 0, factors, np.inf))
    ends = [end if np.isfinite(end) else None for end in (low, high)]
    return Factor(compute=compute, factor=value, low=ends[0], high=ends[1])


def verdict_of(arm: str, baseline: str, factor: Factor, basis: str) -> str:
    """One sentence at the largest compute of the study; `basis` says how many sizes and seeds it rests on."""
    where = f"at {factor.compute:.3g} FLOPs"
    if factor.factor is None:
        return f"{arm}: {baseline}'s law never reaches its loss {where} ({basis})."
    if factor.low is None:
        words = f"{basis}: too few sizes for an interval"
        return f"{arm}: worth {factor.factor:.2f} times the compute of {baseline} {where} ({words})."
    words = f"{CONFIDENCE:.0%} interval {factor.span}, {basis}"
    if factor.low <= 1 and (factor.high is None or factor.high >= 1):
        worth = f"worth {factor.factor:.2f} times its compute, {words}"
        return f"{arm}: no difference from {baseline} was found {where} ({worth})."
    return f"{arm}: worth {factor.factor:.2f} times the compute of {baseline} {where} ({words})."
