"""A number for every tensor of the states between stages, the same as long as it is the same object.

The mixers alone are run on the meta device, with empty tensors for what the sublayers return. So it is found out, and
not declared, which tensors a mechanism passes on unchanged.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from depthmix.mechanisms import DepthStack, KVStack, State
from depthmix.parallel.transport import Ids

Meta: TypeAlias = tuple[tuple[int, ...], torch.dtype]
Part = TypeVar("Part", bound=nn.Module)


def number_states(
    stack: DepthStack,
    bounds: Sequence[int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    values: KVStack | None,
    attention: Sequence[int],
    kv_heads: int,
) -> tuple[tuple[Ids, ...], tuple[Meta, ...]]:
    """The numbers of the tensors of the state before each stage, and what they are."""
    seen: dict[int, tuple[int, Tensor]] = {}  # the tensors are kept, so that no address is used twice

    def numbers(state: State) -> Ids:
        return tuple(seen.setdefault(id(tensor), (len(seen), tensor))[0] for tensor in state)

    mixers = on_meta(stack)
    states: list[Ids] = [()]
    with torch.no_grad(), torch.device("meta"):
        state = mixers.begin(torch.empty(*shape, stack.dim, dtype=dtype))
        kv: State = () if values is None else values.begin()
        value_mixers = None if values is None else on_meta(values)
        for lo, hi in itertools.pairwise(bounds):
            for i in range(lo, hi):
                h, carry = mixers[i].read(state)
                if value_mixers is not None and i in attention:
                    heads = [
                        torch.empty(*shape[:-1], kv_heads, shape[-1], value_mixers.head_dim, dtype=dtype) for _ in "qkv"
                    ]
                    _, kv = value_mixers[attention.index(i)].mix(heads[0], heads[1], heads[2], kv)
                state = mixers[i].write(state, carry, torch.empty_like(h))
            state = state[: stack.spec(hi).essential]  # the next stage makes derived tensors again
            states.append(numbers((*state, *kv)) if hi < stack.depth else ())
    return tuple(states), tuple((tuple(tensor.shape), tensor.dtype) for _, tensor in seen.values())


def on_meta(module: Part) -> Part:
    """A copy whose parameters and buffers are on the meta device; nothing is allocated."""
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo | {id(b): torch.empty_like(b, device="meta") for b in module.buffers()})
