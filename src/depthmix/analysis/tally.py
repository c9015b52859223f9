"""Running statistics of what the rows of a model read, over recorded passes.

Quantities of M and of the weights are packed row by row (see `moments.Entries`), with tokens last.

Axes: N token, D channel, G group of channels with weights of their own, H head of the weights, E entry, i source,
n = L + 1 rows and columns of M, C source that a mechanism names, K key-value head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix import ops
from depthmix.analysis.histogram import Histogram
from depthmix.analysis.moments import Entries, Moments, triangle
from depthmix.analysis.recording import Record
from depthmix.analysis.replay import NamedSources, Weights, gains, isolated, name_sources, one_hot_rows, replayed
from depthmix.analysis.trace import groups_of, kind_of
from depthmix.mechanisms import DepthStack, SourceWeights

GROUP_BYTES = 1 << 26  # of the entries of those rows that are counted together
REPLAY_BYTES = 1 << 27  # of the state of a replay in width D
CHANNELS = 8  # number of channels of M if weights differ by channel


def sampled_channels(dim: int) -> list[int]:
    """At most CHANNELS of them, evenly spread."""
    count = min(CHANNELS, dim)
    return [k * dim // count for k in range(count)]


class Tally:
    """Sums over tokens. `add` takes one recorded pass; `tokens` is the number of tokens so far."""

    def __init__(self, stack: DepthStack, device: torch.device, *, mass: bool = False) -> None:
        """`mass`: also sum the shares of |M|, which the weights over sources, if there are any, do not give."""
        self.stack, self.kind, self.tokens, self.device = stack, kind_of(stack), 0, device
        self.n = stack.depth + 1
        self.channels = sampled_channels(stack.dim) if self.kind == "channel" else None
        self.groups = len(self.channels) if self.channels else 1 if self.kind == "operator" else groups_of(stack)
        self.entries = triangle(self.n, device)
        size = len(self.entries)
        self.M = Moments(size, self.groups, device=device)
        self.histogram = Histogram(size * self.groups, device)
        self.contribution = torch.zeros(size, dtype=torch.float64, device=device)
        self.cosine = torch.zeros_like(self.contribution)
        self.mass = torch.zeros_like(self.contribution) if mass else None
        self.named: NamedSources | None = None
        self.weights: Moments | None = None
        self.weight_entries = self.entries

    def start(self, weights: Sequence[SourceWeights | None]) -> None:
        """At the first pass, when it is known whether the rows weight named sources."""
        self.named = name_sources(weights)
        heads = self.groups
        if self.named is not None:
            heads = self.named.heads
            self.weight_entries = Entries(self.named.reads, len(self.named.names), self.device)
            self.weights = Moments(len(self.weight_entries), heads, device=self.device)
        self.shares = Moments(len(self.weight_entries), heads, device=self.device)
        self.entropy = Moments(self.n, device=self.device)

    def add(self, record: Record, kept: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add one pass; return the entries of M and of the weights at the tokens `kept`, [E, G, k] and [E, H, k]."""
        assert record.embedding is not None
        x, coefficients = record.embedding, [record.coefficients[r] for r in range(self.n)]
        sources = [mixer.source_weights(c) for mixer, c in zip(self.stack.all_mixers(), coefficients, strict=True)]
        if self.tokens == 0:
            self.start(sources)
        v = wide_rows([x, *(record.outputs[i] for i in range(self.stack.depth))])
        h = wide_rows([record.inputs[r] for r in range(self.n)])
        kept_M = v.new_empty(len(self.entries), self.groups, len(kept))
        kept_weights = None if self.weights is None else v.new_empty(*self.weights.mean.shape, len(kept))
        for first, last, M in self.packed_rows(record, coefficients, v, h):
            kept_M[self.entries.part(first, last)] = M[..., kept]
            read = self.add_rows(first, last, M, sources, x)
            if kept_weights is not None:
                kept_weights[self.weight_entries.part(first, last)] = read[..., kept]
        self.tokens += v.shape[1]
        return kept_M, kept_weights

    def packed_rows(
        self, record: Record, coefficients: list[Any], v: Tensor, h: Tensor
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Rows of M as (first, last, entries [E', G, N]); their contributions are added."""
        if self.kind in ("scalar", "head"):
            yield from self.weighted_rows(record, coefficients, v, h)
            return
        wide = self.operator_rows if self.kind == "operator" else self.channel_rows
        M = wide(record, coefficients, v, h)
        for first, last in self.row_groups(v):
            yield first, last, M[self.entries.part(first, last)]

    def row_groups(self, v: Tensor) -> list[tuple[int, int]]:
        """Consecutive rows whose entries fit the limit of memory, at least one."""
        most = GROUP_BYTES // (v.shape[1] * self.groups * v.itemsize)
        bounds = [0]
        for row in range(self.n):
            if row > bounds[-1] and self.entries.starts[row + 1] - self.entries.starts[bounds[-1]] > most:
                bounds.append(row)
        return list(zip(bounds, [*bounds[1:], self.n], strict=True))

    def weighted_rows(
        self, record: Record, coefficients: list[Any], v: Tensor, h: Tensor
    ) -> Iterator[tuple[int, int, Tensor]]:
        """For one weight per token and group: ⟨v_i, h⟩ by one product per group; no contribution is materialised."""
        assert record.embedding is not None
        lead = record.embedding.dim() - 1
        ordered = [tokens_last(c, lead) for c in coefficients]
        rows = one_hot_rows(self.stack, ordered, record.embedding, self.groups)
        parts, reads = split_groups(v, self.groups), split_groups(h, self.groups)  # [N·G, n, D/G]
        squares = v.unflatten(-1, (self.groups, -1)).square().sum(-1).mT  # [i, G, N]
        for first, last in self.row_groups(v):
            M = torch.cat([next(rows)[: r + 1].flatten(1, -2) for r in range(first, last)]).mT.contiguous()
            at = self.entries.part(first, last)
            row, source = self.entries.rows[at] - first, self.entries.columns[at]
            products = torch.bmm(reads[:, first:last], parts[:, :last].mT).flatten(1).mT  # [row · i, N·G]
            along = products[row * last + source].unflatten(1, (-1, self.groups)).mT.mul_(M).sum(1)
            lengths = lengths_of(M, squares[source])
            self.add_contributions(at, lengths, along / square_norms(h[first:last])[row])
            yield first, last, M

    def channel_rows(self, record: Record, coefficients: list[Any], v: Tensor, h: Tensor) -> Tensor:
        """M of the sampled channels, [E, G, N]; contributions of all channels, a few sources at a time."""
        assert record.embedding is not None
        M = v.new_empty(len(self.entries), self.groups, v.shape[1])
        squares = square_norms(h)
        for a, b in self.source_groups(v):
            rows = one_hot_rows(self.stack, coefficients, record.embedding, self.stack.dim, a, b)
            for r, row in enumerate(rows):
                weights = row[: max(0, r + 1 - a)].flatten(1, -2)  # [i, N, D]
                at = slice(self.entries.starts[r] + a, self.entries.starts[r] + a + len(weights))
                M[at] = weights[..., self.channels].mT
                self.add_wide(at, weights * v[a : a + len(weights)], h[r], squares[r])
        return M

    def operator_rows(self, record: Record, coefficients: list[Any], v: Tensor, h: Tensor) -> Tensor:
        """The gains of the writes, [E, 1, N]; contributions by replaying each write with the others zero."""
        assert record.embedding is not None
        written = [record.embedding, *(record.written[i] for i in range(self.stack.depth))]
        M = v.new_empty(len(self.entries), 1, v.shape[1])
        squares = square_norms(h)
        for a, b in self.source_groups(v):
            rows = replayed(self.stack, coefficients, isolated(written, a, b))
            for r, (row, gain) in enumerate(gains(rows, a, b)):
                parts = row[: max(0, r + 1 - a)].flatten(1, -2)
                at = slice(self.entries.starts[r] + a, self.entries.starts[r] + a + len(parts))
                M[at, 0] = gain.flatten(1)
                self.add_wide(at, parts, h[r], squares[r])
        return M

    def source_groups(self, v: Tensor) -> list[tuple[int, int]]:
        """Sources that are replayed together in width D, within the limit of memory; at least one."""
        each = v.shape[1] * v.shape[2] * v.itemsize * (self.stack.state_widths()[0] + 4)
        size = max(1, min(self.n, int(REPLAY_BYTES // each)))
        return [(a, min(a + size, self.n)) for a in range(0, self.n, size)]

    def add_wide(self, at: slice, parts: Tensor, h: Tensor, squares: Tensor) -> None:
        """Add materialised contributions [E', N, D] to one row."""
        self.add_contributions(at, parts.norm(dim=-1), (parts * h).sum(-1) / squares)

    def add_contributions(self, at: slice, lengths: Tensor, along: Tensor) -> None:
        self.contribution[at] += lengths.sum(-1, dtype=torch.float64)
        self.cosine[at] += along.sum(-1, dtype=torch.float64)

    def add_rows(self, first: int, last: int, M: Tensor, sources: Sequence[SourceWeights | None], x: Tensor) -> Tensor:
        """Add the entries [E', G, N] of these rows; return those over which shares are taken, M's or the weights'."""
        at = self.entries.part(first, last)
        self.M.add(M, self.tokens, at)
        self.histogram.add(M.flatten(0, 1), at.start * self.groups)
        if self.mass is not None:
            self.mass[at] += shares_of(M, self.entries, first, last).mean(1).sum(-1, dtype=torch.float64)
        read, entries = M, self.weight_entries
        if self.named is not None and self.weights is not None:
            read = packed_weights(sources[first:last], self.named.heads, x)
            self.weights.add(read, self.tokens, entries.part(first, last))
        share = shares_of(read, entries, first, last)
        self.shares.add(share, self.tokens, entries.part(first, last))
        surprise = share * share.clamp(min=torch.finfo(share.dtype).tiny).log()
        entropy = -entries.row_sums(surprise, first, last).flatten(1)  # [row, H · N]
        self.entropy.add(entropy, self.tokens * share.shape[1], slice(first, last))
        return read

    def named_weights(self) -> Weights | None:
        """The mean weights, [H, n, C], with their names."""
        if self.named is None or self.weights is None:
            return None
        mean = self.weight_entries.table(self.weights.mean)
        return Weights(mean, self.named.names, self.named.reads, self.named.partial)


def wide_rows(tensors: Sequence[Tensor]) -> Tensor:
    """[n, N, D]"""
    return ops.wide(torch.stack([t.flatten(0, -2) for t in tensors]))


def tokens_last(c: Any, lead: int) -> Any:
    """The same coefficients with tokens next to each other in memory: a replay on numbers then reads them in order."""
    if isinstance(c, Tensor):
        own = c.dim() - lead
        order = (*range(lead, c.dim()), *range(lead))
        back = (*range(own, c.dim()), *range(own))
        return c.permute(order).contiguous().permute(back) if own > 0 else c
    if isinstance(c, tuple):
        parts = [tokens_last(part, lead) for part in c]
        return type(c)(*parts) if hasattr(c, "_fields") else tuple(parts)
    return c


def shares_of(values: Tensor, entries: Entries, first: int, last: int) -> Tensor:
    """|values| [E', G, N] of these rows, each row divided by its sum."""
    size = values.abs()
    sums = entries.row_sums(size, first, last).clamp_(min=torch.finfo(size.dtype).tiny)
    return size / sums[entries.rows[entries.part(first, last)] - first]


def split_groups(x: Tensor, groups: int) -> Tensor:
    """[N·G, n, D/G] of x [n, N, D]."""
    return x.unflatten(-1, (groups, -1)).flatten(1, 2).transpose(0, 1)


def square_norms(h: Tensor) -> Tensor:
    """[..., N], at least the smallest number: a read of zero has shares of zero."""
    return h.square().sum(-1).clamp_(min=torch.finfo(h.dtype).tiny)


def lengths_of(M: Tensor, squares: Tensor) -> Tensor:
    """[E, N]: norms of contributions, from weights [E, G, N] and the squared norms of their groups of channels."""
    if M.shape[1] == 1:
        return (M.abs() * squares.sqrt()).squeeze(1)
    return (M.square() * squares).sum(1).sqrt_()


def packed_weights(rows: Sequence[SourceWeights | None], heads: int, x: Tensor) -> Tensor:
    """[E, H, N]: the weights of these rows over the sources that each names."""
    dtype, lead = ops.accumulator(x.dtype), x.shape[:-1]
    packed = [x.new_empty(0, heads, lead.numel(), dtype=dtype)]
    for row in rows:
        if row is not None:
            weights = row.weights.to(dtype).broadcast_to(*lead, heads, len(row.names))
            packed.append(weights.flatten(0, -3).permute(2, 1, 0))
    return torch.cat(packed)
