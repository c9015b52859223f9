"""What crosses between the stages of a pipeline, and what each rank keeps: planned without a process group.

The L sublayers of a network are cut into C = P·V stages, V for each of P ranks. The state before a cut holds tensors
that were made long before it, such as the sums of earlier blocks. The naive transport sends all of them at every cut;
with the cache, a rank keeps what an earlier stage of its own has received or made, and only the others are sent.

Tensors of states are known by their numbers (`numbering`), from which the rest follows; no mechanism is named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch

from depthmix.mechanisms import DepthStack, KVStack
from depthmix.parallel.numbering import Meta, number_states
from depthmix.parallel.transport import Ids, Transport, route
from depthmix.support.checks import check_option, check_range

Placement: TypeAlias = Literal["loop", "v"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The stages of a pipeline and what they exchange; `make_plan` makes it. Bytes are those of one micro-batch.

    shape: leading shape of a micro-batch, such as (batch, tokens).
    dtype: dtype of the stream.
    bounds: the first sublayer of each stage, and L.
    rank_of: the rank of each stage.
    states: the numbers of the tensors in the state before each stage; empty before the first and after the last.
    tensors: shape and dtype of each numbered tensor.
    attention: sublayers with a value mixer, if the network has a `KVStack`.
    """

    name: str
    ranks: int
    placement: Placement
    shape: tuple[int, ...]
    dtype: torch.dtype
    bounds: tuple[int, ...]
    rank_of: tuple[int, ...]
    states: tuple[Ids, ...]
    tensors: tuple[Meta, ...]
    attention: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of stages C."""
        return len(self.rank_of)

    @property
    def virtual(self) -> int:
        """The number of stages of a rank, V."""
        return self.count // self.ranks

    @cached_property
    def cached(self) -> Transport:
        return route(self.states, self.rank_of, cache=True)

    @cached_property
    def naive(self) -> Transport:
        return route(self.states, self.rank_of, cache=False)

    def transport(self, cache: bool = True) -> Transport:
        return self.cached if cache else self.naive

    def nbytes(self, ids: Ids) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in (self.tensors[n] for n in ids))

    def hops(self, cache: bool = True) -> list[Ids]:
        """What stage s sends to stage s+1; nothing if both are on one rank. Gradients of the same travel back."""
        wire = self.transport(cache).wire
        return [() if self.rank_of[s] == self.rank_of[s + 1] else wire[s] for s in range(self.count - 1)]

    def sent_tensors(self, cache: bool = True) -> int:
        """Tensors sent per micro-batch, in each direction."""
        return sum(map(len, self.hops(cache)))

    def sent_bytes(self, cache: bool = True) -> int:
        """Bytes sent per micro-batch, in each direction."""
        return sum(map(self.nbytes, self.hops(cache)))

    def largest_hop(self, cache: bool = True) -> int:
        """Bytes of the largest hop."""
        return max(map(self.nbytes, self.hops(cache)), default=0)

    def stored_bytes(self, rank: int) -> int:
        """The most bytes that the rank's store holds of one micro-batch."""
        return max(map(self.nbytes, self.cached.stored(rank, self.rank_of)), default=0)

    def describe(self) -> str:
        """A table with a row for each stage, and the totals."""
        rows: list[tuple[str, ...]] = [
            ("stage", "rank", "sublayers", "takes", "keeps", "sends", "bytes", "naive", "bytes")
        ]
        hops = [*zip(self.hops(), self.hops(cache=False), strict=True), ((), ())]
        for s, (hop, naive) in enumerate(hops):
            span = f"{self.bounds[s]}-{self.bounds[s + 1] - 1}"
            kept = (len(self.cached.takes[s]), len(self.cached.keeps[s]))
            sends = (len(hop), self.nbytes(hop), len(naive), self.nbytes(naive))
            rows.append((*map(str, (s, self.rank_of[s])), span, *(f"{n:,}" for n in (*kept, *sends))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        totals = [
            f"{self.sent_tensors(cache)} tensors, {self.sent_bytes(cache):,} bytes (largest hop "
            f"{self.largest_hop(cache):,}) {words}"
            for cache, words in ((True, "with the cache"), (False, "without"))
        ]
        most = max(self.stored_bytes(rank) for rank in range(self.ranks))
        return "\n".join(
            [
                f"{self.name}: {self.bounds[-1]} sublayers, {self.ranks} ranks of {self.virtual}, "
                f"micro-batch {list(self.shape)} in {str(self.dtype).removeprefix('torch.')}",
                *lines,
                f"Per micro-batch and direction: {'; '.join(totals)}.",
                f"A rank stores up to {most:,} bytes of a micro-batch.",
            ]
        )


def make_plan(
    stack: DepthStack,
    *,
    shape: Sequence[int],
    ranks: int,
    virtual: int = 1,
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[int] | None = None,
    placement: Placement = "loop",
    values: KVStack | None = None,
    attention: Sequence[int] | None = None,
    kv_heads: int | None = None,
) -> Plan:
    """Cut a network into `ranks · virtual` stages and find what they exchange.

    Args:
        stack: the whole network's stack; its parameters may be on the meta device.
        shape: leading shape of one micro-batch: (batch, tokens), as in the stream [batch, tokens, dim].
        ranks: number of processes P.
        virtual: stages of each rank, V.
        dtype: dtype of the stream, which is that of the embedding.
        sizes: number of sublayers of each stage; by default as equal as possible.
        placement: the rank of each stage. "loop": 0 … P−1, again and again; "v": back and forth, for ZBVZeroBubble and
            DualPipeV.
        values: the network's value mixers, if it has any.
        attention: the sublayers in which `values` mix; by default those of kind "attn".
        kv_heads: number of key-value heads, needed with `values`.
    """
    if len(stack) != stack.depth:
        raise ValueError(f"the stack is a slice, sublayers {stack.lo} to {stack.hi - 1}; expected the whole stack")
    rank_of = place(ranks, virtual, placement)
    bounds = cut(stack.depth, len(rank_of), sizes)
    places = attention_places(stack, values, attention, kv_heads, shape)
    heads = () if values is None or kv_heads is None else (*shape[:-1], kv_heads, shape[-1], values.head_dim)
    states, tensors = number_states(stack, bounds, tuple(shape), dtype, values, places, heads)
    return Plan(
        name=stack.name,
        ranks=ranks,
        placement=placement,
        shape=tuple(shape),
        dtype=dtype,
        bounds=bounds,
        rank_of=rank_of,
        states=states,
        tensors=tensors,
        attention=places,
    )


def place(ranks: int, virtual: int, placement: Placement) -> tuple[int, ...]:
    """The rank of each stage."""
    check_option("placement", placement, Placement)
    for name, number in (("ranks", ranks), ("virtual", virtual)):
        check_option(name, number, int)
        check_range(name, number, 1)
    if placement == "v" and virtual != 2:
        raise ValueError(f"placement='v' with virtual={virtual}; expected virtual=2, as its schedules need, or 'loop'")
    lap = [*range(ranks)]
    return (*lap, *reversed(lap)) if placement == "v" else (*lap * virtual,)


def cut(depth: int, count: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The first sublayer of each stage, and the depth."""
    if count > depth:
        raise ValueError(
            f"{count} stages for {depth} sublayers; expected at most {depth} stages: each needs a sublayer. Use fewer "
            "ranks or a smaller virtual"
        )
    if sizes is None:
        return tuple(depth * s // count for s in range(count + 1))
    if len(sizes) != count or sum(sizes) != depth or min(sizes) < 1:
        raise ValueError(
            f"sizes={list(sizes)}; expected {count} numbers of at least 1 (ranks · virtual stages) that sum to {depth} "
            f"(they are {len(sizes)} and sum to {sum(sizes)})"
        )
    return tuple(sum(sizes[:s]) for s in range(count + 1))


def attention_places(
    stack: DepthStack,
    values: KVStack | None,
    attention: Sequence[int] | None,
    kv_heads: int | None,
    shape: Sequence[int],
) -> tuple[int, ...]:
    if values is None:
        if attention is not None or kv_heads is not None:
            raise ValueError("attention and kv_heads describe value mixers; give `values` too, or leave both out")
        return ()
    if kv_heads is None or len(shape) != 2:
        raise ValueError(
            f"values with kv_heads={kv_heads} and shape={list(shape)}; expected the number of key-value heads, and a "
            "shape (batch, tokens)"
        )
    places = tuple(m.site.index for m in stack if m.site.kind == "attn") if attention is None else tuple(attention)
    if len(places) != len(values) or sorted({*places}) != [*places] or not {*places} <= {*range(stack.depth)}:
        raise ValueError(
            f"attention={list(places)}; expected {len(values)} increasing indices of sublayers (0 to "
            f"{stack.depth - 1}), one for each of the value mixers"
        )
    return places
