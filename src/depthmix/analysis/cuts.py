"""Which routes to cut: an embedding, recent and older sources, a block's own partial sum, single sources and edges.

Rows and sources are those of M, n = L + 1 of each: row r belongs to sublayer r + 1, the last one to the head; source 0
is the embedding, source i the output of sublayer i.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from depthmix.analysis.routes import Columns
from depthmix.mechanisms import DepthStack
from depthmix.support.checks import did_you_mean
from depthmix.support.files import seed_of

CutKind = Literal["family", "source", "route", "value"]
FEWEST_SOURCES = 4  # of a row in which families are cut
FAMILIES = ("embedding", "recent", "older", "partial")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Edges that are cut together.

    edges: pairs (row, source); for kind "value" pairs of attention layers.
    """

    name: str
    kind: CutKind
    edges: frozenset[tuple[int, int]]

    def scale(self, n: int) -> Tensor:
        """[n, n]: 0 at the edges, 1 elsewhere, for `editing`."""
        scale = torch.ones(n, n)
        for row, source in self.edges:
            scale[row, source] = 0
        return scale

    def shuffled(self, seed: int, control: int, readable: Sequence[Collection[int]]) -> Cut:
        """A random cut with as many of the edges that exist in each row: other ones where there is a choice of them,
        else any. `readable` has the sources of each row."""
        generator = torch.Generator().manual_seed(seed_of(seed, self.name, control))
        edges = set()
        for row in sorted({row for row, _ in self.edges}):
            own = {i for r, i in self.edges if r == row}
            others = sorted(set(readable[row]) - own)
            pool = others if len(others) > len(own) else sorted(readable[row])
            chosen = torch.randperm(len(pool), generator=generator)[: len(own)].tolist()
            edges |= {(row, pool[k]) for k in chosen}
        return Cut(name=f"{self.name}, control {control + 1}", kind=self.kind, edges=frozenset(edges))


def families(stack: DepthStack, columns: Columns | None = None) -> list[Cut]:
    """The families of sources that this mechanism's rows have, in rows of at least `FEWEST_SOURCES` (in a shallow
    network, of at least two): with fewer, random cuts have no choice and meet the few early outputs each time.

    embedding: v_0. partial: what stands behind the running sum of a row's own block, where a mechanism has blocks.
    recent: the newest output otherwise. older: all the rest.
    """
    edges: dict[str, set[tuple[int, int]]] = {name: set() for name in FAMILIES}
    columns = Columns(stack) if columns is None else columns
    fewest = min(FEWEST_SOURCES, max(map(len, columns.readable)))
    for row in (r for r, sources in enumerate(columns.readable) if len(sources) >= fewest):
        members = columns.members[row]
        growing = members[-1] if members and columns.partial[row] else set()
        for source in columns.readable[row]:
            newest = "older" if growing or source < row else "recent"
            name = "embedding" if source == 0 else "partial" if source in growing else newest
            edges[name].add((row, source))
    return [Cut(name=name, kind="family", edges=frozenset(found)) for name, found in edges.items() if found]


def source_cut(index: int, readable: Sequence[Collection[int]]) -> Cut:
    """All edges of one source, but in rows that read nothing else: there nothing would be left to read."""
    edges = {(row, index) for row, sources in enumerate(readable) if index in sources and len(sources) > 1}
    return Cut(name=f"source {index}", kind="source", edges=frozenset(edges))


def route_cut(row: int, source: int) -> Cut:
    """One edge: from source i to row r, named by the sublayer that reads."""
    return Cut(name=route_name(row, source), kind="route", edges=frozenset({(row, source)}))


def route_name(row: int, source: int) -> str:
    return f"route {source}→{row + 1}"


def value_cut(row: int, source: int) -> Cut:
    """One edge between attention layers (counted from 1 in the name) where values are mixed over depth."""
    return Cut(name=f"value {source + 1}→{row + 1}", kind="value", edges=frozenset({(row, source)}))


def parse_cut(text: str, stack: DepthStack, attention_layers: int = 0) -> Cut:
    """ "embedding", "source 3", "route 2→7" (also "2->7"), "value 1→4"."""
    words = text.strip().lower()
    columns = Columns(stack)
    known = {cut.name: cut for cut in families(stack, columns)}
    if words in known:
        return known[words]
    if match := re.fullmatch(r"(?:source\s*)?(\d+)", words):
        index = int(match[1])
        if index <= stack.depth:
            return source_cut(index, columns.readable)
        raise ValueError(f"cut {text!r}: there is no source {index}; expected 0 (the embedding) to {stack.depth}")
    if match := re.fullmatch(r"(route|value)?\s*(\d+|embedding)\s*(?:→|->)\s*(\d+|head)", words):
        source = 0 if match[2] == "embedding" else int(match[2])
        reader = stack.depth + 1 if match[3] == "head" else int(match[3])
        if match[1] == "value":
            if not attention_layers:
                raise ValueError(f"cut {text!r}: this model does not mix values over depth; expected a route A→B")
            if 1 <= source <= reader <= attention_layers:
                return value_cut(reader - 1, source - 1)
            raise ValueError(f"cut {text!r}; expected value A→B with attention layers 1 ≤ A ≤ B ≤ {attention_layers}")
        if 0 <= source < reader <= stack.depth + 1:
            return route_cut(reader - 1, source)
        raise ValueError(
            f"cut {text!r}; expected A→B with 0 ≤ A < B ≤ {stack.depth + 1}: from the output of sublayer A (0 is the "
            f"embedding) to sublayer B ({stack.depth + 1} is the head)"
        )
    raise ValueError(
        f"cut {text!r} is unknown. {did_you_mean(words, known)}Expected {', '.join(known)}, source N, or a route A→B"
    )


def default_cuts(
    stack: DepthStack, routes: Sequence[tuple[int, int]], values: Sequence[tuple[int, int]] = ()
) -> list[Cut]:
    """Families, every source, and the given edges (row, source) of M and of the mixing of values."""
    columns = Columns(stack)
    sources = [source_cut(i, columns.readable) for i in range(stack.depth + 1)]
    edges = [*(route_cut(*edge) for edge in routes), *(value_cut(*edge) for edge in values)]
    return [*families(stack, columns), *(cut for cut in sources if cut.edges), *edges]
