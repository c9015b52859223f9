"""Rows of tokens in an order that depends only on the seed, for any number of ranks. Axes: B row, T token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthmix.data.shards import Tokens

ROUNDS = 8
RUN_LENGTH = 1024  # consecutive entries of a permutation that are computed at once


def shuffled(indices: np.ndarray, count: int, key: str) -> np.ndarray:
    """The values of a permutation of range(count) at `indices`: a Feistel network, which needs no array of `count`.

    Its domain is the next power of four; it is applied again to values outside the range until they are inside, which
    keeps it one-to-one. NumPy's permutations are not used, since the order of a run must not change with its version.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.frombuffer(hashlib.sha512(key.encode()).digest(), "<u8")
    sent = indices.astype(np.uint64)
    outside = np.ones(sent.shape, bool)
    while outside.any():
        left, right = sent[outside] >> half, sent[outside] & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (scrambled(right + keys[number]) & mask)
        sent[outside] = (left << half) | right
        outside = sent >= count
    return sent.astype(np.int64)


@lru_cache(maxsize=8)
def shuffled_run(number: int, count: int, key: str) -> list[int]:
    """The `number`-th run of RUN_LENGTH consecutive entries of a permutation."""
    return shuffled(np.arange(number * RUN_LENGTH, min((number + 1) * RUN_LENGTH, count)), count, key).tolist()


def scrambled(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def count_windows(tokens: Tokens | np.ndarray, tokens_per_row: int) -> int:
    """The number of rows in a text: neighbours share one token, so every token but the first is predicted once."""
    return max(len(tokens) - 1, 0) // tokens_per_row


def gather_rows(tokens: Tokens | np.ndarray, windows: list[int], tokens_per_row: int) -> Tensor:
    rows = np.empty((len(windows), tokens_per_row + 1), np.int64)
    for row, window in zip(rows, windows, strict=True):
        row[:] = tokens[window * tokens_per_row : (window + 1) * tokens_per_row + 1]
    return torch.from_numpy(rows)


class Batches:
    """An endless iterator of this rank's rows [B / ranks, T + 1]; all ranks together give the global batch [B, T + 1].

    Every window occurs once per epoch, in a new order each time; a batch may contain the end of one epoch and the start
    of the next.
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
            raise ValueError(f"tokens_per_row={tokens_per_row}, rows={rows}; expected at least 1 for each")
        if not 0 <= rank < ranks or rows % ranks:
            raise ValueError(
                f"rows={rows}, rank={rank}, ranks={ranks}; expected rows divisible by ranks, and 0 <= rank < ranks"
            )
        self.tokens, self.tokens_per_row, self.rows = tokens, tokens_per_row, rows
        self.rank, self.ranks, self.seed = rank, ranks, seed
        self.windows = count_windows(tokens, tokens_per_row)
        if self.windows < rows:
            raise ValueError(
                f"{len(tokens):,} training tokens give {self.windows} rows of {tokens_per_row}; expected at least "
                f"{rows}, one batch: use more text, shorter rows or fewer rows per batch"
            )
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        share = self.rows // self.ranks
        first = self.position + self.rank * share
        chosen = []
        for position in range(first, first + share):
            ahead, index = divmod(position, self.windows)
            run = shuffled_run(index // RUN_LENGTH, self.windows, f"{self.seed} {self.epoch + ahead}")
            chosen.append(run[index % RUN_LENGTH])
        ahead, self.position = divmod(self.position + self.rows, self.windows)
        self.epoch += ahead
        return gather_rows(self.tokens, chosen, self.tokens_per_row)

    def state(self) -> dict[str, int]:
        """The position of the next batch, the same on every rank."""
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
                    f"the saved position is for data with {name}={state[name]}, but here it is {getattr(self, name)}; "
                    "expected the same tokens and tokens_per_row"
                )
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]


def validation_batches(
    tokens: Tokens | np.ndarray, tokens_per_row: int, rows: int, limit: int | None = None
) -> Iterator[Tensor]:
    """The same `limit` batches every time, spread over all validation tokens; None or 0: all. The last may be short."""
    count = count_windows(tokens, tokens_per_row)
    if count == 0:
        raise ValueError(
            f"{len(tokens):,} validation tokens are fewer than one row of {tokens_per_row} + 1; use more text, a "
            "larger validation share or shorter rows"
        )
    end = min(count, limit * rows) if limit else count
    batches = (np.arange(start, min(start + rows, end)) for start in range(0, end, rows))
    return (gather_rows(tokens, shuffled(batch, count, "validation").tolist(), tokens_per_row) for batch in batches)
