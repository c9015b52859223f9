"""Value mixers that start without effect, for networks that were trained without them.

Axes: ... any leading shape, Q query head, K key-value head, T token, d channel of a head.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms.base import Coeff, KVFacts, KVMixer, State


class Blend(KVMixer):
    """Mixin before a value mixer's class: it adds g times the change, with one learned number g per layer, 0 at first.

    (1) u_l = v_l + g_l (mixed_l − v_l)

    A layer that mixes nothing has no g.
    """

    strength: Tensor | None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_parameter("strength", nn.Parameter(torch.empty(1)) if self.mixes else None)

    @classmethod
    def facts(cls, config: Any, *, heads: int, kv_heads: int, head_dim: int, order: tuple[int, ...]) -> KVFacts:
        stated = super().facts(config, heads=heads, kv_heads=kv_heads, head_dim=head_dim, order=order)
        return dataclasses.replace(stated, parameters=None)  # counted where they are known

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.strength is not None:
            nn.init.zeros_(self.strength)

    def coeff(self, q: Tensor, k: Tensor, kv: State) -> Coeff:
        c = super().coeff(q, k, kv)
        return None if c is None or self.strength is None else (ops.wide(self.strength), c)

    def combine(self, v: Tensor, kv: State, c: Coeff) -> Tensor:
        if c is None:
            return v
        strength, inner = c
        return ops.weighted_sum([v, super().combine(v, kv, inner)], (1 - strength, strength))  # (1)


@functools.cache
def blended(cls: type[KVMixer]) -> type[KVMixer]:
    """The class with `Blend` before it."""
    return type(f"Blended{cls.__name__}", (Blend, cls), {"__module__": __name__})
