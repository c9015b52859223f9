"""Value residual: every attention layer adds the first layer's values to its own.

Axes: ... any leading shape, K key-value head, T token, d channel of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms.base import Coeff, KVFacts, KVMixer, MixerConfig, Site, State, StateSpec, option


@dataclass(frozen=True, kw_only=True)
class ValueResidualConfig(MixerConfig):
    learned: bool = option(True, "learned weights, two per layer; False: constant")
    own: float = option(0.5, "initial weight of the layer's own value")
    first: float = option(0.5, "initial weight of the first layer's value")

    def function(self, *, dim: int, depth: int) -> dict[str, Any]:
        return {"learned": True} if self.learned else super().function(dim=dim, depth=depth)


class ValueResidual(KVMixer):
    """Value residual, or ResFormer (arXiv 2410.17897): two scalars per layer.

    (1) u_l = own_l v_l + first_l v_0

    u_l is cached and attended to; v_0 is the unmixed value of the first attention. The first layer is unchanged.

    State: v_0.
    """

    Config = ValueResidualConfig
    paper = "arXiv 2410.17897"
    holds = "the first layer's values"
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({}, {"learned": False}, {"own": 1.0, "first": 0.25})

    own: Tensor | None
    first: Tensor | None

    @classmethod
    def facts(cls, config: Any, *, heads: int, kv_heads: int, head_dim: int, order: tuple[int, ...]) -> KVFacts:
        later = len(order) - 1
        return KVFacts(parameters=2 * later * config.learned, flops=later * 3 * kv_heads * head_dim)

    def __init__(self, site: Site, config: ValueResidualConfig, order: tuple[int, ...]) -> None:
        super().__init__(site, config, order)
        learned = config.learned and not site.is_first
        for name in ("own", "first"):
            self.register_parameter(name, nn.Parameter(torch.empty(1)) if learned else None)

    def reset_parameters(self) -> None:
        for name in ("own", "first"):
            if (parameter := getattr(self, name)) is not None:
                nn.init.constant_(parameter, getattr(self.config, name))

    def spec(self, site: Site) -> StateSpec:
        count = 0 if site.is_first else 1
        return StateSpec(((site.dim,),) * count, essential=count, sealed=count)

    def coeff(self, q: Tensor, k: Tensor, kv: State) -> Coeff:
        if self.site.is_first:
            return None
        if self.own is None or self.first is None:
            return tuple(ops.wide(k).new_tensor(x) for x in (self.config.own, self.config.first))
        return ops.wide(self.own), ops.wide(self.first)

    def combine(self, v: Tensor, kv: State, c: Coeff) -> Tensor:
        return v if c is None else ops.weighted_sum([v, kv[0]], c)  # (1)

    def update(self, k: Tensor, v: Tensor, mixed: Tensor, kv: State) -> State:
        return (v,) if self.site.is_first else kv
