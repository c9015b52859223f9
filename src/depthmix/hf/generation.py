"""Generation with a model of transformers, with the sampling of `depthmix.inference`.

Axes: B batch, T token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from depthmix.inference.generate import Prompts, Sampler, check_sampling, pad_prompts, row_seeds, stop_ids


def stream(
    model: Any,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    seed: int | Sequence[int] = 0,
) -> Iterator[list[int | None]]:
    """Yield at each step one token per prompt, or None for a row that has ended; as `depthmix.inference.stream`."""
    check_sampling(max_new_tokens, temperature, top_k, top_p, None)
    vocabulary = model.config.vocab_size
    tokens, valid = pad_prompts(prompts, vocabulary, model.device)
    draw = Sampler(row_seeds(seed, len(tokens)), temperature, top_k, top_p)
    return run(model, tokens, valid, draw, max_new_tokens, stop_ids(stop, vocabulary))


@torch.no_grad()
def run(
    model: Any, tokens: Tensor, valid: Tensor | None, draw: Sampler, steps: int, stops: frozenset[int]
) -> Iterator[list[int | None]]:
    cache = DynamicCache(config=model.config)
    mask = torch.ones_like(tokens) if valid is None else valid.long()
    running, given = [True] * len(tokens), tokens
    for _ in range(steps):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :]
        out = model(
            input_ids=given,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        new = draw(out.logits[:, -1].float())
        ids: list[int] = new.tolist()
        running = [alive and token not in stops for alive, token in zip(running, ids, strict=True)]
        if not any(running):
            return
        # Rows that have ended still run; rows are independent of each other.
        yield [token if alive else None for alive, token in zip(running, ids, strict=True)]
        given, mask = new[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], -1)
