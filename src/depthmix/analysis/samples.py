"""Tokens that a survey keeps: the first of the text, the first rows, and a sample that is evenly spread over a text.

Axes: B row of text, T token, E entry of M or of the weights, G group of channels, H head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.analysis.magnitudes import Magnitudes, measuring
from depthmix.analysis.passes import mean_loss
from depthmix.mechanisms import DepthStack


class FirstTokens:
    """The first `count` tokens: their ids and losses, and the entries [E, G] and [E, H] of their tables."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.ids: list[int] = []
        self.losses: list[float | None] = []
        self.M: list[Tensor] = []
        self.weights: list[Tensor] = []

    def wanted(self, start: int, number: int) -> Iterable[int]:
        """Of the positions `start` to `start` + `number` − 1, those that are kept."""
        return range(start, min(start + number, self.count))

    def append(self, token: int, loss: float | None, M: Tensor, weights: Tensor | None) -> None:
        """Add the next one; without a loss where no token comes before it in its row."""
        self.ids.append(token)
        self.losses.append(loss)
        self.M.append(M)
        self.weights += [] if weights is None else [weights]

    def figures(self, decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
        texts = [str(token) if decode is None else decode([token]) for token in self.ids]
        return {"ids": self.ids, "tokens": texts, "loss": self.losses}


class SpreadTokens:
    """At most `limit` tokens of a text of unknown length, evenly spread: those at the multiples of a distance.

    The distance doubles when there are more.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.distance = limit, 1
        self.kept: dict[int, Tensor] = {}  # entries of M [E, G] by position

    def wanted(self, start: int, number: int) -> Iterable[int]:
        """Of the positions `start` to `start` + `number` − 1, those that remain after all of them are offered."""
        if not self.limit:
            return ()
        last, distance = start + number - 1, self.distance
        while last // distance + 1 > self.limit:
            distance *= 2
        return range(-(-start // distance) * distance, last + 1, distance)

    def offer(self, position: int, M: Tensor) -> None:
        """Positions come in rising order."""
        if not self.limit or position % self.distance:
            return
        self.kept[position] = M
        while len(self.kept) > self.limit:
            self.distance *= 2
            self.kept = {p: kept for p, kept in self.kept.items() if p % self.distance == 0}


class FirstRows:
    """The first rows of the text, about `limit` tokens, on which norms and gradients are measured."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rows: list[Tensor] = []  # of equal length

    def offer(self, tokens: Tensor) -> None:
        """Rows [B, T] in the order of the text; a row is cut at the limit."""
        for row in tokens[:, : self.limit] if self.limit else ():
            fits = not self.rows or (len(row) == len(self.rows[0]) and len(row) * (len(self.rows) + 1) <= self.limit)
            if not fits:
                return
            self.rows.append(row)

    def measure(self, model: nn.Module, stack: DepthStack) -> tuple[Magnitudes | None, int]:
        """Norms over depth and those of the loss's gradients, and the number of tokens they come from."""
        if not self.rows:
            return None, 0
        tokens = torch.stack(self.rows)
        with torch.enable_grad(), measuring(stack) as measured:
            loss = mean_loss(model, tokens)
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.backward()
        return measured, tokens.numel()
