"""The context that all sublayers of a forward pass share: positions, mask and cache.

Axes: B batch, T token, S column that attention reads, d channel of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from depthmix import ops
from depthmix.models.config import DecoderConfig


class Cache(Protocol):
    """Keys and values of earlier tokens; `depthmix.inference` has the implementations."""

    def place(self, tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Reserve columns for new tokens [B, T]; return their positions [B, T] and the attention mask [B, 1, T, S]."""

    def put(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [B, K, T, d] of one attention layer; return those of all columns [B, K, S, d]."""


@dataclass(frozen=True)
class Context:
    """Shared inputs of all sublayers. Sublayers must not modify it: FSDP2 gives each of them a copy."""

    rotation: tuple[Tensor, Tensor]  # cos and sin [B, 1, T, d]
    mask: Tensor | None  # [B, 1, T, S], True where a token attends to a column; None: causal
    cache: Cache | None = None


def make_context(
    config: DecoderConfig,
    positions: Tensor,
    mask: Tensor | None = None,
    cache: Cache | None = None,
    *,
    dtype: torch.dtype,
) -> Context:
    """The context of tokens at `positions` [B, T]; it needs no token ids, so a part of a decoder can build it."""
    return Context(rotation(positions, config.width, config.rope_theta, dtype), mask, cache)


def locate(
    tokens: Tensor, documents: Tensor | None = None, valid: Tensor | None = None, cache: Cache | None = None
) -> tuple[Tensor, Tensor | None]:
    """Positions [B, T] and mask [B, 1, T, S] of tokens. See `Decoder.forward` for the arguments."""
    if cache is None:
        return locate_shape(tokens.shape, tokens.device, documents, valid)
    check_shapes(tokens.shape, documents, valid)
    if documents is not None:
        raise ValueError("both documents and a cache were given; use packed documents only without a cache")
    return cache.place(tokens, valid)


def locate_shape(
    shape: torch.Size, device: torch.device, documents: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The same without a cache, from the shape [B, T] of the tokens: a segment of a decoder has no token ids."""
    check_shapes(shape, documents, valid)
    return positions_of(shape, device, documents, valid), mask_of(shape, device, documents, valid)


def check_shapes(shape: torch.Size, documents: Tensor | None, valid: Tensor | None) -> None:
    for name, tensor in (("documents", documents), ("valid", valid)):
        if tensor is not None and tensor.shape != shape:
            got, want = list(tensor.shape), list(shape)
            raise ValueError(f"{name} has shape {got}; expected the shape of the tokens, {want}")


def positions_of(
    shape: torch.Size, device: torch.device, documents: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """Positions [B, T], from 0 at the first token of each document; padding does not count."""
    count = torch.arange(shape[1], device=device).expand(shape)
    if documents is not None:
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        return count - torch.where(begins, count, 0).cummax(-1).values
    return count if valid is None else (valid.long().cumsum(-1) - 1).clamp(min=0)


def mask_of(
    shape: torch.Size, device: torch.device, documents: Tensor | None = None, valid: Tensor | None = None
) -> Tensor | None:
    """The mask: causal, within a document, without padding; a token always attends to itself, so no row is empty."""
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
    """cos and sin [B, 1, T, d] of RoPE, with pairs formed from the two halves of a head; angles in at least float32."""
    wide = ops.accumulator(dtype)
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    angles = positions[..., None].to(wide) * theta**-exponent
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)
