"""Quantiles of many quantities over any number of tokens, from counts in fixed bins.

The bins of a sign are evenly spaced in the logarithm of the magnitude, from SMALLEST to LARGEST; one bin around zero
holds all that is smaller, and the outermost bins hold all that is larger. Counts do not depend on the order in which
values come, nor on how they are divided into chunks.

Axes: E quantity, N token, K bin, Q quantile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST, LARGEST = 1e-4, 1e4
BINS_PER_DECADE = 32
MOST_BYTES = 1 << 28  # of counts; more quantities than fit get coarser bins
ROUNDING = 1e-4  # the logarithm of a value near an edge is rounded: its bin may be the neighbour


class Histogram:
    """Counts of E quantities.

    relative_error: largest error of a quantile between SMALLEST and LARGEST in magnitude, over the true value.
    absolute_error: largest error of a quantile that is smaller.
    """

    def __init__(self, quantities: int, device: torch.device | str = "cpu") -> None:
        decades = math.log10(LARGEST / SMALLEST)
        self.per_decade = BINS_PER_DECADE
        while self.per_decade > 4 and quantities * (2 * decades * self.per_decade + 1) * 8 > MOST_BYTES:
            self.per_decade //= 2
        self.side = round(decades * self.per_decade)  # bins of one sign
        self.bins = 2 * self.side + 1
        self.counts = torch.zeros(quantities, self.bins, dtype=torch.int64, device=device)

    @property
    def relative_error(self) -> float:
        return round(10 ** (0.5 / self.per_decade) - 1 + ROUNDING, 4)

    @property
    def absolute_error(self) -> float:
        return SMALLEST * (1 + ROUNDING)

    def add(self, values: Tensor, first: int = 0) -> None:
        """Count values [E', N] of the quantities `first` to `first` + E' − 1. NaN counts as 0."""
        kept = values.float().nan_to_num()
        steps = kept.abs().log2_().mul_(self.per_decade * math.log10(2))
        steps = steps.add_(1 - self.per_decade * math.log10(SMALLEST)).clamp_(0, self.side)
        bins = steps.long().mul_(kept.sign().long())  # −side … side, 0 around zero
        bins += (torch.arange(first, first + len(values), device=values.device) * self.bins + self.side).unsqueeze(-1)
        one = self.counts.new_ones(()).expand(bins.numel())
        self.counts.view(-1).index_add_(0, bins.flatten(), one)

    def quantiles(self, shares: Sequence[float]) -> Tensor:
        """[Q, E]: the centre of the bin of each value that at least a share q of the values does not exceed.

        It is the smallest such value: the one of rank ⌈q · N⌉ in rising order, without interpolation.
        """
        below = self.counts.cumsum(-1)
        total = below[:, -1:]
        ranks = [(q * total.double()).ceil().long().clamp(min=1) for q in shares]
        found = [torch.searchsorted(below, rank).squeeze(-1) for rank in ranks]
        return self.centres()[torch.stack(found)]

    def centres(self) -> Tensor:
        """[K]: the centre of each bin, in rising order: geometric, so that the relative error is even."""
        exponents = torch.arange(self.side, dtype=torch.float64, device=self.counts.device) + 0.5
        positive = SMALLEST * 10 ** (exponents / self.per_decade)
        return torch.cat([-positive.flip(0), positive.new_zeros(1), positive])
