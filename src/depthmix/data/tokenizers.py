"""Pieces of text to tokens, and tokens to shards.

After every document comes a separator. Of byte tokens it is the byte 0, which no text holds: 256 ids are then enough,
and `depthmix generate` reads such a model without a tokenizer. A separator counts as one byte of text, so that a byte
model has exactly one byte a token, and bits per byte include the price of an end.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from depthmix.data.sources import Piece, package
from depthmix.inference.text import FileTokenizer
from depthmix.support.checks import user_path
from depthmix.support.files import digest, flush

SHARD = 64 << 20  # bytes, at most
GROUP = 1 << 20  # bytes of text that are encoded at once
FILE = "tokenizer.json"
EXTRA = "'depthmix[train]'"
END = "<|endoftext|>"
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")  # of ready tokenizers, the first that is there


class Encoder(Protocol):
    size: int
    separator: int | None

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """The ids of each text."""


class Bytes:
    size: int = 256
    separator: int | None = 0

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]


class FromFile:
    """A `tokenizer.json`: text without the special tokens that it puts around a prompt."""

    def __init__(self, path: Path) -> None:
        file = FileTokenizer(path)
        self.inner, self.size = file.inner, file.size
        vocabulary = self.inner.get_vocab()
        self.separator: int | None = next((vocabulary[name] for name in ENDS if name in vocabulary), None)

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        found = self.inner.encode_batch([text.decode("utf-8", "replace") for text in texts], add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in found]


def count_ids(path: Path) -> int:
    """How many ids a tokenizer.json may give, without the package that reads it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        words = found["model"]["vocab"]  # a list of pairs for Unigram models
        ids = [*(words.values() if isinstance(words, dict) else range(len(words)))]
        return int(max(ids + [token["id"] for token in found["added_tokens"]])) + 1
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged or no tokenizer ({type(error).__name__}: {error}). Choose another"
        ) from error


def full_name(tokenizer: str) -> str:
    """`bytes`, `bpe:SIZE`, or a file's by its content."""
    if tokenizer == "bytes":
        return tokenizer
    if tokenizer.startswith("bpe:"):
        size = int(tokenizer[4:]) if re.fullmatch(r"bpe:\d+", tokenizer) else 0
        if size < 257:
            raise ValueError(f"tokenizer={tokenizer!r}; expected bpe:SIZE of at least 257, the bytes and the separator")
        return f"bpe:{size}"
    path = user_path(tokenizer)
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer {tokenizer!r}; expected bytes, bpe:4096 or the path of a tokenizer.json")
    return f"file:{digest(path)[:16]}"


def make_encoder(tokenizer: str, folder: Path, texts: Iterator[Piece]) -> Encoder:
    """Bytes; or what is put into `folder`: a copy of a file, or a BPE trained on `texts`."""
    if tokenizer == "bytes":
        return Bytes()
    if tokenizer.startswith("bpe:"):
        print(f"training {tokenizer}", file=sys.stderr, flush=True)
        train_bpe(int(tokenizer[4:]), texts, folder / FILE)
    else:
        shutil.copyfile(user_path(tokenizer), folder / FILE)
    flush(folder / FILE)
    return FromFile(folder / FILE)


def train_bpe(size: int, texts: Iterator[Piece], path: Path) -> None:
    """Over bytes, so that every text has ids; a small corpus may give fewer than `size`."""
    hf = package("tokenizers", f"bpe:{size}", EXTRA)
    inner = hf.Tokenizer(hf.models.BPE())
    inner.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((piece.data.decode("utf-8", "replace") for piece in texts), trainer)
    inner.save(str(path))


@dataclass
class Count:
    documents: int = 0
    tokens: int = 0
    bytes: int = 0


class Writer:
    """One side's tokens, in shards of at most `limit` bytes."""

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
        try:
            self.file.write(data)
        except OSError as error:
            raise OSError(
                error.errno, f"{os.strerror(error.errno or 0)}; nothing was kept of it", str(self.path)
            ) from error
        self.hash.update(data)
        self.room -= len(data)

    def close(self) -> None:
        try:
            self.file.close()
        except OSError as error:
            raise OSError(
                error.errno, f"{os.strerror(error.errno or 0)}; nothing was kept of it", str(self.path)
            ) from error
        flush(self.path)
        self.shards.append({"file": self.path.name, "bytes": self.limit - self.room, "sha256": self.hash.hexdigest()})

    def abandon(self) -> None:
        self.file.close()

    def about(self) -> dict[str, Any]:
        return {**vars(self.count), "shards": self.shards}


def write_shards(pieces: Iterable[Piece], encoder: Encoder, bound: float, writers: tuple[Writer, Writer]) -> None:
    """Training documents to the first writer; those with a place below `bound` to the second."""
    group: list[Piece] = []
    size = 0

    def encode() -> None:
        for piece, ids in zip(group, encoder.encode([piece.data for piece in group]), strict=True):
            writer = writers[piece.place < bound]
            writer.add(ids)
            writer.count.bytes += len(piece.data)
            if piece.last:
                writer.count.documents += 1
                if encoder.separator is not None:
                    writer.add(np.array([encoder.separator]))
                    writer.count.bytes += 1
        group.clear()

    for piece in pieces:
        group.append(piece)
        size += len(piece.data)
        if size >= GROUP:
            encode()
            size = 0
    encode()
