"""Inputs of Kimi Delta Attention cut into chunks, and the constants by which packed documents multiply them.

Axes: B batch, H head, T token, N chunk, C token of a chunk, M = B·H·N, K channel of a key, V channel of a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthmix.ops.kda.reference import continues

LEAST = {torch.float32: -120.0, torch.float64: -1000.0}  # a factor of 2^−120 is 0 beside 1 as well as a smaller one


class Masks(NamedTuple):
    """The constants of packed documents, as numbers."""

    same: Tensor  # [M, 1, C, C], 1 where a pair of tokens is of one document
    reads: Tensor  # [M, C, 1], 1 where a token is of the document of the state before its chunk
    writes: Tensor  # [M, C, 1], 1 where a token is of the document of its chunk's last token
    passes: Tensor  # [M, 1, 1], 1 where these two documents are one


class Inputs(NamedTuple):
    keys_queries: Tensor  # [M, 2, C, K]: keys, and queries times K^(−1/2)
    values: Tensor  # [M, C, V]
    beta: Tensor  # [M, C, 1]
    masks: Masks | None


def in_chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, documents: Tensor | None, size: int, dtype: torch.dtype
) -> Inputs:
    """The inputs [B, H, T, …] in chunks."""
    keys, queries = chunks(k, size, dtype), chunks(q, size, dtype)
    both = keys.new_empty(len(keys), 2, *keys.shape[1:])
    both[:, 0] = keys
    torch.mul(queries, k.shape[-1] ** -0.5, out=both[:, 1])
    masks = None if documents is None else make_masks(documents, q.shape[1], size, dtype)
    return Inputs(both, chunks(v, size, dtype), chunks(beta.unsqueeze(-1), size, dtype), masks)


def chunks(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[B, H, T, …] as [M, C, …]; the last chunk is filled with zeros."""
    x = x.to(dtype)
    missing = -x.shape[2] % size
    if missing:
        x = torch.cat([x, x.new_zeros(*x.shape[:2], missing, *x.shape[3:])], 2)
    return x.reshape(-1, size, *x.shape[3:])


def joined(x: Tensor, shape: Sequence[int]) -> Tensor:
    """[M, C, …] as [B, H, T, …], without the tokens that filled the last chunk; dense."""
    B, H, T = shape[:3]
    return x.reshape(B, H, -1, *x.shape[2:])[:, :, :T].contiguous()


def by_chunk(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """[M, …] as N tensors [B·H, …]."""
    return x.unflatten(0, (heads, -1)).unbind(1)


def before(states: Tensor) -> Tensor:
    """The states before each chunk [M, K, V], from [B·H, N + 1, K, V]."""
    return states[:, :-1].flatten(0, 1)


def decays(G: Tensor, masks: Masks | None) -> tuple[Tensor, Tensor, Tensor]:
    """2^G [M, C, K], 2^(G_C − G) [M, C, K] and 2^G_C [M, K, 1], each times its mask."""
    up, down = power(G.clone()), power(G[:, -1:] - G)
    last = up[:, -1].unsqueeze(-1).clone()
    if masks is None:
        return up, down, last
    return up.mul_(masks.reads), down.mul_(masks.writes), last.mul_(masks.passes)


def cumulated(g: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """G [M, C, K]: the sums of g within each chunk, in powers of two, which are computed faster than those of e."""
    return (chunks(g, size, dtype) * math.log2(math.e)).cumsum(-2)


def power(exponent: Tensor) -> Tensor:
    """2 to this power, in place; never below the normal numbers, where the arithmetic is many times slower."""
    return exponent.clamp_(min=LEAST[exponent.dtype]).exp2_()


def make_masks(documents: Tensor, heads: int, size: int, dtype: torch.dtype) -> Masks:
    """From documents [B, T]. A document that returns after another one is a new document."""
    runs = (~continues(documents)).cumsum(1)
    missing = -runs.shape[1] % size
    runs = torch.cat([runs, runs[:, -1:].expand(-1, missing)], 1).unflatten(1, (-1, size))  # [B, N, C]
    first, last = runs[:, :, :1], runs[:, :, -1:]
    state = torch.cat([first[:, :1], last[:, :-1]], 1)
    parts = (runs.unsqueeze(-1) == runs.unsqueeze(-2), runs == state, runs == last, last == state)
    same, *rest = (part.unsqueeze(1).expand(-1, heads, *part.shape[1:]).flatten(0, 2).to(dtype) for part in parts)
    return Masks(same.unsqueeze(1), *(part.unsqueeze(-1) for part in rest))
