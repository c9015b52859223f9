"""Running means and deviations over tokens, and the entries of a triangular table in one list.

Sums are in float64, and chunks are combined by their counts: how the tokens are divided changes nothing but rounding.

Axes: E entry, N token, R row, C column.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Moments:
    """Mean and standard deviation of quantities [...], over values [..., N] that come in chunks."""

    def __init__(self, *shape: int, device: torch.device | str = "cpu") -> None:
        self.mean = torch.zeros(shape, dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.mean)  # sums of squared deviations from the mean

    def add(self, values: Tensor, before: int, part: slice = slice(None)) -> None:
        """Add values to the quantities in `part`, which have `before` values so far."""
        values = values.double()
        number = values.shape[-1]
        mean = values.mean(-1)
        squares = (values - mean.unsqueeze(-1)).square_().sum(-1)
        difference = mean - self.mean[part]
        self.mean[part] += difference * (number / (before + number))
        self.squares[part] += squares + difference.square() * (before * number / (before + number))

    def deviation(self, count: int) -> Tensor:
        return (self.squares / count).sqrt()


class Entries:
    """The entries (row, column) that the rows of a table can fill, packed row by row.

    reads: the columns of each row, in order; the last is the newest source.
    """

    def __init__(self, reads: Sequence[Sequence[int]], columns: int, device: torch.device | str = "cpu") -> None:
        self.reads, self.shape = [list(row) for row in reads], (len(reads), columns)
        self.starts = [0]
        for row in self.reads:
            self.starts.append(self.starts[-1] + len(row))
        self.rows = torch.tensor([r for r, row in enumerate(self.reads) for _ in row], device=device)
        self.columns = torch.tensor([c for row in self.reads for c in row], device=device)

    def __len__(self) -> int:
        return self.starts[-1]

    def part(self, first: int, last: int) -> slice:
        """The entries of rows `first` to `last` − 1."""
        return slice(self.starts[first], self.starts[last])

    def row_sums(self, packed: Tensor, first: int, last: int) -> Tensor:
        """[R, ...]: sums over the entries of each of these rows; `packed` [E, ...] holds their entries only."""
        rows = self.rows[self.part(first, last)] - first
        return packed.new_zeros(last - first, *packed.shape[1:]).index_add_(0, rows, packed)

    def table(self, packed: Tensor) -> Tensor:
        """[..., R, C] from [E, ...]; other entries are 0."""
        table = packed.new_zeros(*self.shape, *packed.shape[1:])
        table[self.rows, self.columns] = packed
        return table.movedim((0, 1), (-2, -1))


def triangle(n: int, device: torch.device | str = "cpu") -> Entries:
    """Those of M: row r can read the columns 0 to r."""
    return Entries([range(row + 1) for row in range(n)], n, device)
