"""The loss of a whole text, every token but the first predicted once.

Axes: B row, T token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthmix.models import Decoder, next_token_losses


class Score(NamedTuple):
    loss: float  # nats per token
    bits_per_byte: float
    tokens: int  # that were predicted


@torch.no_grad()
def score(
    model: Decoder,
    tokens: Tensor,
    text_bytes: float,
    row: int,
    rows: int,
    progress: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter,
) -> Score:
    """Rows of `row` predictions, the last one short; a row begins with the token that the one before ended with.

    `text_bytes` is the size of the text: the bytes of the first token, which nothing predicts, count by their mean.
    `progress` passes the batches on, and may show how many are done.
    """
    if row < 1 or rows < 1:
        raise ValueError(f"tokens_per_row={row}, rows={rows}; expected at least 1 of each")
    device = model.embed.weight.device
    count = len(tokens) - 1
    row, rows = min(row, max(count, 1)), min(rows, max(count, 1))
    full = count // row
    windows = tokens[: full * row + 1].unfold(0, row + 1, row) if full else tokens.new_zeros(0, row + 1)
    parts = [*windows.split(rows)] if full else []
    if count % row:
        parts.append(tokens[full * row :][None])
    total = 0.0
    for part in progress(parts):
        part = part.to(device)
        total += float(next_token_losses(model(part), part)[0].double().sum())
    loss = total / count
    return Score(loss, loss * len(tokens) / text_bytes / math.log(2), count)
