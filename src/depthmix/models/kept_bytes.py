"""How much memory a decoder needs for the tokens that it has read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from depthmix import ops
from depthmix.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class CacheBytes:
    """Bytes of a cache: what grows with the tokens, and what has a constant size."""

    per_token: int  # of one row
    per_row: int  # however many tokens it has

    def total(self, tokens: int, rows: int = 1) -> int:
        return rows * (self.per_row + tokens * self.per_token)


def cache_bytes(config: DecoderConfig, dtype: torch.dtype = torch.bfloat16) -> CacheBytes:
    """The bytes that a cache of a decoder in `dtype` takes per token, and per row.

    Grouped-query attention keeps keys and values per token, MLA a latent and the shared key; KDA keeps per row its
    state, in float32 at least, and the last inputs of its convolutions. Depth mixing keeps nothing between tokens.
    """
    wide, per_token, per_row = ops.accumulator(dtype).itemsize, 0, 0
    for kept in config.kept():
        per_token += dtype.itemsize * sum(heads * width for heads, width in kept.columns)
        for shape, is_wide in zip(kept.state, kept.wide, strict=True):
            per_row += math.prod(shape) * (wide if is_wide else dtype.itemsize)
    return CacheBytes(per_token=per_token, per_row=per_row)
