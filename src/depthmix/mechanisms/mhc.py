"""mHC: Hyper-Connections whose stream mixing is kept doubly stochastic by Sinkhorn's iteration.

Axes: ... any leading shape, m stream, D channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms import arithmetic
from depthmix.mechanisms.base import Coeff, Facts, MixerConfig, PreNorm, Site, State, option, rank_cap
from depthmix.mechanisms.hyper_connections import (
    Readout,
    StreamMixer,
    Streams,
    stream_flops,
    stream_prenorm,
    stream_traffic,
)
from depthmix.mechanisms.stream_starts import (
    MOST_STREAMS,
    WIDEST,
    check_output_scale,
    logit,
    read_gates,
    start_of,
    starts_as,
    written,
)
from depthmix.support.checks import check_positive, check_range


@dataclass(frozen=True, kw_only=True)
class ManifoldConfig(MixerConfig):
    starts: ClassVar = frozenset({"start", "output_scale", "scale_init"})
    retrofit: ClassVar = {"start": "parted"}

    streams: int = option(4, "number of streams m")
    iterations: int = option(20, "number of Sinkhorn iterations")
    transition: Literal["full", "identity"] = option("full", "mixing of the streams; identity: none")
    readout: Readout = option("mean", "combination of the streams that the head reads; learned: DeepSeek's head")
    start: Literal["prenorm", "parted", "scaled", "lite", "hyper", "megatron", "lucidrains"] = option(
        "lite", "initialisation; prenorm, hyper, parted keep PreNorm; parted: streams differ (for retrofits)"
    )
    output_scale: float | None = option(None, "initial mean of H_post; None: given by `start`")
    scale_init: float | None = option(None, "initial input scales a; None: given by `start` (DeepSeek: 0.01)")
    eps: float = option(0.0, "eps in H_pre and Sinkhorn (DeepSeek: 1e-6)")
    norm_eps: float = option(1e-6, "eps of the norm over all streams")

    def check(self, *, dim: int, depth: int) -> None:
        check_range("streams", self.streams, 2, MOST_STREAMS, remedy="One stream is the mechanism 'residual'")
        check_range("iterations", self.iterations, 1)
        check_range("eps", self.eps, 0)
        check_positive("norm_eps", self.norm_eps)
        check_output_scale(self, WIDEST)

    def resolved(self, *, dim: int, depth: int) -> dict[str, Any]:
        return {**super().resolved(dim=dim, depth=depth), "scale_init": self.input_scale}

    @property
    def input_scale(self) -> float:
        return start_of(self).scale if self.scale_init is None else self.scale_init

    @property
    def transition_size(self) -> int:
        """The number of logits of a transition."""
        return self.streams**2 if self.transition == "full" else 0


class ManifoldHyperConnections(StreamMixer):
    """mHC (arXiv 2512.24880) in DeepSeek's order and direction, with u = norm(vec(H)) over all streams jointly.

    (1) z = P u, in parts pre, post, res
    (2) H_pre = σ(a z + b) + eps
    (3) H_post = 2 σ(a z + b)
    (4) H_res = Sinkhorn(a z + b)
    (h) h_l = Σ_j H_pre[j] H[j]
    (H) H[i] ← Σ_j H_res[j, i] H[j] + H_post[i] v_l

    State: H [m, D], m copies of the embedding at first. Start "lite", the default: biases give each site a stream that
    it reads and writes most, so the streams differ from the first write on. Start "prenorm": H_pre = 1/m, H_post = 1
    and a = 0, so M is 1 and the streams stay equal until the gradients of a and then of P separate them. Start
    "parted": H_post differs between streams with mean 1, so M is 1 although the streams differ.
    """

    Config: ClassVar[type[MixerConfig]] = ManifoldConfig
    paper = "arXiv 2512.24880"
    parameters_formula = "L((m²+2m)(mD+1)+3) − m(mD+1) − 1"
    takes_decay = frozenset({"projection"})
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"start": "megatron", "scale_init": 0.01, "eps": 1e-6, "readout": "learned"},
        {"start": "hyper", "streams": 2, "transition": "identity", "readout": "sum"},
        {"start": "parted", "streams": 3, "iterations": 1},
        {"start": "scaled", "streams": 3},
        {"start": "prenorm", "transition": "identity"},
        {"start": "lucidrains", "streams": 2, "output_scale": 0.5},
    )

    projection: Tensor | None
    bias: Tensor | None
    scale: Tensor | None

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        m, res = config.streams, config.transition_size
        row = m * dim + 1
        sites = depth * ((m + res) * row + 1 + (res > 0)) + (depth - 1) * (m * row + 1)
        reads, writes = stream_traffic(m, dim)
        return Facts(
            preserves_prenorm=stream_prenorm(config.readout, cls.starts_as(config, depth)),
            rank=min(m, rank_cap(depth)),
            parameters=sites + (m * row + 1) * (config.readout == "learned"),
            reads=reads,
            writes=writes,
            flops=stream_flops(m, dim, depth, full=res > 0)
            + cls.coefficient_flops(m, dim, gates=1, rest=res)
            + (depth - 1) * cls.coefficient_flops(m, dim, gates=2, rest=res)
            + depth * (cls.transition_flops(config) if res else 0)
            + (cls.coefficient_flops(m, dim, gates=1) if config.readout == "learned" else 0),
        )

    @classmethod
    def coefficient_flops(cls, m: int, dim: int, gates: int, rest: int = 0) -> int:
        """FLOPs of a z + b for `gates` gates of m streams and `rest` more numbers, and of the gates' sigmoids."""
        rows = gates * m + rest
        return arithmetic.normed_linear(m * dim, rows, bias=False) + 2 * rows + 2 * gates * m

    @classmethod
    def transition_flops(cls, config: Any) -> int:
        return arithmetic.sinkhorn(config.streams, config.iterations, config.eps)

    @classmethod
    def starts_as(cls, config: Any, depth: int) -> PreNorm:
        static = config.input_scale == 0 or not start_of(config).random
        return starts_as(config, depth) if static and config.eps == 0 else "no"

    def __init__(self, site: Site, config: Any) -> None:
        super().__init__(site, config)
        m = config.streams
        if site.is_out:
            self.sizes = [m] if config.readout == "learned" else []
        else:
            self.sizes = [n for n in (0 if site.is_first else m, m, config.transition_size) if n]
        rows = sum(self.sizes)
        self.add_parameter("projection", rows, m * site.dim, exists=rows > 0)
        self.add_parameter("bias", rows, exists=rows > 0)
        self.add_parameter("scale", len(self.sizes), exists=rows > 0)

    def reset_parameters(self) -> None:
        if self.projection is not None and self.bias is not None and self.scale is not None:
            std = self.projection.shape[1] ** -0.5 if start_of(self.config).random else 0.0
            nn.init.normal_(self.projection, std=std)
            nn.init.constant_(self.scale, self.config.input_scale)
            with torch.no_grad():
                for part, start in zip(self.bias.split(self.sizes), self.bias_starts(), strict=True):
                    part.copy_(torch.tensor(start, dtype=part.dtype))

    def bias_starts(self) -> list[list[float]]:
        """Initial biases of each part that exists, in order."""
        config, site, m = self.config, self.site, self.config.streams
        if site.is_out:
            return [[logit(1 / m)] * m]
        starts = [] if site.is_first else [[logit(p) for p in read_gates(config, site.index)]]
        starts += [[logit(p / WIDEST) for p in written(config, site.index)]]
        return starts + [self.transition_start(start_of(config).apart)] * (config.transition_size > 0)

    def transition_start(self, apart: float | None) -> list[float]:
        m, apart = self.config.streams, -5.0 if apart is None else apart
        return [0.0 if i == j else apart for i in range(m) for j in range(m)]

    def coeff(self, state: State) -> Coeff:
        if self.projection is None or self.bias is None or self.scale is None:
            return self.plain_readout(state[0])
        z = ops.normed_linear(state[0].flatten(-2), self.projection, eps=self.config.norm_eps)  # (1)
        shares = zip(self.scale, z.split(self.sizes, -1), self.bias.split(self.sizes), strict=True)
        parts = [a * part + b for a, part, b in shares]
        read = None if self.site.is_first else torch.sigmoid(parts.pop(0)) + self.config.eps  # (2)
        if self.site.is_out:
            return Streams(read, None, None)
        gain = 2 * torch.sigmoid(parts[0])  # (3)
        return Streams(read, self.transition(parts[1]) if len(parts) > 1 else None, gain)

    def transition(self, logits: Tensor) -> Tensor:
        m = self.config.streams
        return ops.sinkhorn(logits.unflatten(-1, (m, m)), self.config.iterations, self.config.eps).mT  # (4)
