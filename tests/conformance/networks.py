"""What the comparisons share: a small network, its reads, and float64 for peers that compute in float32.

Axes: ... any leading shape, D channel, M stream, L sublayers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import depthmix as dm

Sublayer = Callable[[Tensor], Tensor]

torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other


@dataclass(frozen=True)
class Network:
    """An embedding and L sublayers tanh(h W)."""

    x: Tensor  # [..., D]
    weights: list[Tensor]

    @property
    def sublayers(self) -> list[Sublayer]:
        return [partial(sublayer, weight) for weight in self.weights]

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.weights]


def sublayer(weight: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(h @ weight)


def network(leading: tuple[int, ...], dim: int, depth: int, dtype: torch.dtype = torch.float64) -> Network:
    torch.manual_seed(depth + 100 * dim)
    tensors = [torch.randn(*leading, dim, dtype=torch.float64)]
    tensors += [torch.randn(dim, dim, dtype=torch.float64) / dim**0.5 for _ in range(depth)]
    x, *weights = (t.to(dtype).requires_grad_() for t in tensors)
    return Network(x, weights)


def random_stack(name: str, *, dim: int, depth: int, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A stack with every parameter away from its start."""
    torch.manual_seed(1 + depth + 100 * dim)
    stack = dm.DepthStack(name, dim=dim, depth=depth, **options).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return stack.to(dtype)


def reads(stack: Any, net: Network) -> list[Tensor]:
    """h_1 … h_{L+1} as a model gets them from depthmix."""
    state, out = stack.begin(net.x), []
    for mixer, f in zip(stack, net.sublayers, strict=True):
        h, carry = mixer.read(state)
        out.append(h)
        state = mixer.write(state, carry, f(h))
    return [*out, stack.end(state)]


def attnres_reads(stack: Any, net: Network, read: Callable[..., Tensor], block: int = 1) -> list[Tensor]:
    """h_1 … h_{L+1} with a peer's `read(query, key_weight, sources)` in the paper's schedule; blocks of 1 are Full.

    Neither peer ships the schedule in a form that runs without a GPU, so it is written out here.
    """
    bank: list[Tensor] = []
    partial_sum, out = net.x, []
    for index, mixer in enumerate(stack.all_mixers()):
        sources = [*bank, partial_sum]
        # depthmix has no query where there is one source; with one source any query reads it
        out.append(read(mixer.query, mixer.key_weight, sources) if len(sources) > 1 else sources[0])
        if index < len(net.weights):
            value = net.sublayers[index](out[-1])
            opens_block = index % block == 0
            bank = sources if opens_block else bank
            partial_sum = value if opens_block else partial_sum + value
    return out


def fold(streams: Tensor) -> Tensor:
    """[B, ..., M, D] as [B·M, ..., D]: streams where hyper-connections has them."""
    return streams.movedim(-2, 1).flatten(0, 1)


def unfold(streams: Tensor, m: int) -> Tensor:
    return streams.unflatten(0, (-1, m)).movedim(1, -2)


def attention(leading: tuple[int, ...], dim: int, count: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A query, a key weight and sources of growing size."""
    torch.manual_seed(count + 100 * dim)
    tensors = [torch.randn(dim), 1 + 0.3 * torch.randn(dim)]
    tensors += [(1 + i) * torch.randn(*leading, dim) for i in range(count)]
    query, key_weight, *sources = (t.double().requires_grad_() for t in tensors)
    return query, key_weight, sources


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of a fixed random projection of all outputs, each brought to size 1 so that none hides another."""
    generator = torch.Generator().manual_seed(7)
    parts = []
    for h in outputs:
        weight = torch.randn(h.shape, generator=generator, dtype=torch.float64).to(h.dtype)
        parts.append((h * weight).sum() / h.detach().abs().max())
    return list(torch.autograd.grad(torch.stack(parts).sum(), leaves))


def difference(ours: list[Tensor], theirs: list[Tensor], floor: float = 0.0) -> float:
    """The largest difference of two entries, as a fraction of the largest entry of their tensor (or of `floor`)."""
    assert len(ours) == len(theirs) > 0
    sizes = []
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert b.isfinite().all()
        a, b = a.detach().double(), b.detach().double()
        largest = max(b.abs().max().item(), floor)
        sizes.append((a - b).abs().max().item() / (largest or 1.0))
    return max(sizes)


def float_as_double() -> AbstractContextManager[object]:
    """Around a call: the peer's own upcasts `.float()` become `.double()`, nothing else in it changes.

    Without this, float64 tensors are rounded to float32 inside and nothing finer than 1e-7 can be seen.
    """
    return mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
