"""Hyper-Connections: m streams, read and rewritten by learned mixtures.

Axes: ... any leading shape, m stream, D channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from depthmix import ops
from depthmix.mechanisms import arithmetic
from depthmix.mechanisms.base import (
    Coeff,
    DepthMixer,
    Facts,
    MixerConfig,
    PreNorm,
    Site,
    State,
    StateSpec,
    option,
    rank_cap,
)
from depthmix.mechanisms.stream_starts import MOST_STREAMS, check_output_scale, in_turn, start_of, starts_as, written
from depthmix.support.checks import check_positive, check_range

Readout = Literal["mean", "sum", "learned"]


class Streams(NamedTuple):
    """Coefficients of one site."""

    read: Tensor | None  # [..., m]; None: the first stream
    transition: Tensor | None  # [..., m, m], from column j to row i; None: the identity
    gain: Tensor | None  # [..., m]; None at the output


class StreamMixer(DepthMixer):
    """The shared part of mechanisms with m streams: the state and its linear maps. Subclasses implement `coeff`."""

    holds = "m streams"
    rank_formula = "m"

    def spec(self, site: Site) -> StateSpec:
        return StateSpec(((self.config.streams, site.dim),), essential=1, sealed=0)

    def begin(self, x: Tensor) -> State:
        return (x.unsqueeze(-2).repeat_interleave(self.config.streams, -2),)

    def combine(self, state: State, c: Coeff) -> Tensor:
        if c.read is None:
            return state[0][..., 0, :]
        return ops.read_streams(state[0], c.read)  # (h)

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        return (ops.write_streams(state[0], c.transition, c.gain, v),)  # (H)

    def plain_readout(self, stream: Tensor) -> Streams:
        """The output's row if it is not learned."""
        m = self.config.streams
        weight = 1.0 if self.config.readout == "sum" else 1 / m
        return Streams(stream.new_full((m,), weight, dtype=ops.accumulator(stream.dtype)), None, None)


def stream_traffic(m: int, dim: int) -> tuple[int, int]:
    """Reads and writes in Table 1 of arXiv 2603.15031: compute the coefficients, apply each, merge."""
    return (5 * m + 1) * dim + m * m + 2 * m, (3 * m + 1) * dim + m * m + 2 * m


def stream_flops(m: int, dim: int, depth: int, *, full: bool) -> int:
    """FLOPs of all stream reads and writes, without the coefficients; the first site reads one stream directly."""
    return depth * (arithmetic.mixture(m, dim) + 2 * m * dim + 2 * m * m * dim * full)


def stream_prenorm(readout: Readout, rows: PreNorm) -> PreNorm:
    """How rows of M that are `rows` with readout "mean" compare with PreNorm under another readout."""
    return "up to scale" if rows == "exact" and readout == "sum" else rows


@dataclass(frozen=True, kw_only=True)
class HyperConnectionsConfig(MixerConfig):
    starts: ClassVar = frozenset({"start", "output_scale"})

    streams: int = option(4, "number of streams m")
    dynamic: bool = option(True, "coefficients that depend on the streams (DHC); False: static (SHC)")
    transition: Literal["full", "identity"] = option("full", "mixing of the streams; identity: none")
    readout: Readout = option("mean", "combination of the streams that the head reads")
    start: Literal["prenorm", "parted", "scaled", "lite", "hyper", "megatron"] = option(
        "hyper", "initialisation; prenorm, hyper, parted keep PreNorm; parted: streams differ (for retrofits)"
    )
    output_scale: float | None = option(None, "initial mean of `beta`; None: given by `start`")
    tanh: bool = option(True, "tanh on the dynamic part")
    eps: float = option(1e-6, "eps of the norm of a stream")

    def check(self, *, dim: int, depth: int) -> None:
        check_range("streams", self.streams, 1, MOST_STREAMS)
        check_positive("eps", self.eps)
        check_output_scale(self)


