"""Model FLOPs by count: what the equations need, not what a machine or a recomputation does."""

from __future__ import annotations

from depthmix.models import DecoderConfig
from depthmix.models.counting import count_multiplied


def flops_per_token(config: DecoderConfig, tokens_per_row: int) -> int:
    """Of a training step: 6 for each parameter that a token is multiplied with, and those of attention.

    Weights that run several times count each time, the embedding's table not at all, the head always. Attention takes
    4 · heads · width FLOPs forward for each of the (T + 1) / 2 tokens that one sees on average, and three times that
    with the backward pass. Of a mechanism its parameters count; what it reads without parameters is left out.
    """
    attention = 6 * config.heads * config.width * (tokens_per_row + 1) * len(config.layer_order)
    return 6 * count_multiplied(config) + attention
