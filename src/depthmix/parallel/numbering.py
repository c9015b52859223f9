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
    heads_shape: tuple[int, ...],
    appended: Sequence[Meta] = (),
) -> tuple[tuple[Ids, ...], tuple[Meta, ...]]:
    """The numbers of the tensors of the state before each stage, and what they are.

    Args:
        stack, bounds, shape, dtype: as in `Plan`.
        values, attention: the value mixers and the sublayers in which they mix.
        heads_shape: shape of the keys and values of a micro-batch, if there are value mixers.
        appended: tensors behind the mixers' state that every stage makes anew, such as running sums.
    """
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
                    q, k, v = (torch.empty(heads_shape, dtype=dtype) for _ in range(3))
                    _, kv = value_mixers[attention.index(i)].mix(q, k, v, kv)
                state = mixers[i].write(state, carry, torch.empty_like(h))
            state = state[: stack.spec(hi).essential]  # the next stage makes derived tensors again
            added = [torch.empty(meta_shape, dtype=meta_dtype) for meta_shape, meta_dtype in appended]
            states.append(numbers((*state, *kv, *added)) if hi < stack.depth else ())
    return tuple(states), tuple((tuple(tensor.shape), tensor.dtype) for _, tensor in seen.values())


def on_meta(module: Part) -> Part:
    """A copy whose parameters and buffers are on the meta device; nothing is allocated."""
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo | {id(b): torch.empty_like(b, device="meta") for b in module.buffers()})
