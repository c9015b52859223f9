"""Rows of tokens in an order that only the seed decides, for any number of ranks. Axes: B row, T token."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROUNDS = 8
RUN = 1024  # windows whose place is computed at once


class Tokens:
    """Ids of one side: its shards as one array, of which a slice is read at a time."""

    def __init__(self, paths: list[Path], dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        sizes = [path.stat().st_size // self.dtype.itemsize for path in paths]
        self.parts = [np.asarray(np.memmap(p, self.dtype, "r")) for p, size in zip(paths, sizes, strict=True) if size]
        self.ends = list(accumulate((len(part) for part in self.parts), initial=0))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, wanted: slice) -> np.ndarray:
        start, stop, step = wanted.indices(len(self))
        if step != 1:
            raise ValueError(f"step {step}; expected a slice of neighbours")
        first = bisect_right(self.ends, start) - 1
        found = []
        while start < stop:
            end = min(stop, self.ends[first + 1])
            found.append(self.parts[first][start - self.ends[first] : end - self.ends[first]])
            start, first = end, first + 1
        return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0, self.dtype)])


def shuffled(indices: np.ndarray, count: int, key: str) -> np.ndarray:
    """Where a permutation of range(count) sends `indices`: a Feistel network, so nothing as long as `count` is held.

    Its domain is the next power of four; what falls outside is sent on until it is inside, which keeps it one-to-one.
    Our own, since an order that a run was trained with must not change with a version of NumPy.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.frombuffer(hashlib.sha512(key.encode()).digest(), "<u8")
    found = indices.astype(np.uint64)
    outside = np.ones(found.shape, bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (scrambled(right + keys[number]) & mask)
        found[outside] = (left << half) | right
        outside = found >= count
    return found.astype(np.int64)


@lru_cache(maxsize=8)
def run(number: int, count: int, key: str) -> list[int]:
    """The `number`-th run of neighbours of a permutation."""
    return shuffled(np.arange(number * RUN, min((number + 1) * RUN, count)), count, key).tolist()


def scrambled(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def windows(tokens: Tokens | np.ndarray, tokens_per_row: int) -> int:
    """Rows that a text has: neighbours share one token, so every token but the first is predicted once."""
    return max(len(tokens) - 1, 0) // tokens_per_row


def gather(tokens: Tokens | np.ndarray, chosen: list[int], tokens_per_row: int) -> Tensor:
    rows = np.empty((len(chosen), tokens_per_row + 1), np.int64)
    for row, window in zip(rows, chosen, strict=True):
        row[:] = tokens[window * tokens_per_row : (window + 1) * tokens_per_row + 1]
    return torch.from_numpy(rows)


class Batches:
    """Endless rows [B / ranks, T + 1] of this rank; the ranks' rows one after another are the global batch [B, T + 1].

    Every window comes once an epoch, in a new order each time; a batch may hold the end of one epoch and the start of
    the next.
    """

    def __init__(
        self,
        tokens: Tokens | np.ndarray,
        *,
        tokens_per_row: int,
        rows: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if tokens_per_row < 1 or rows < 1:
            raise ValueError(f"tokens_per_row={tokens_per_row}, rows={rows}; expected at least 1 of each")
        if not 0 <= rank < ranks or rows % ranks:
            raise ValueError(f"rows={rows}, rank={rank}, ranks={ranks}; expected rows that the ranks share evenly")
        self.tokens, self.tokens_per_row, self.rows = tokens, tokens_per_row, rows
        self.rank, self.ranks, self.seed = rank, ranks, seed
        self.windows = windows(tokens, tokens_per_row)
        if self.windows < rows:
            raise ValueError(
                f"{len(tokens):,} training tokens are {self.windows} rows of {tokens_per_row}; expected at least one "
                f"batch of {rows}: give more text, shorter rows or fewer of them"
            )
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        share = self.rows // self.ranks
        first = self.position + self.rank * share
        chosen = []
        for at in range(first, first + share):
            ahead, index = divmod(at, self.windows)
            chosen.append(run(index // RUN, self.windows, f"{self.seed} {self.epoch + ahead}")[index % RUN])
        ahead, self.position = divmod(self.position + self.rows, self.windows)
        self.epoch += ahead
        return gather(self.tokens, chosen, self.tokens_per_row)

    def state(self) -> dict[str, int]:
        """The place of the next batch, the same on every rank."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "windows": self.windows,
            "tokens_per_row": self.tokens_per_row,
        }

    def restore(self, state: dict[str, Any]) -> None:
        for name in ("windows", "tokens_per_row"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the saved place is in data with {name}={state[name]}, here it is {getattr(self, name)}; expected "
                    "the same tokens and length of rows"
                )
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]


def validation_batches(
    tokens: Tokens | np.ndarray, tokens_per_row: int, rows: int, limit: int | None = None
) -> Iterator[Tensor]:
    """The same `limit` batches every time, spread over the whole side; None or 0: all of it. The last may be short."""
    count = windows(tokens, tokens_per_row)
    if count == 0:
        raise ValueError(
            f"{len(tokens):,} validation tokens are less than one row of {tokens_per_row} + 1; expected more text, a "
            "larger validation share or shorter rows"
        )
    end = min(count, limit * rows) if limit else count
    return (
        gather(tokens, shuffled(np.arange(start, min(start + rows, end)), count, "validation").tolist(), tokens_per_row)
        for start in range(0, end, rows)
    )
