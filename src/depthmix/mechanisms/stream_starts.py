"""Named initialisations of mechanisms with several streams: what every site reads and writes before training.

A start is given by its coefficients. Hyper-Connections use them directly, mHC and mHC-lite the biases whose gates have
these values. The table with sources and M is in docs/mechanisms/mhc.md.

Axes: m stream; a list of coefficients has one number per stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from depthmix.mechanisms.options import PreNorm
from depthmix.support.checks import check_positive

Coefficients: TypeAlias = Callable[[int, int], list[float]]  # from the number of streams and the index of the site

PARTED = math.tanh(1)  # distance of the writes of "parted" from 1: gates of mHC with biases of +2 and -2
TURN = 15 / 16  # weight of the site's own stream in a read of "hyper" if gates cannot be 1
WIDEST = 2.0  # upper bound of H_post of mHC
MOST_STREAMS = 1024


@dataclass(frozen=True)
class Start:
    """Initial coefficients of a site, and the initialisation of the dynamic part of mHC.

    read, write: weights of the streams.
    apart: logit of moving from one stream to another, relative to staying; None: the mechanism's own default.
    scale: scale of the dynamic part (a).
    random: whether projections start random; otherwise at 0.
    """

    read: Coefficients
    write: Coefficients
    apart: float | None = None
    scale: float = 0.0
    random: bool = True


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def logit(p: float) -> float:
    return math.log(p) - math.log1p(-p)


def each(value: float) -> Coefficients:
    return lambda m, site: [value] * m


def mean(m: int, site: int) -> list[float]:
    return [1 / m] * m


def in_turn(m: int, site: int) -> list[float]:
    return [float(stream == site % m) for stream in range(m)]


def gates(turn: float, others: float, scale: float = 1.0) -> Coefficients:
    """Sigmoid gates with one bias for the site's own stream and another for the rest."""
    return lambda m, site: [scale * sigmoid(turn if stream == site % m else others) for stream in range(m)]


def parted(m: int, site: int) -> list[float]:
    """1 + PARTED for half of the streams and 1 - PARTED for the other half, 1 for an odd one: their mean is 1.

    Stream 0 is fixed and the others rotate by one with each site, as in a round-robin tournament, so that m - 1 sites
    give different writes to every pair of streams. After each such round the signs change, so that no stream stays
    ahead.
    """
    order = [0, *(1 + (stream + site) % (m - 1) for stream in range(m - 1))] if m > 1 else [0]
    sign = -1 if site // max(m - 1, 1) % 2 else 1
    weights = [1.0] * m
    for ahead, behind in zip(order[: m // 2], order[::-1], strict=False):
        weights[ahead] += sign * PARTED
        weights[behind] -= sign * PARTED
    return weights


def scaled(m: int, site: int) -> list[float]:
    """The same for all streams: the mean of the writes of "lite"."""
    return [sum(STARTS["lite"].write(m, site)) / m] * m


STARTS: dict[str, Start] = {
    "prenorm": Start(mean, each(1.0)),
    "parted": Start(mean, parted),
    "scaled": Start(mean, scaled),
    "lite": Start(gates(1, -1), gates(1, -1, 2), apart=-8, scale=0.01, random=False),
    "hyper": Start(in_turn, each(1.0), apart=-8, scale=0.01, random=False),
    "megatron": Start(each(0.5), each(1.0), apart=0, scale=0.01),
    "lucidrains": Start(gates(1, 0), each(2 * sigmoid(1)), apart=-1, scale=0.01, random=False),
}
STARTS["paper"] = STARTS["lite"]  # its name in files of mhc_lite from 0.1.0


def start_of(config: Any) -> Start:
    return STARTS[config.start]


def written(config: Any, site: int) -> list[float]:
    """The weights with which a site writes to each stream; `output_scale`, if given, is their mean."""
    weights = start_of(config).write(config.streams, site)
    if config.output_scale is None:
        return weights
    return [weight * config.output_scale * config.streams / sum(weights) for weight in weights]


def read_gates(config: Any, site: int) -> list[float]:
    """The weights with which a site reads each stream through gates, which are never 0 or 1."""
    weights = start_of(config).read(config.streams, site)
    share = TURN if min(weights) == 0 else 1.0
    return [share * weight + (1 - share) / config.streams for weight in weights]


def check_output_scale(config: Any, widest: float = math.inf) -> None:
    """Check `output_scale`; coefficients must stay below `widest`."""
    if config.output_scale is not None:
        check_positive("output_scale", config.output_scale)
        write = start_of(config).write(config.streams, 0)
        most = widest / max(write) * sum(write) / config.streams
        if not config.output_scale < most:
            raise ValueError(
                f"output_scale={config.output_scale} with start={config.start!r} and {config.streams} streams; expected"
                f" a number below {most:.4g}, since H_post = 2σ(…) stays below {widest:g}"
            )


def starts_as(config: Any, depth: int) -> PreNorm:
    """Whether the rows of M start as PreNorm with readout "mean", if no initial coefficient depends on activations.

    If the reads of a site, or all writes, are the same for every stream, the transition (doubly stochastic at first)
    has no effect: M is the sum of the read weights times the mean of the write weights.
    """
    reads = [start_of(config).read(config.streams, site) for site in range(1, depth)]
    writes = [written(config, site) for site in range(depth)]
    plain = all(len({*read}) == 1 for read in reads) or all(len({*write}) == 1 for write in writes)
    if not plain or any(abs(sum(w) / config.streams - 1) > 1e-12 for w in writes):
        return "no"
    return "exact" if all(abs(sum(read) - 1) <= 1e-12 for read in reads) else "up to scale"
