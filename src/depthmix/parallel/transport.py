"""Which tensors of a state a stage sends, takes from its rank's store and keeps there, from their numbers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Ids: TypeAlias = tuple[int, ...]  # numbers of tensors


@dataclass(frozen=True)
class Transport:
    """For each stage, numbers of tensors.

    wire: what the stage hands to the next one, over the wire or inside the rank.
    takes: what of its state it finds in the store of its rank.
    keeps: what it puts there, as the first stage of its rank that has it, for a later one that takes it.
    """

    wire: tuple[Ids, ...]
    takes: tuple[Ids, ...]
    keeps: tuple[Ids, ...]

    def readers(self, rank: int, rank_of: Sequence[int]) -> Counter[int]:
        """How many stages of the rank take each tensor."""
        return Counter(n for s, ids in enumerate(self.takes) if rank_of[s] == rank for n in ids)

    def stored(self, rank: int, rank_of: Sequence[int]) -> list[Ids]:
        """What the store of a rank holds of one micro-batch after each of its stages has run forward."""
        waiting, held, after = self.readers(rank, rank_of), set[int](), []
        for s in (s for s, r in enumerate(rank_of) if r == rank):
            waiting.subtract(self.takes[s])
            held = {n for n in (*held, *self.keeps[s]) if waiting[n] > 0}
            after.append(tuple(sorted(held)))
        return after


def route(states: Sequence[Ids], rank_of: Sequence[int], *, cache: bool) -> Transport:
    """`states` are those before each stage, and an empty one after the last."""
    count = len(rank_of)
    held: dict[int, dict[int, int]] = {rank: {} for rank in rank_of}  # rank -> tensor -> its first stage there
    wire: list[Ids] = []
    takes: list[Ids] = []
    keeps: list[list[int]] = [[] for _ in rank_of]
    for s, rank in enumerate(rank_of):
        here, entering, leaving = held[rank], dict.fromkeys(states[s]), dict.fromkeys(states[s + 1])
        handed_over = s > 0 and rank_of[s - 1] == rank  # torch passes all of it inside the rank
        takes.append(tuple(n for n in entering if n in here) if cache and not handed_over else ())
        for n in takes[s]:
            if n not in keeps[here[n]]:
                keeps[here[n]].append(n)
        for n in (*entering, *leaving):
            here.setdefault(n, s)
        known = held[rank_of[s + 1]] if cache and s + 1 < count and rank_of[s + 1] != rank else {}
        wire.append(tuple(n for n in leaving if n not in known))
    return Transport(tuple(wire), tuple(takes), tuple(tuple(ids) for ids in keeps))
