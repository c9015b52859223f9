"""The parameters of a decoder and its FLOPs per token, counted on the meta device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import nn

from depthmix.mechanisms import KVStack
from depthmix.models.config import DecoderConfig
from depthmix.models.decoder import Decoder
from depthmix.models.moe import MixtureOfExperts
from depthmix.ops.kda import CHUNK


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters of a decoder; weights that run several times or are tied count once."""

    total: int
    active: int  # used by one token: all but the experts that it is not routed to
    active_without_embeddings: int
    embedding: int  # with the head
    mixer: int  # of both kinds


def count_parameters(config: DecoderConfig) -> Counts:
    """The numbers of parameters of a decoder, by part."""
    return count(config)[0]


@dataclass(frozen=True, kw_only=True)
class SublayerCounts:
    """Parameters of one sublayer of a kind, with its norm."""

    total: int
    active: int  # used by one token


def count_sublayers(config: DecoderConfig) -> dict[str, SublayerCounts]:
    """The parameters of one sublayer of each kind that the decoder has: "gqa", "kda", "mla"; "dense", "experts"."""
    with torch.device("meta"):
        model = Decoder(config)
    counts: dict[str, SublayerCounts] = {}
    for index, sublayer in enumerate(model.sublayers):
        experts = isinstance(sublayer, MixtureOfExperts)
        kind = ("experts" if experts else "dense") if index % 2 else config.attention_kinds[index // 2]
        total = elements(sublayer.parameters())
        counts.setdefault(kind, SublayerCounts(total=total, active=total - idle_parameters(sublayer)))
    return counts


def count_multiplied(config: DecoderConfig) -> int:
    """Number of parameters outside the mixers that multiply a token: each once per execution, including the head but
    not the embedding."""
    return count(config)[1]


def mixing_flops(config: DecoderConfig) -> int:
    """Forward FLOPs per token of the mixers of both kinds, as they state them, or else 2 per parameter."""
    return count(config)[2]


def execution_flops(config: DecoderConfig, tokens_per_row: int) -> list[int]:
    """Forward FLOPs per token of each execution of a sublayer and, last, of the output (norm and head).

    Products are counted as in `depthmix.training.flops_per_token`. Mixers state only their sum: it is spread evenly,
    that of the depth mixers over executions and output, that of the value mixers over the attention layers.
    """
    with torch.device("meta"):
        model = Decoder(config)
    sublayers = [2 * (elements(sublayer.parameters()) - idle_parameters(sublayer)) for sublayer in model.sublayers]
    flops = [sublayers[2 * layer + second] for layer in model.layer_order for second in (0, 1)]
    flops += [2 * (elements(model.norm.parameters()) + model.embed.weight.numel())]
    for i, share in enumerate(spread(model.depth.facts.forward_flops, len(flops))):
        flops[i] += share
    values = count_mixing(model) - model.depth.facts.forward_flops
    products = attention_flops(config, tokens_per_row)
    for slot, share in enumerate(spread(values, len(model.layer_order))):
        flops[2 * slot] += products[slot] + share
    return flops


def attention_flops(config: DecoderConfig, tokens_per_row: int) -> list[int]:
    """Forward FLOPs per token of each execution of attention, without its projections.

    "gqa" and "mla": 2 · heads · (width of a key + width of a value) for each of the (T + 1) / 2 tokens that a token
    attends to on average. "kda": 6 d² + 8 C d per head of d channels, in chunks of C tokens: three products with the
    state, and within a chunk two products of pairs, a triangular system and its result times the pairs.
    """
    widths = {"gqa": 2 * config.width}
    if config.mla is not None:
        widths["mla"] = config.mla.nope + config.mla.shared + config.mla.value
    each = {kind: config.heads * width * (tokens_per_row + 1) for kind, width in widths.items()}
    if config.kda is not None:
        d = config.kda.head_dim
        each["kda"] = config.kda.heads * (6 * d * d + 8 * CHUNK * d)
    kinds = config.attention_kinds
    return [each[kinds[layer]] for layer in config.layer_order]


def spread(total: int, count: int) -> list[int]:
    """`count` whole numbers whose sum is `total`, which differ by at most 1."""
    ends = [total * i // count for i in range(count + 1)]
    return [hi - lo for lo, hi in pairwise(ends)]


@lru_cache(maxsize=256)
def count(config: DecoderConfig) -> tuple[Counts, int, int]:
    """All counts, from one decoder on the meta device."""
    with torch.device("meta"):
        model = Decoder(config)
    return count_once(model), count_each_run(model), count_mixing(model)


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
    multiplied = elements(model.norm.parameters())
    multiplied += model.embed.weight.numel()  # the head has the shape of the embedding
    for layer in model.layer_order:
        for sublayer in model.sublayers[2 * layer : 2 * layer + 2]:
            multiplied += elements(sublayer.parameters()) - idle_parameters(sublayer)
    return multiplied


def count_mixing(model: Decoder) -> int:
    flops = model.depth.facts.forward_flops
    if isinstance(model.kv_mixers, KVStack):
        config = model.config
        flops += model.kv_mixers.facts(heads=config.heads, kv_heads=config.num_kv_heads).forward_flops or 0
    return flops


def elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def idle_parameters(sublayer: nn.Module) -> int:
    """Number of parameters of the experts that a token is not routed to."""
    if not isinstance(sublayer, MixtureOfExperts):
        return 0
    experts = (sublayer.gate_proj, sublayer.up_proj, sublayer.down_proj)
    one_expert = sum(weight[0].numel() for weight in experts)
    return one_expert * (sublayer.config.experts - sublayer.config.active)
