"""The loss of a whole text, in which every token but the first is predicted once.

Axes: B row, T token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from depthmix.analysis.passes import logits_of
from depthmix.models import next_token_losses
from depthmix.parallel.model import DistributedModel


class Score(NamedTuple):
    loss: float  # nats per token
    bits_per_byte: float
    tokens: int  # number of predicted tokens


@torch.no_grad()
def score(
    model: nn.Module | DistributedModel,
    tokens: Tensor,
    text_bytes: float,
    row: int,
    rows: int,
    progress: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter,
) -> Score:
    """The loss over rows of `row` predictions (the last may be shorter); a row begins where the previous one ended.

    `text_bytes` is the size of the text: the first token, which is not predicted, counts with the mean loss. `progress`
    passes the batches through and may display how many are done.
    """
    if row < 1 or rows < 1:
        raise ValueError(f"tokens_per_row={row}, rows={rows}; expected at least 1 of each")
    device = next(model.parameters()).device
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
        if isinstance(model, DistributedModel):
            total += model.evaluate(part) * part[:, 1:].numel()
        else:
            logits = logits_of(model(part), part)
            assert logits is not None
            total += float(next_token_losses(logits, part)[0].double().sum())
    loss = total / count
    return Score(loss, loss * len(tokens) / text_bytes / math.log(2), count)
