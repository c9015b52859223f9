"""Tokenizers: one class for each kind, used for training and generation.

For byte tokens the separator is the byte 0, which no text contains: 256 ids are then enough, and `depthmix generate`
reads such a model without a tokenizer file.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from depthmix.data.sources import Piece
from depthmix.inference import Tokenizer
from depthmix.support.checks import import_package, user_path
from depthmix.support.files import digest, flush, read_object
from depthmix.support.terminal import say

TOKENIZER_FILE = "tokenizer.json"
EXTRA = "'depthmix[bpe]'"
SEPARATOR = "<|endoftext|>"
# The separator of an existing tokenizer is the first of these in its vocabulary.
SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")


class BatchTokenizer(Tokenizer, Protocol):
    """A tokenizer for preparing a corpus: it also encodes batches of documents given as bytes."""

    size: int  # size of the vocabulary
    separator: int | None  # the id that ends every document

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        """The ids of each text, without special tokens."""


class ByteTokenizer:
    """Bytes of UTF-8 as ids, 0 to 255."""

    size: int = 256
    separator: int | None = 0

    def encode(self, text: str) -> list[int]:
        # Bytes that a terminal could not decode arrive as lone surrogates: restore the bytes.
        return list(text.encode("utf-8", errors="surrogateescape"))

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, read by the tokenizers package.

    It encodes the whole text without truncation, padding or the special tokens that the file adds to a prompt.
    """

    def __init__(self, path: Path) -> None:
        tokenizers = import_package("tokenizers", str(path), EXTRA)
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises no narrower class
            raise ValueError(f"{path} is damaged or not a tokenizer ({error})") from error
        # A tokenizer saved for a classifier would truncate and pad every text.
        self.inner.no_truncation()
        self.inner.no_padding()
        vocabulary = self.inner.get_vocab()
        self.size: int = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        self.separator: int | None = next((vocabulary[name] for name in SEPARATORS if name in vocabulary), None)

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        strings = [text.decode("utf-8", "replace") for text in texts]
        return [np.array(one.ids, np.uint32) for one in self.inner.encode_batch(strings, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids)))


def load_tokenizer(directory: str | os.PathLike[str], vocab_size: int) -> BatchTokenizer:
    """The `tokenizer.json` of a directory; without one, bytes if the vocabulary has at most 256 ids."""
    path = Path(directory) / TOKENIZER_FILE
    if path.is_file():
        tokenizer = FileTokenizer(path)
        if tokenizer.size > vocab_size:
            raise ValueError(f"{path} has {tokenizer.size} ids; expected at most {vocab_size}, the model's vocabulary")
        return tokenizer
    if vocab_size <= ByteTokenizer.size:
        return ByteTokenizer()
    raise FileNotFoundError(
        f"{path} does not exist, and a vocabulary of {vocab_size} ids is too large for bytes: copy the model's "
        "tokenizer.json there"
    )


def identify_tokenizer(tokenizer: str) -> str:
    """The name stored in a manifest: `bytes`, `bpe:SIZE`, or `file:` with a hash of the file's content."""
    if tokenizer == "bytes":
        return tokenizer
    if tokenizer.startswith("bpe:"):
        size = int(tokenizer[4:]) if re.fullmatch(r"bpe:\d+", tokenizer) else 0
        if size < 257:
            raise ValueError(
                f"tokenizer={tokenizer!r}; expected bpe:SIZE with SIZE at least 257, for the bytes and the separator"
            )
        return f"bpe:{size}"
    path = user_path(tokenizer)
    if not path.is_file():
        raise FileNotFoundError(
            f"unknown tokenizer {tokenizer!r}; expected bytes, bpe:4096 or the path of a tokenizer.json"
        )
    return f"file:{digest(path)[:16]}"


def vocabulary_size(tokenizer: str) -> int:
    """The largest vocabulary size of the tokenizer of this name; on a small corpus a BPE may have fewer ids."""
    name = identify_tokenizer(tokenizer)
    if name == "bytes":
        return ByteTokenizer.size
    return int(name.removeprefix("bpe:")) if name.startswith("bpe:") else count_ids(user_path(tokenizer))


def count_ids(path: Path) -> int:
    """The vocabulary size of a tokenizer.json, without the tokenizers package."""
    content = read_object(path, "Choose another", ("model", "added_tokens"))
    try:
        words = content["model"]["vocab"]  # a list of pairs for Unigram models
        ids = [*(words.values() if isinstance(words, dict) else range(len(words)))]
        return int(max(ids + [token["id"] for token in content["added_tokens"]])) + 1
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged or not a tokenizer ({type(error).__name__}: {error}). Choose another"
        ) from error


def make_tokenizer(tokenizer: str, folder: Path, texts: Iterator[Piece]) -> BatchTokenizer:
    """A tokenizer by name. Its file is written to `folder`: a copy of a given file, or a BPE trained on `texts`."""
    if tokenizer == "bytes":
        return ByteTokenizer()
    path = folder / TOKENIZER_FILE
    if tokenizer.startswith("bpe:"):
        say(f"training the tokenizer {tokenizer}")
        train_bpe(int(tokenizer[4:]), texts, path)
    else:
        shutil.copyfile(user_path(tokenizer), path)
    flush(path)
    return FileTokenizer(path)


def train_bpe(size: int, texts: Iterator[Piece], path: Path) -> None:
    """Train a byte-level BPE, which can encode every text; on a small corpus it may have fewer ids than `size`."""
    tokenizers = import_package("tokenizers", f"bpe:{size}", EXTRA)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((piece.data.decode("utf-8", "replace") for piece in texts), trainer)
    inner.save(str(path))
