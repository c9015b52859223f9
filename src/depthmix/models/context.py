"""What all sublayers of one forward pass share: positions, the mask, the cache.

Axes: B batch, T token, S column that attention can see, d channel of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from depthmix import ops
from depthmix.models.config import DecoderConfig


class Cache(Protocol):
    """Keys and values of earlier tokens, as `depthmix.inference` keeps them."""

    def place(self, tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Make room for new tokens [B, T]: their positions [B, T], and who sees what [B, 1, T, S]."""

    def put(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [B, K, T, d] of one attention layer; return those of all columns [B, K, S, d]."""


@dataclass(frozen=True)
class Context:
    """Sublayers only read it: FSDP2 hands each of them a copy."""

    rotation: tuple[Tensor, Tensor]  # cos and sin [B, 1, T, d]
    mask: Tensor | None  # [B, 1, T, S], True where a token sees a column; None: causal
    cache: Cache | None = None


def make_context(
    config: DecoderConfig,
    positions: Tensor,
    mask: Tensor | None = None,
    cache: Cache | None = None,
    *,
    dtype: torch.dtype,
) -> Context:
    """The context of tokens at `positions` [B, T]: a part of a decoder can make it without any token's id."""
    return Context(rotation(positions, config.width, config.rope_theta, dtype), mask, cache)


def locate(
    tokens: Tensor, documents: Tensor | None = None, valid: Tensor | None = None, cache: Cache | None = None
) -> tuple[Tensor, Tensor | None]:
    """Positions [B, T] and mask [B, 1, T, S] of tokens. See `Decoder.forward` for the arguments."""
    for name, tensor in (("documents", documents), ("valid", valid)):
        if tensor is not None and tensor.shape != tokens.shape:
            got, want = list(tensor.shape), list(tokens.shape)
            raise ValueError(f"{name} has shape {got}; expected that of the tokens, {want}")
    if cache is None:
        shape, device = tokens.shape, tokens.device
        return positions_of(shape, device, documents, valid), mask_of(shape, device, documents, valid)
    if documents is not None:
        raise ValueError("documents and a cache; expected packed documents in training only")
    return cache.place(tokens, valid)


def positions_of(
    shape: torch.Size, device: torch.device, documents: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """[B, T], from 0 at the first token of each document; padding does not count."""
    count = torch.arange(shape[1], device=device).expand(shape)
    if documents is not None:
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        return count - torch.where(begins, count, 0).cummax(-1).values
    return count if valid is None else (valid.long().cumsum(-1) - 1).clamp(min=0)


def mask_of(
    shape: torch.Size, device: torch.device, documents: Tensor | None = None, valid: Tensor | None = None
) -> Tensor | None:
    """Causal, within a document, not to padding; a token always sees itself, so that no row is empty."""
    if documents is None and valid is None:
        return None
    sees = torch.ones(shape[1], shape[1], dtype=torch.bool, device=device).tril()[None]
    if documents is not None:
        sees = sees & (documents[:, :, None] == documents[:, None, :])
    if valid is not None:
        sees = sees & valid[:, None, :].bool()
    itself = torch.eye(shape[1], dtype=torch.bool, device=device)
    return (sees | itself)[:, None]


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, T, d] of RoPE, the two halves of a head forming its pairs; angles in float32 at least."""
    wide = ops.accumulator(dtype)
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    angles = positions[..., None].to(wide) * theta**-exponent
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)
