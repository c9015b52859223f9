"""What a decoder counts: parameters, and how many of them a token is multiplied with. Counted without storage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from depthmix.models.config import DecoderConfig
from depthmix.models.decoder import Decoder
from depthmix.models.moe import MixtureOfExperts


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters of a decoder; weights that run several times or are tied count once."""

    total: int
    active: int  # what one token uses: all but the experts that it does not go to
    active_without_embeddings: int
    embedding: int  # with the head
    mixer: int  # of both kinds


def count_parameters(config: DecoderConfig) -> Counts:
    """Parameters by what they belong to."""
    return count(config)[0]


def count_multiplied(config: DecoderConfig) -> int:
    """Parameters that a token is multiplied with: each as often as it runs, the head always, the embedding never."""
    return count(config)[1]


@lru_cache(maxsize=256)
def count(config: DecoderConfig) -> tuple[Counts, int]:
    """Both counts, on one decoder on the meta device."""
    with torch.device("meta"):
        model = Decoder(config)
    return count_once(model), count_each_run(model)


def count_once(model: Decoder) -> Counts:
    total = elements(model.parameters())
    idle = sum(idle_parameters(sublayer) for sublayer in model.sublayers)
    embedding = elements(model.embed.parameters()) + (0 if model.head is None else elements(model.head.parameters()))
    return Counts(
        total=total,
        active=total - idle,
        active_without_embeddings=total - idle - embedding,
        embedding=embedding,
        mixer=elements(model.depth.parameters()) + elements(model.kv_mixers.parameters()),
    )


def count_each_run(model: Decoder) -> int:
    parts = (*model.depth.all_mixers(), *model.kv_mixers, model.norm)
    multiplied = sum(elements(part.parameters()) for part in parts)
    multiplied += model.embed.weight.numel()  # of the head, which has the shape of the table
    for layer in model.layer_order:
        for sublayer in model.sublayers[2 * layer : 2 * layer + 2]:
            multiplied += elements(sublayer.parameters()) - idle_parameters(sublayer)
    return multiplied


def elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def idle_parameters(sublayer: nn.Module) -> int:
    """Of the experts that a token does not go to."""
    if not isinstance(sublayer, MixtureOfExperts):
        return 0
    experts = (sublayer.gate_proj, sublayer.up_proj, sublayer.down_proj)
    one_expert = sum(weight[0].numel() for weight in experts)
    return one_expert * (sublayer.config.experts - sublayer.config.active)
