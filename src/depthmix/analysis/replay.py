"""Replay the linear maps with recorded coefficients: the depth mixing matrix, contributions, values, weights.

The source axis is put in front of all others, so that a mechanism's own code can be used unchanged.

Axes: ... token, D channel, G group of channels with weights of their own (1, heads or D), L sublayers, i source,
H head of the weights, C source that a mechanism names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix import ops
from depthmix.mechanisms import DepthStack, KVMixer, SourceWeights, State


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
    rows, states = zip(*replayed(stack, coefficients, sources), strict=True)
    return list(rows), list(states)


def replayed(
    stack: DepthStack, coefficients: Sequence[Any], sources: Iterable[Tensor]
) -> Iterator[tuple[Tensor, State]]:
    """One row after the other, each with the state before it; only the newest state is kept."""
    assert stack.out is not None
    remaining = iter(sources)
    state = next(iter(stack)).begin(next(remaining))
    for mixer, c in zip(stack, coefficients[:-1], strict=True):
        yield mixer.combine(state, c), state
        state = mixer.update(state, c, next(remaining))
    yield stack.out.combine(state, coefficients[-1]), state


def one_hot_rows(
    stack: DepthStack, coefficients: Sequence[Any], x: Tensor, groups: int, first: int = 0, last: int | None = None
) -> Iterator[Tensor]:
    """Each row as [i, ..., G]: its weights for the sources `first` to `last` − 1 (None: all), zeros for later ones."""
    n = stack.depth + 1
    unit = torch.eye(n, dtype=ops.accumulator(x.dtype), device=x.device)[first:last]
    shape = (len(unit), *x.shape[:-1], groups)
    # Views of single numbers: n sources of n² numbers per token would be the largest tensors of a trace.
    sources = (unit[:, i].reshape(-1, *[1] * x.dim()).expand(shape) for i in range(n))
    return (row for row, _ in replayed(stack, coefficients, sources))


def mixing_matrix(
    stack: DepthStack, coefficients: Sequence[Any], x: Tensor, groups: int, channels: Sequence[int] | None
) -> Tensor:
    if channels is not None and not all(isinstance(k, int) and -stack.dim <= k < stack.dim for k in channels):
        raise ValueError(f"channels={list(channels)}; expected indices below the width, dim={stack.dim}")
    rows = list(one_hot_rows(stack, coefficients, x, groups))
    if channels is not None and groups == stack.dim:
        rows = [row[..., list(channels)] for row in rows]
    M = torch.stack(rows).movedim((0, 1), (-2, -1))  # [..., G, row, i]
    return M.squeeze(-3) if groups == 1 else M


def operator_parts(stack: DepthStack, coefficients: Sequence[Any], written: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Contributions [row, i, ..., D] of the real writes, and their gains [..., row, i]."""
    n = stack.depth + 1
    rows = list(gains(replayed(stack, coefficients, isolated(written, 0, n)), 0, n))
    M = rows[0][1].new_zeros(n, n, *rows[0][1].shape[1:])
    for r, (_, gain) in enumerate(rows):
        M[r, : r + 1] = gain
    return torch.stack([row for row, _ in rows]), M.movedim((0, 1), (-2, -1))


def isolated(written: Sequence[Tensor], first: int, last: int) -> Iterator[Tensor]:
    """Each write as a source of its own, [i, ..., D], where i runs over the writes `first` to `last` − 1."""
    for index, v in enumerate(written):
        alone = ops.wide(v).new_zeros(()).expand(last - first, *v.shape)
        if first <= index < last:
            alone = alone.clone()
            alone[index - first] = v
        yield alone


def gains(rows: Iterable[tuple[Tensor, State]], first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each replayed row, and the gains [i, ...] of those of the writes `first` to `last` − 1 that it can read.

    The gain of a write is its part along itself as it entered the state: <T w, w> / |w|^2.
    """
    directions = scales = torch.empty(0)
    for r, (row, state) in enumerate(rows):
        streams = state[0].flatten(-2)  # [i, ..., M·D] before the row
        if r == 0:
            directions, scales = streams.new_empty(streams.shape), streams.new_empty(streams.shape[:-1])
        if first <= r < last:
            w, tiny = streams[r - first], torch.finfo(streams.dtype).tiny
            # Squares of large writes overflow.
            directions[r - first] = w / w.abs().amax(-1, keepdim=True).clamp(min=tiny)
            scales[r - first] = (w * directions[r - first]).sum(-1).clamp(min=tiny)
        known = max(0, min(r + 1, last) - first)
        yield row, (streams[:known] * directions[:known]).sum(-1) / scales[:known]


class Weights(NamedTuple):
    """Weights over the sources that a mechanism names."""

    weights: Tensor  # [..., (H,) L+1, C], 0 where a row does not read
    source_names: list[str]  # names of the C columns
    reads: list[list[int]]  # columns that each row reads, the newest last
    partial: list[bool]  # whether the newest source of a row is still growing


class NamedSources(NamedTuple):
    """The sources that the rows of a mechanism weight."""

    names: list[str]
    reads: list[list[int]]  # indices of the names that each row reads, the newest last
    partial: list[bool]  # whether the newest source of a row is still growing
    heads: int


def name_sources(rows: Sequence[SourceWeights | None]) -> NamedSources | None:
    """One list of names for all rows; None if no row weights a list of sources."""
    columns: dict[str, int] = {}
    for row in rows:
        for name in row.names if row is not None else ():
            columns.setdefault(name, len(columns))
    if not columns:
        return None
    reads = [[] if row is None else [columns[name] for name in row.names] for row in rows]
    heads = max((row.weights.shape[-2] for row in rows if row is not None and row.weights.dim() > 1), default=1)
    return NamedSources(list(columns), reads, [row is not None and row.partial for row in rows], heads)


def weights_over_sources(stack: DepthStack, coefficients: Sequence[Any], x: Tensor) -> Weights | None:
    """The weights of all rows over their sources, in one table; None if no row weights a list of sources."""
    rows = [mixer.source_weights(c) for mixer, c in zip(stack.all_mixers(), coefficients, strict=True)]
    named = name_sources(rows)
    if named is None:
        return None
    shape = (*x.shape[:-1], named.heads, len(rows), len(named.names))
    table = x.new_zeros(shape, dtype=ops.accumulator(x.dtype))
    for r, row in enumerate(rows):
        if row is not None:
            table[..., r, named.reads[r]] = row.weights.to(table.dtype)
    return Weights(table.squeeze(-3) if named.heads == 1 else table, named.names, named.reads, named.partial)
