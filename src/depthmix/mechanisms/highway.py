"""Highway networks: the stream as a gated moving average of outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms import arithmetic
from depthmix.mechanisms.base import Coeff, DepthMixer, Facts, MixerConfig, Site, State, option
from depthmix.support.checks import check_positive


@dataclass(frozen=True, kw_only=True)
class HighwayConfig(MixerConfig):
    starts: ClassVar = frozenset({"bias"})

    gate: Literal["scalar", "channel"] = option("scalar", "one gate per token, or one per token and channel")
    bias: float = option(-2.0, "initial bias of the gate; negative: the carry dominates")
    eps: float = option(1e-6, "eps of the gate's input norm")

    def check(self, *, dim: int, depth: int) -> None:
        check_positive("eps", self.eps)


class Highway(DepthMixer):
    """Highway networks (arXiv 1505.00387) around PreNorm sublayers.

    (1) g_l = σ(W_l norm(x) + b_l)
    (2) h_l = x
    (3) x ← (1 − g_l) ⊙ x + g_l ⊙ v_l

    State: the stream x [D]. W starts at 0 and b negative: the carry dominates, as in the paper. The gate is computed
    from the stream before the sublayer runs; 1 − g is σ of the negated logit, which avoids cancellation near 1.
    """

    Config = HighwayConfig
    paper = "arXiv 1505.00387"
    holds = "1 stream"
    rank_formula = "1"
    parameters_formula = "L·(D+1) or L·(D²+D)"
    takes_decay = frozenset({"weight"})
    variants = ({}, {"gate": "channel"}, {"bias": 0.5})

    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        width = 1 if config.gate == "scalar" else dim
        return Facts(
            preserves_prenorm="no",
            rank=1,
            parameters=depth * width * (dim + 1),
            reads=(2 if width == 1 else 3) * dim,
            writes=dim,
            row_sums=(1.0,) * (depth + 1),
            flops=depth * (arithmetic.normed_linear(dim, width) + 2 * width + 3 * dim),
        )

    def __init__(self, site: Site, config: HighwayConfig) -> None:
        super().__init__(site, config)
        width = 1 if config.gate == "scalar" else site.dim
        self.add_parameter("weight", width, site.dim, exists=not site.is_out)
        self.add_parameter("bias", width, exists=not site.is_out)

    def reset_parameters(self) -> None:
        if self.weight is not None and self.bias is not None:
            nn.init.zeros_(self.weight)
            nn.init.constant_(self.bias, self.config.bias)

    @property
    def groups(self) -> int:
        return 1 if self.config.gate == "scalar" else self.site.dim

    def coeff(self, state: State) -> Coeff:
        if self.weight is None:
            return None
        logit = ops.normed_linear(state[0], self.weight, self.bias, eps=self.config.eps)
        return torch.sigmoid(-logit), torch.sigmoid(logit)  # (1) carry and gate

    def combine(self, state: State, c: Coeff) -> Tensor:
        return state[0]  # (2)

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        return (ops.weighted_sum([state[0], v], c),)  # (3)
