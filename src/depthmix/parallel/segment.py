"""The module of one stage: some sublayers with their mixers, from the state before them to the state after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from depthmix.mechanisms import DepthStack, KVStack, State
from depthmix.parallel.plan import Plan
from depthmix.parallel.transport import Transport


class Segment(nn.Module):
    """Stage `s` of a plan: sublayers lo … hi−1, with `embed` in the first stage and `head` in the last.

    Arguments are the tensors that arrive, then those taken from the store; results are the tensors of the wire, then
    those to keep. Derived tensors are dropped at a cut: the next read makes them again. Parameters are named
    `depth.mixers.{i}.…`, `sublayers.{i}.…`, `values.{k}.…`, `embed.…` and `head.…`: stages can be joined.
    """

    def __init__(
        self,
        plan: Plan,
        s: int,
        stack: DepthStack,
        sublayers: Sequence[nn.Module],
        *,
        transport: Transport,
        embed: nn.Module | None,
        head: nn.Module | None,
        values: KVStack | None,
        recompute: bool,
    ) -> None:
        super().__init__()
        lo, hi = plan.bounds[s], plan.bounds[s + 1]
        self.is_first, self.is_last, self.recompute = s == 0, s == plan.count - 1, recompute
        self.lead, self.dtype = plan.shape, plan.dtype
        self.depth = stack.slice(lo, hi)
        self.sublayers = nn.ModuleDict({str(i): sublayers[i] for i in range(lo, hi)})
        self.mixes = {i: str(k) for k, i in enumerate(plan.attention) if lo <= i < hi}  # sublayer -> value mixer
        self.values = nn.ModuleDict({k: values[int(k)] for k in self.mixes.values()} if values is not None else {})
        self.begin_values = values[0].begin if values is not None and self.is_first else tuple
        self.embed = embed if self.is_first else None
        self.head = head if self.is_last else None
        self.essential = stack.spec(lo).essential, stack.spec(hi).essential
        entering, leaving, taken = plan.states[s], plan.states[s + 1], transport.takes[s]
        arriving = [*dict.fromkeys(n for n in entering if n not in taken), *taken]
        self.entry = [arriving.index(n) for n in entering]  # where each tensor of the state arrives
        held = (*entering, *leaving)
        self.exit = [held.index(n) for n in (*transport.wire[s], *transport.keeps[s])]

    def used_repeatedly(self) -> list[nn.Parameter]:
        """Parameters that take part at several depths: all mixers', and those of sublayers that run more than once."""
        runs = [*self.sublayers.values()]
        repeated = [module for module in {*runs} if runs.count(module) > 1]
        modules = (self.depth, self.values, *repeated)
        return [*dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)]

    def forward(self, *args: Tensor, **shared: Any) -> Tensor | State:
        """`shared` goes to every sublayer: masks, positions."""
        entering: State = ()
        if self.is_first:
            x: Tensor = args[0] if self.embed is None else self.embed(*args)
            self.check_embedding(x)
            state, kv = self.depth.begin(x), self.begin_values()
        else:
            entering = tuple(args[i] for i in self.entry)
            state, kv = entering[: self.essential[0]], entering[self.essential[0] :]
        for i in range(self.depth.lo, self.depth.hi):
            if self.recompute and torch.is_grad_enabled():
                state, kv = checkpoint(self.run, i, state, kv, shared, use_reentrant=False)
            else:
                state, kv = self.run(i, state, kv, shared)
        if self.is_last:
            h = self.depth.end(state)
            return h if self.head is None else self.head(h)
        held = (*entering, *state[: self.essential[1]], *kv)
        return tuple(standalone(held[i]) for i in self.exit)

    def run(self, i: int, state: State, kv: State, shared: dict[str, Any]) -> tuple[State, State]:
        mixer, sublayer = self.depth[i], self.sublayers[str(i)]
        h, carry = mixer.read(state)
        if i in self.mixes:
            y, kv = sublayer(h, self.values[self.mixes[i]], kv, **shared)
        else:
            y = sublayer(h, **shared)
        return mixer.write(state, carry, y), kv

    def check_embedding(self, x: Tensor) -> None:
        want = (*self.lead, self.depth.dim)
        if tuple(x.shape) != want or x.dtype != self.dtype:
            raise ValueError(
                f"the embedding of a micro-batch is {x.dtype} of shape {list(x.shape)}; the plan was made for "
                f"{self.dtype} of shape {list(want)}. Make it with this shape and dtype"
            )


def standalone(tensor: Tensor) -> Tensor:
    """Dense memory, which gloo needs, and no view: a split backward pass detaches outputs in place."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor._is_view() else tensor.contiguous()
