"""What rows read, as shares: of the weights, and of the read itself.

Axes: ... token, G group of channels, D channel, n = L + 1 rows and sources, K key-value head, N attention layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.analysis.structure import shares
from depthmix.analysis.trace import trace

Edge = tuple[int, int]  # row, source


@dataclass
class Shares:
    """Means over tokens; rows of each sum to 1.

    mass: [n, n]: |M| (where sources are multiplied by matrices, the norms of what they add) over its row's sum.
    cosine: [n, n]: what a source adds to a read, along the read: <contribution, h> / |h|^2. It may be negative.
    values: [N, N]: the mass of the mixing of values; None where no attention mixes values over depth.
    """

    mass: Tensor
    cosine: Tensor
    values: Tensor | None

    def mass_of(self, edges: Iterable[Edge], *, values: bool = False) -> float:
        """The share that these edges have in their rows, the mean over these rows."""
        table = self.values if values else self.mass
        assert table is not None
        found = list(edges)
        return sum(float(table[edge]) for edge in found) / len({row for row, _ in found})

    def strongest(self, most: int) -> list[Edge]:
        """The edges with the largest share of their read, largest first; rows that read one source are left out."""
        return strongest_edges(self.cosine, most)

    def strongest_values(self, most: int) -> list[Edge]:
        return [] if self.values is None else strongest_edges(self.values.tril(-1), most)


def strongest_edges(table: Tensor, most: int) -> list[Edge]:
    edges = [(row, source) for row in range(1, len(table)) for source in range(row + 1)]
    ranked = sorted(edges, key=lambda edge: -abs(float(table[edge])))
    return [edge for edge in ranked if float(table[edge])][:most]


@torch.no_grad()
def shares_read(model: nn.Module, tokens: Tensor) -> Shares:
    """From one traced pass."""
    traced = trace(model, tokens)
    rows = range(len(traced.inputs))
    parts = [(ops.wide(traced.contributions(r)), ops.wide(traced.inputs[r])) for r in rows]
    cosine = torch.stack([mean(cosine_shares(part, h)) for part, h in parts])
    if traced.kind == "operator":
        norms = [part.norm(dim=-1) for part, _ in parts]
        mass = torch.stack([mean(norm / norm.sum(0).clamp(min=TINY)) for norm in norms])
    else:
        mass = shares(traced.M).flatten(0, -3).mean(0)
    values = None if traced.values is None else shares(traced.values).flatten(0, -3).mean(0)
    return Shares(mass.double().cpu(), cosine.double().cpu(), None if values is None else values.double().cpu())


TINY = 1e-30


def cosine_shares(contributions: Tensor, h: Tensor) -> Tensor:
    """[n, ...] from contributions [n, ..., D] to h [..., D]; they sum to 1 where h is not zero."""
    return (contributions * h).sum(-1) / h.square().sum(-1).clamp(min=TINY)


def mean(values: Tensor) -> Tensor:
    """Over tokens, of [n, ...]."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values
