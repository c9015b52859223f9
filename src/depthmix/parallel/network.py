"""A part of a network of your own: some sublayers with their mixers, from the state before them to the state after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from depthmix.mechanisms import DepthStack, KVStack, State


class NetworkSegment(nn.Module):
    """Sublayers lo … hi−1 of a network, with `embed` in the first part and `head` in the last.

    A state holds the essential tensors of the stream, then those of the value mixers. Derived tensors are dropped at
    the end: the next read makes them again. Parameters are named `depth.mixers.{i}.…`, `sublayers.{i}.…`,
    `values.{k}.…`, `embed.…` and `head.…`: parts can be joined.

    Args:
        stack, sublayers, embed, head, values, recompute: as in `stages`, of the whole network.
        attention: the sublayers in which `values` mix.
    """

    def __init__(
        self,
        stack: DepthStack,
        sublayers: Sequence[nn.Module],
        lo: int,
        hi: int,
        *,
        embed: nn.Module | None = None,
        head: nn.Module | None = None,
        values: KVStack | None = None,
        attention: Sequence[int] = (),
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.is_first, self.is_last, self.recompute = lo == 0, hi == stack.depth, recompute
        self.depth = stack.slice(lo, hi)
        self.sublayers = nn.ModuleDict({str(i): sublayers[i] for i in range(lo, hi)})
        self.mixes = {i: str(k) for k, i in enumerate(attention) if lo <= i < hi}  # sublayer -> value mixer
        self.values = nn.ModuleDict({k: values[int(k)] for k in self.mixes.values()} if values is not None else {})
        self.begin_values = values[0].begin if values is not None and self.is_first else tuple
        self.embed = embed if self.is_first else None
        self.head = head if self.is_last else None

    def used_repeatedly(self) -> list[nn.Parameter]:
        """Parameters that take part at several depths: all mixers', and those of sublayers that run more than once."""
        runs = [*self.sublayers.values()]
        repeated = [module for module in {*runs} if runs.count(module) > 1]
        modules = (self.depth, self.values, *repeated)
        return [*dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)]

    def advance(self, *inputs: Any, **shared: Any) -> State:
        """The state before sublayer hi, from that before lo; the first part takes the input, the last returns the
        output. `shared` goes to every sublayer: masks, positions."""
        if self.is_first:
            state, kv = self.depth.begin(inputs[0] if self.embed is None else self.embed(*inputs)), self.begin_values()
        else:
            essential = self.depth.spec(self.depth.lo).essential
            state, kv = inputs[:essential], inputs[essential:]
        for i in range(self.depth.lo, self.depth.hi):
            if self.recompute and torch.is_grad_enabled():
                state, kv = checkpoint(self.run, i, state, kv, shared, use_reentrant=False)
            else:
                state, kv = self.run(i, state, kv, shared)
        if self.is_last:
            h = self.depth.end(state)
            return (h if self.head is None else self.head(h),)
        return (*state[: self.depth.spec(self.depth.hi).essential], *kv)

    def run(self, i: int, state: State, kv: State, shared: dict[str, Any]) -> tuple[State, State]:
        mixer, sublayer = self.depth[i], self.sublayers[str(i)]
        h, carry = mixer.read(state)
        if i in self.mixes:
            y, kv = sublayer(h, self.values[self.mixes[i]], kv, **shared)
        else:
            y = sublayer(h, **shared)
        return mixer.write(state, carry, y), kv
