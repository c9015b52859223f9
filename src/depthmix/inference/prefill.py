"""Reading a prompt in chunks that fit into a limit of memory.

A chunk needs memory beyond the weights and the cache: the state over depth and the activations of one sublayer, for
each of its tokens, and a mask of its tokens over all columns. The first is measured, on a few tokens; the second is
counted. Both are proportional to the chunk.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from depthmix.models import Decoder
from depthmix.ops.memory import LiveBytes
from depthmix.support.checks import parse_bytes

PROBE = 32  # tokens that are run to measure what one of them takes
measured: WeakKeyDictionary[Decoder, dict[Any, int]] = WeakKeyDictionary()


def bytes_per_token(model: Decoder) -> int:
    """Bytes of the tensors that are alive at once, at most, for each token of a forward pass; without head and cache.

    Measured on a pass over a few tokens, once for a model, dtype and device. For every mechanism it grows in proportion
    to the tokens.
    """
    weight = model.embed.weight
    known, key = measured.setdefault(model, {}), (weight.dtype, weight.device)
    if key not in known:
        known[key] = measure(model)
    return known[key]


@torch.no_grad()
def measure(model: Decoder) -> int:
    tokens = torch.zeros(1, PROBE, dtype=torch.int64, device=model.embed.weight.device)
    with LiveBytes() as live:
        x = model.embed(tokens)
        state, _ = model.segments(model.depth.begin(x), model.context(tokens, x.dtype))
        model.depth.end(state)
    return -(-live.peak // PROBE)


def prefill_chunk(
    model: Decoder, tokens: int, memory: int | str, *, batch: int = 1, padded: bool = False, before: int = 0
) -> int:
    """The largest number of tokens to read at once so that a prefill keeps to a limit of memory.

    Args:
        model: as it will run: dtype, device and mechanism decide.
        tokens: of the longest prompt.
        memory: limit in bytes, or a text such as "256MB"; for what the pass needs beyond weights and cache.
        batch: prompts.
        padded: whether prompts differ in length: each then has a mask of its own.
        before: columns that the cache holds already.

    All of `tokens`, where they fit in one pass: that needs no mask, unless there is padding or something in the cache.
    """
    limit = parse_bytes("memory", memory)
    own = batch * bytes_per_token(model)
    masks = mask_bytes(model, batch if padded else 1) * (before + tokens)  # for each token of the last chunk
    fixed = batch * model.config.vocab_size * model.embed.weight.dtype.itemsize  # logits of the last token
    whole = own + (masks if padded or before else 0)
    if fixed + tokens * whole <= limit:
        return tokens
    chunk = (limit - fixed) // (own + masks)
    if chunk < 1:
        least = fixed + own + masks
        raise ValueError(
            f"memory={memory!r} for {batch} × {tokens} tokens; expected at least {least:,} bytes, what a chunk of one "
            "token takes. Ask for more, or for fewer prompts at once"
        )
    return int(min(chunk, tokens))


def mask_bytes(model: Decoder, masks: int) -> int:
    """Of one column of a token's mask: True or False, kept for all layers, and as a number inside attention."""
    return masks * (2 + model.embed.weight.dtype.itemsize)


def prefill(model: Decoder, tokens: Tensor, valid: Tensor | None, cache: Any, chunk: int) -> Tensor:
    """Logits [B, 1, V] of the last token of the prompts."""
    for first in range(0, tokens.shape[1], chunk):
        part = slice(first, first + chunk)
        which = None if valid is None else valid[:, part]
        logits = model(tokens[:, part], valid=which, cache=cache, last_only=True)
    return logits
