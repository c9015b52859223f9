"""What rows read, as shares: of the weights, and of the read itself.

Axes: B row of text, T token, n = L + 1 rows and sources, N attention layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from depthmix.analysis.structure import shares
from depthmix.analysis.surveyor import Surveyor

Edge = tuple[int, int]  # row, source


@dataclass
class Shares:
    """Means over tokens; rows of each sum to 1.

    mass: [n, n]: |M| over its row's sum; where sources are multiplied by matrices, mean norms of what they add.
    cosine: [n, n]: what a source adds to a read, along the read: <contribution, h> / |h|^2. It may be negative.
    values: [N, N]: the mass of the mixing of values; None where no attention mixes values over depth.
    """

    mass: Tensor
    cosine: Tensor
    values: Tensor | None

    @property
    def values_readable(self) -> list[set[int]]:
        """For each attention layer, those whose raw values it holds."""
        table = torch.zeros(0, 0) if self.values is None else self.values
        return [set(row.nonzero().flatten().tolist()) for row in table]

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
    """Of all tokens [B, T], in constant memory. Expects a model in evaluation mode."""
    surveyor = Surveyor(model, table=0, ranked=0, gradient_tokens=0, mass=True)
    for part in surveyor.passes([tokens]):
        surveyor.add(part)
    tally = surveyor.tally
    assert tally.mass is not None
    added, cosine = (tally.entries.table(sums / tally.tokens).cpu() for sums in (tally.contribution, tally.cosine))
    mass = shares(added) if tally.kind == "operator" else tally.entries.table(tally.mass / tally.tokens).cpu()
    values = None if surveyor.values is None else shares(surveyor.values.cpu()).mean(0)
    return Shares(mass, cosine, values)
