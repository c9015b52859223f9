"""Shards: the tokens of one split in files of little-endian ids, written one after another and read as one array.

Every document is followed by a separator. It counts as one byte of text, so that a byte model has exactly one byte per
token, and bits per byte include the cost of predicting the end of a document.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from depthmix.data.sources import Piece
from depthmix.data.tokenizers import BatchTokenizer
from depthmix.support.files import flush

SHARD_BYTES = 64 << 20  # maximum size of a shard
GROUP_BYTES = 1 << 20  # bytes of text that are encoded at once


class Tokens:
    """The ids of one split: its shards as one array, from which slices are read."""

    def __init__(self, paths: list[Path], dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        sizes = [path.stat().st_size // self.dtype.itemsize for path in paths]
        self.shards = [np.asarray(np.memmap(p, self.dtype, "r")) for p, size in zip(paths, sizes, strict=True) if size]
        self.ends = list(accumulate((len(shard) for shard in self.shards), initial=0))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, wanted: slice) -> np.ndarray:
        start, stop, step = wanted.indices(len(self))
        if step != 1:
            raise ValueError(f"step {step}; expected a slice with step 1")
        shard = bisect_right(self.ends, start) - 1
        parts = []
        while start < stop:
            end = min(stop, self.ends[shard + 1])
            parts.append(self.shards[shard][start - self.ends[shard] : end - self.ends[shard]])
            start, shard = end, shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, self.dtype)])


@dataclass
class Count:
    documents: int = 0
    tokens: int = 0
    bytes: int = 0


class Writer:
    """Writes the tokens of one split in shards of at most `limit` bytes."""

    def __init__(self, folder: Path, name: str, dtype: str, limit: int) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype
        self.limit = limit - limit % np.dtype(dtype).itemsize
        self.count = Count()
        self.shards: list[dict[str, Any]] = []
        self.file: Any = None
        self.open_next()

    def open_next(self) -> None:
        self.path = self.folder / f"{self.name}-{len(self.shards):05d}.bin"
        self.file, self.room, self.hash = self.path.open("wb"), self.limit, hashlib.sha256()

    def add(self, ids: np.ndarray) -> None:
        data = memoryview(np.ascontiguousarray(ids, self.dtype).tobytes())
        self.count.tokens += len(ids)
        while len(data) > self.room:
            room = self.room
            self.write(data[:room])
            data = data[room:]
            self.close()
            self.open_next()
        self.write(data)

    def write(self, data: memoryview) -> None:
        with self.disk_errors():
            self.file.write(data)
        self.hash.update(data)
        self.room -= len(data)

    def close(self) -> None:
        with self.disk_errors():
            self.file.close()
        flush(self.path)
        self.shards.append({"file": self.path.name, "bytes": self.limit - self.room, "sha256": self.hash.hexdigest()})

    def abandon(self) -> None:
        self.file.close()

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Add the name of the file to an error such as a full disk."""
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno, f"{os.strerror(error.errno or 0)}; no partial data is kept", str(self.path)
            ) from error

    def manifest(self) -> dict[str, Any]:
        """Counts, and the name, size and hash of every shard."""
        return {**vars(self.count), "shards": self.shards}


def write_shards(
    pieces: Iterable[Piece], tokenizer: BatchTokenizer, bound: float, train: Writer, validation: Writer
) -> None:
    """Write documents with a split value below `bound` to `validation`, the others to `train`."""
    for group in grouped(pieces):
        for piece, ids in zip(group, tokenizer.encode_batch([piece.data for piece in group]), strict=True):
            writer = validation if piece.split_value < bound else train
            writer.add(ids)
            writer.count.bytes += len(piece.data)
            if piece.last:
                writer.count.documents += 1
                if tokenizer.separator is not None:
                    writer.add(np.array([tokenizer.separator]))
                    writer.count.bytes += 1


def grouped(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups of pieces that are encoded together, of about GROUP_BYTES each."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.data)
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    yield group
