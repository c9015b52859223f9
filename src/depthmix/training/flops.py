"""Model FLOPs by count: what the equations need, not what a machine or a recomputation does."""

from __future__ import annotations

import torch

from depthmix.models import Decoder, DecoderConfig
from depthmix.models.moe import MixtureOfExperts
from depthmix.models.presets import count, idle_parameters


def flops_per_token(config: DecoderConfig, tokens_per_row: int) -> int:
    """Of a training step: 6 for each parameter that a token is multiplied with, and those of attention.

    Weights that run several times count each time, the embedding's table not at all, the head always. Attention takes
    4 · heads · width FLOPs forward for each of the (T + 1) / 2 tokens that one sees on average, and three times that
    with the backward pass. Of a mechanism its parameters count; what it reads without parameters is left out.
    """
    with torch.device("meta"):
        model = Decoder(config)
    used = count(model.depth.parameters()) + count(model.kv_mixers.parameters()) + count(model.norm.parameters())
    used += model.embed.weight.numel()  # of the head, which has the shape of the table
    for layer in config.layer_order:
        for sublayer in model.sublayers[2 * layer : 2 * layer + 2]:
            used += count(sublayer.parameters())
            used -= idle_parameters(sublayer) if isinstance(sublayer, MixtureOfExperts) else 0
    attention = 6 * config.heads * config.width * (tokens_per_row + 1) * len(config.layer_order)
    return 6 * used + attention
