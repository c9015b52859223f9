"""The context that all sublayers of a forward pass share: positions, mask, padding, documents and cache.

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
    """What attention keeps of earlier tokens, in one slot per execution; `depthmix.inference` has the implementations.

    A slot holds either columns, tensors [B, heads, S, width] that grow with the tokens, or a state of constant size.
    """

    def place(self, tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Reserve columns for new tokens [B, T]; return their positions [B, T] and the attention mask [B, 1, T, S]."""

    def put(self, slot: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store tensors [B, heads, T, width] of one slot, such as keys and values; return those of all columns."""

    def state(self, slot: int) -> tuple[Tensor, ...] | None:
        """The state of one slot before the new tokens; None at the start."""

    def replace(self, slot: int, *state: Tensor) -> None:
        """Store the state of one slot after the new tokens."""


@dataclass(frozen=True)
class Context:
    """Shared inputs of all sublayers. Sublayers must not modify it: FSDP2 gives each of them a copy."""

    rotation: tuple[Tensor, Tensor] | None  # cos and sin [B, 1, T, d]; None if no attention has positions
    mask: Tensor | None  # [B, 1, T, S], True where a token attends to a column; None: causal
    cache: Cache | None = None
    documents: Tensor | None = None  # [B, T] for attention with a state, in which a mask has no meaning
    order: ops.ValidFirst | None = None  # likewise, where there is padding


def make_context(
    config: DecoderConfig,
    positions: Tensor,
    mask: Tensor | None = None,
    cache: Cache | None = None,
    *,
    dtype: torch.dtype,
    documents: Tensor | None = None,
    valid: Tensor | None = None,
) -> Context:
    """The context of tokens at `positions` [B, T]; it needs no token ids, so a part of a decoder can build it."""
    kinds = config.attention_kinds
    turns = rotation(positions, config.width, config.rope_theta, dtype) if "gqa" in kinds else None
    if "kda" not in kinds:
        return Context(turns, mask, cache)
    return Context(turns, mask, cache, documents, None if valid is None else ops.ValidFirst.of(valid))


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