class HyperConnections(StreamMixer):
    """Hyper-Connections (arXiv 2409.19606), static and dynamic, with G[j] = norm_weight ⊙ norm(H[j]).

    (1) A_m[j] = alpha_m[j] + s_a tanh(G[j]·w_m)
    (2) A_r[j, i] = alpha_r[j, i] + s_a tanh(G[j]·w_r[:, i])
    (3) B[j] = beta[j] + s_b tanh(G[j]·w_b)
    (h) h_l = Σ_j A_m[j] H[j]
    (H) H[i] ← Σ_j A_r[j, i] H[j] + B[i] v_l

    State: H [m, D], m copies of the embedding at first. Start "hyper", the paper's: A_m one-hot by site, A_r identity,
    B ones, dynamic weights 0; all streams stay equal to the residual stream and M is 1. With "parted" A_m is the mean
    and B differs between streams with mean 1: M is 1, and the streams differ from the first write on.
    """

    Config = HyperConnectionsConfig
    paper = "arXiv 2409.19606"
    parameters_formula = "L(m²+2m) − m, dynamic + L(D(m+3)+2) − D"
    takes_decay = frozenset({"w_m", "w_r", "w_b"})
    variants = (
        {},
        {"start": "prenorm", "dynamic": False},
        {"start": "scaled", "dynamic": False, "transition": "identity", "readout": "learned"},
        {"start": "lite", "streams": 2, "transition": "identity", "readout": "sum"},
        {"streams": 3, "tanh": False, "readout": "learned"},
        {"streams": 1},
        {"start": "parted", "streams": 3},
        {"start": "megatron", "dynamic": False, "output_scale": 0.5},
    )
    alpha_m: Tensor | None
    alpha_r: Tensor | None
    beta: Any  # write-side parameters exist at every site where `coeff` uses them
    norm_weight: Any
    w_m: Tensor | None
    w_r: Tensor | None
    w_b: Any
    s_a: Any
    s_b: Any
    readout: Tensor | None

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        m, full = config.streams, config.transition == "full"
        static = depth * (m * m * full + m) + (depth - 1) * m
        dynamic = depth * (dim * (2 + m * full) + 1) + (depth - 1) * dim + (depth if full else depth - 1)
        reads, writes = stream_traffic(m, dim)
        return Facts(
            preserves_prenorm=stream_prenorm(config.readout, starts_as(config, depth)),
            rank=min(m, rank_cap(depth)),
            parameters=static + dynamic * config.dynamic + m * (config.readout == "learned"),
            reads=reads,
            writes=writes,
            flops=stream_flops(m, dim, depth, full=full)
            + config.dynamic * (cls.dynamic_flops(config, dim, 1) + (depth - 1) * cls.dynamic_flops(config, dim, 2)),
        )

    @classmethod
    def dynamic_flops(cls, config: Any, dim: int, vectors: int) -> int:
        """FLOPs of a site's coefficients with `vectors` weight vectors besides those of the transition."""
        rows = vectors + config.streams * (config.transition == "full")
        bounded = rows * (config.tanh + 2)  # tanh, scale, added to the static part
        return int(config.streams * (arithmetic.normed_linear(dim, rows, bias=False) + bounded))

    def __init__(self, site: Site, config: HyperConnectionsConfig) -> None:
        super().__init__(site, config)
        m, dim = config.streams, site.dim
        reads, writes = not (site.is_first or site.is_out), not site.is_out
        full, dynamic = writes and config.transition == "full", writes and config.dynamic
        self.add_parameter("alpha_m", m, exists=reads)
        self.add_parameter("alpha_r", m, m, exists=full)
        self.add_parameter("beta", m, exists=writes)
        self.add_parameter("norm_weight", dim, exists=dynamic)
        self.add_parameter("w_m", dim, exists=dynamic and reads)
        self.add_parameter("w_r", dim, m, exists=dynamic and full)
        self.add_parameter("w_b", dim, exists=dynamic)
        self.add_parameter("s_a", 1, exists=dynamic and (reads or full))
        self.add_parameter("s_b", 1, exists=dynamic)
        self.add_parameter("readout", m, exists=site.is_out and config.readout == "learned")

    def reset_parameters(self) -> None:
        config, site, m = self.config, self.site.index, self.config.streams
        start = start_of(config)
        starts: dict[str, Any] = {
            "alpha_m": start.read(m, site),
            "alpha_r": [[1 / m] * m] * m if start.apart == 0 else [in_turn(m, stream) for stream in range(m)],
            "beta": written(config, site),
            **{"norm_weight": 1.0, "w_m": 0.0, "w_r": 0.0, "w_b": 0.0, "s_a": 0.01, "s_b": 0.01, "readout": 1 / m},
        }
        with torch.no_grad():
            for name, value in starts.items():
                if (parameter := getattr(self, name)) is not None:
                    parameter.copy_(torch.tensor(value, dtype=parameter.dtype))

    def coeff(self, state: State) -> Coeff:
        if self.site.is_out:
            return self.plain_readout(state[0]) if self.readout is None else Streams(ops.wide(self.readout), None, None)
        read: Any = self.alpha_m
        transition: Any = self.alpha_r
        gain = self.beta
        if self.norm_weight is not None:
            parts = self.dynamic(state[0])
            if self.w_m is not None:
                read = read + self.s_a * parts.pop(0).squeeze(-1)  # (1)
            if self.w_r is not None:
                transition = transition + self.s_a * parts.pop(0)  # (2)
            gain = gain + self.s_b * parts.pop(0).squeeze(-1)  # (3)
        return Streams(
            None if read is None else ops.wide(read),
            None if transition is None else ops.wide(transition).mT,
            ops.wide(gain),
        )

    def dynamic(self, streams: Tensor) -> list[Tensor]:
        """tanh(G w) for each set of weights that exists, [..., m, rows]; all in one product."""
        sets = [self.w_m, None if self.w_r is None else self.w_r.mT, self.w_b]
        rows = [torch.atleast_2d(w) for w in sets if w is not None]
        folded = ops.wide(torch.cat(rows)) * ops.wide(self.norm_weight)
        out = ops.normed_linear(streams, folded, eps=self.config.eps)
        return list((torch.tanh(out) if self.config.tanh else out).split([len(r) for r in rows], -1))
