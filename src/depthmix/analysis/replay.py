"""Replay the linear maps with recorded coefficients: the depth mixing matrix, contributions, values, weights.

The source axis is put in front of all others, so that a mechanism's own code can be used unchanged.

Axes: ... token, D channel, G group of channels with weights of their own (1, heads or D), L sublayers, i source,
H head of the weights, C source that a mechanism names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix import ops
from depthmix.mechanisms import DepthStack, KVMixer, State


def value_matrix(layers: Sequence[tuple[KVMixer, Any, Tensor]]) -> Tensor | None:
    """[B, T, K, N, N] by replaying the mixers on one-hot values; None if no attention layer mixes values."""
    if not layers:
        return None
    n, k = len(layers), layers[0][2]
    kv, rows = layers[0][0].begin(), []
    for i, (mixer, c, _) in enumerate(layers):
        v = ops.wide(k).new_zeros((n, *k.shape[:-1], 1))  # [source, B, K, T, 1]
        v[i] = 1
        mixed = mixer.combine(v, kv, c)
        kv = mixer.update(k, v, mixed, kv)
        rows.append(mixed.squeeze(-1))
    return torch.stack(rows).permute(2, 4, 3, 0, 1)  # [B, T, K, row, source]


def replay(
    stack: DepthStack, coefficients: Sequence[Any], sources: Sequence[Tensor]
) -> tuple[list[Tensor], list[State]]:
    """The rows and states that the linear maps give for other sources, with recorded coefficients."""
    assert stack.out is not None
    state = next(iter(stack)).begin(sources[0])
    rows, states = [], [state]
    for mixer, c, source in zip(stack, coefficients[:-1], sources[1:], strict=True):
        rows.append(mixer.combine(state, c))
        state = mixer.update(state, c, source)
        states.append(state)
    rows.append(stack.out.combine(state, coefficients[-1]))
    return rows, states


def mixing_matrix(
    stack: DepthStack, coefficients: Sequence[Any], x: Tensor, groups: int, channels: Sequence[int] | None
) -> Tensor:
    if channels is not None and not all(isinstance(k, int) and -stack.dim <= k < stack.dim for k in channels):
        raise ValueError(f"channels={list(channels)}; expected indices below the width, dim={stack.dim}")
    n = stack.depth + 1
    zero = x.new_zeros((n, *x.shape[:-1], groups), dtype=ops.accumulator(x.dtype))
    one_hot = [zero.index_fill(0, torch.tensor([i], device=x.device), 1) for i in range(n)]
    rows, _ = replay(stack, coefficients, one_hot)  # each [i, ..., G]
    if channels is not None and groups == stack.dim:
        rows = [row[..., list(channels)] for row in rows]
    M = torch.stack(rows).movedim((0, 1), (-2, -1))  # [..., G, row, i]
    return M.squeeze(-3) if groups == 1 else M


def operator_parts(stack: DepthStack, coefficients: Sequence[Any], written: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Contributions [row, i, ..., D] of the real writes, and their gains [..., row, i]."""
    n = stack.depth + 1
    isolated = []  # each write, with the others zero
    for i, v in enumerate(written):
        wide = ops.wide(v)
        isolated.append(torch.stack([wide if j == i else torch.zeros_like(wide) for j in range(n)]))
    rows, states = replay(stack, coefficients, isolated)
    streams = [s[0].flatten(-2) for s in states]  # [i, ..., M·D] before each row
    first = torch.stack([streams[i][i] for i in range(n)])  # each write as it entered
    tiny = torch.finfo(first.dtype).tiny
    direction = first / first.abs().amax(-1, keepdim=True).clamp(min=tiny)  # squares of large writes overflow
    scale = (first * direction).sum(-1).clamp(min=tiny)
    gain = torch.stack([(s * direction).sum(-1) / scale for s in streams])  # [row, i, ...]
    causal = torch.ones(n, n, device=gain.device).tril().view(n, n, *[1] * (gain.dim() - 2))
    return torch.stack(rows), (gain * causal.to(gain.dtype)).movedim((0, 1), (-2, -1))


class Weights(NamedTuple):
    """Weights over the sources that a mechanism names."""

    weights: Tensor  # [..., (H,) L+1, C], 0 where a row does not read
    source_names: list[str]  # names of the C columns
    reads: list[list[int]]  # columns that each row reads, the newest last
    partial: list[bool]  # whether the newest source of a row is still growing


def weights_over_sources(stack: DepthStack, coefficients: Sequence[Any], x: Tensor) -> Weights | None:
    """The weights of all rows over their sources, in one table; None if no row weights a list of sources."""
    rows = [mixer.source_weights(c) for mixer, c in zip(stack.all_mixers(), coefficients, strict=True)]
    columns: dict[str, int] = {}
    for row in rows:
        for name in row.names if row is not None else ():
            columns.setdefault(name, len(columns))
    if not columns:
        return None
    reads = [[] if row is None else [columns[name] for name in row.names] for row in rows]
    heads = max((row.weights.shape[-2] for row in rows if row is not None and row.weights.dim() > 1), default=1)
    table = x.new_zeros((*x.shape[:-1], heads, len(rows), len(columns)), dtype=ops.accumulator(x.dtype))
    for r, row in enumerate(rows):
        if row is not None:
            table[..., r, reads[r]] = row.weights.to(table.dtype)
    partial = [row is not None and row.partial for row in rows]
    return Weights(table.squeeze(-3) if heads == 1 else table, list(columns), reads, partial)
