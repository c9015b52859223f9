"""Plans of pipelines of a `Decoder`, made from its configuration on the meta device: nothing is allocated.

Axes of shapes: B row, T token, K key-value head, d channel of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import torch

from depthmix import ops
from depthmix.mechanisms import KVStack
from depthmix.models import DecoderConfig, Segment, segment_bounds
from depthmix.models.decoder import make_mixers
from depthmix.parallel.numbering import Meta, number_states
from depthmix.parallel.plan import Placement, Plan, cut, place
from depthmix.support.checks import check_divides, check_range


def decoder_plan(
    config: DecoderConfig,
    *,
    rows: int,
    tokens: int,
    ranks: int,
    virtual: int = 1,
    dtype: torch.dtype = torch.float32,
    placement: Placement = "loop",
    divide: Literal["count", "flops"] = "count",
    tp: int = 1,
) -> Plan:
    """Cut a decoder into `ranks · virtual` stages and find what they exchange.

    Args:
        config: the decoder. Its executions of sublayers are divided: attention and MLP count separately, a looped
            layer each time.
        rows, tokens: shape of one micro-batch [B, T].
        ranks, virtual, dtype, placement: as in `make_plan`.
        divide: "count": an equal number of executions per stage; "flops": equal cost, the head included.
        tp: ranks of tensor parallelism. Each holds a share of the stream's tokens and of the key-value heads.
    """
    for name, number in (("rows", rows), ("tokens", tokens), ("tp", tp)):
        check_range(name, number, 1)
    check_divides("tp", tp, config.num_kv_heads, of="the number of key-value heads")
    rank_of = place(ranks, virtual, placement)
    cut(config.depth, len(rank_of), None)  # refuses too many stages
    ends = segment_bounds(config, len(rank_of), by=divide, tokens_per_row=tokens)
    bounds = (0, *(hi for _, hi in ends))
    with torch.device("meta"):
        stack, kv_mixers = make_mixers(config)
    values = kv_mixers if isinstance(kv_mixers, KVStack) else None
    attention = () if values is None else tuple(range(0, config.depth, 2))
    shape, heads = (rows, -(-tokens // tp)), (rows, config.num_kv_heads // tp, tokens, config.width)
    adds_loss = config.moe is not None and config.moe.balance == "loss"
    total: list[Meta] = [((1,), ops.accumulator(dtype))] if adds_loss else []  # of the auxiliary losses so far
    states, tensors = number_states(stack, bounds, shape, dtype, values, attention, heads, total)
    return Plan(
        name=stack.name,
        ranks=ranks,
        placement=placement,
        shape=shape,
        dtype=dtype,
        bounds=bounds,
        rank_of=rank_of,
        states=states,
        tensors=tensors,
        attention=attention,
    )


def meta_parts(config: DecoderConfig, plan: Plan) -> Iterator[tuple[int, Segment]]:
    """The rank and the part of every stage, in order; on the meta device, for their names and shapes."""
    for (lo, hi), rank in zip(itertools.pairwise(plan.bounds), plan.rank_of, strict=True):
        with torch.device("meta"):
            part = Segment(config, lo, hi)
        yield rank, part


def shared_names(config: DecoderConfig, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Parameters that several ranks of the pipeline hold, each with these ranks: those of looped layers, shared mixers
    and a tied embedding. Computed alike on every rank."""
    holders: dict[str, set[int]] = {}
    for rank, part in meta_parts(config, plan):
        for name, _ in part.named_parameters():
            holders.setdefault(name, set()).add(rank)
    return {name: tuple(sorted(ranks)) for name, ranks in sorted(holders.items()) if len(ranks) > 1}
