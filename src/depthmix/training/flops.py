"""Model FLOPs by count: what the equations need, not what a machine or a recomputation does."""

from __future__ import annotations

from depthmix.models import DecoderConfig
from depthmix.models.counting import count_multiplied, mixing_flops


def flops_per_token(config: DecoderConfig, tokens_per_row: int) -> int:
    """Of a training step: three times those of the forward pass.

    Sublayers, norms and head take 2 for each parameter that a token is multiplied with; weights that run several times
    count each time, the embedding's table not at all. Attention takes 4 · heads · width for each of the (T + 1) / 2
    tokens that one sees on average. Mixers take what they state (`forward_flops` of their facts): in two phases where
    reads share passes, else each read on its own.
    """
    attention = 2 * config.heads * config.width * (tokens_per_row + 1) * len(config.layer_order)
    return 3 * (2 * count_multiplied(config) + attention + mixing_flops(config))
