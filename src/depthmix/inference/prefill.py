"""Prefill of a prompt in chunks that fit a memory limit.

Beyond the weights and the cache a chunk needs memory for the state over depth and the activations of one sublayer, for
each of its tokens, and for a mask of its tokens over all columns. The first is measured on a few tokens; the second is
computed. Both are proportional to the chunk's length. MLA also makes keys and values of all columns, one layer at a
time.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from depthmix import ops
from depthmix.models import Decoder
from depthmix.ops.memory import LiveBytes
from depthmix.support.checks import parse_bytes

PROBE = 64  # number of tokens in the pass that measures the memory per token: a chunk of KDA
measured: WeakKeyDictionary[Decoder, dict[Any, int]] = WeakKeyDictionary()


def bytes_per_token(model: Decoder) -> int:
    """Peak bytes per token of a forward pass, without head and cache.

    Measured in a pass over a few tokens, once per model, dtype and device. For every mechanism the memory is
    proportional to the number of tokens.
    """
    weight = next(model.parameters())
    known, key = measured.setdefault(model, {}), (weight.dtype, weight.device)
    if key not in known:
        known[key] = measure(model)
    return known[key]


@torch.no_grad()
def measure(model: Decoder) -> int:
    tokens = torch.zeros(1, PROBE, dtype=torch.int64, device=next(model.parameters()).device)
    with LiveBytes() as live:
        model.hidden(tokens)
    return -(-model.shard.largest(live.peak) // PROBE) + kernel_bytes(model)


def kernel_bytes(model: Decoder) -> int:
    """Bytes per token that the operator of KDA allocates and frees itself: 9·d numbers and a chunk per head."""
    kda = model.config.kda
    if kda is None:
        return 0
    itemsize = ops.accumulator(next(model.parameters()).dtype).itemsize
    return kda.heads * (9 * kda.head_dim + PROBE) * itemsize


def prefill_chunk(
    model: Decoder, tokens: int, memory: int | str, *, batch: int = 1, padded: bool = False, before: int = 0
) -> int:
    """The largest chunk, in tokens, with which a prefill stays within a memory limit.

    Args:
        model: the model in the dtype and on the device in which it will run.
        tokens: length of the longest prompt.
        memory: limit in bytes, or a text such as "256MB", for the memory needed beyond weights and cache.
        batch: number of prompts.
        padded: whether prompts differ in length: each then has its own mask.
        before: number of columns already in the cache.

    Returns `tokens` if they fit in one pass, which needs no mask unless there is padding or the cache is not empty.
    """
    limit = parse_bytes("memory", memory)
    activations = batch * bytes_per_token(model)
    masks = mask_bytes(model, batch if padded else 1) * (before + tokens)  # per token of the last chunk
    fixed = batch * model.config.vocab_size * next(model.parameters()).dtype.itemsize  # logits of the last token
    whole = activations + (masks if padded or before else 0)
    made = batch * expanded_bytes(model)
    if fixed + tokens * whole + before * made <= limit:
        return tokens
    fixed += (before + tokens) * made
    chunk = (limit - fixed) // (activations + masks)
    if chunk < 1:
        least = fixed + activations + masks
        raise ValueError(
            f"memory={memory!r} for {batch} × {tokens} tokens; expected at least {least:,} bytes, which a chunk of one "
            "token needs. Raise the limit, or use fewer prompts at once"
        )
    return int(min(chunk, tokens))


def mask_bytes(model: Decoder, masks: int) -> int:
    """Bytes of one column of a token's mask: a boolean kept for all layers, and a number inside attention."""
    return masks * (2 + next(model.parameters()).dtype.itemsize)


def expanded_bytes(model: Decoder) -> int:
    """Bytes of a column's keys and values of all heads, which MLA makes of its latent for a long chunk."""
    mla, heads = model.config.mla, model.config.heads
    if mla is None:
        return 0
    key = mla.nope + mla.shared
    made = mla.nope + mla.value + key + max(key, mla.value)  # together, then the keys, and the values as wide as keys
    return heads * made * next(model.parameters()).dtype.itemsize


def prefill(model: Decoder, tokens: Tensor, valid: Tensor | None, cache: Any, chunk: int) -> Tensor:
    """Logits [B, 1, V] of the last token of the prompts."""
    for first in range(0, tokens.shape[1], chunk):
        part = slice(first, first + chunk)
        which = None if valid is None else valid[:, part]
        logits = model(tokens[:, part], valid=which, cache=cache, last_only=True)
    return logits
