"""Text to tokens and back."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is no text becomes the replacement character."""


class ByteTokenizer:
    """Bytes of UTF-8 as ids, 0 to 255."""

    def encode(self, text: str) -> list[int]:
        # What a terminal could not decode reaches us as lone surrogates: their bytes again.
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, read by the tokenizers package."""

    def __init__(self, path: Path) -> None:
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                f"{path} needs the package tokenizers: pip install 'depthmix[train]'", name="tokenizers"
            ) from None
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{path} is damaged or no tokenizer ({error})") from error
        # One that was saved to feed a classifier would cut and fill every text.
        self.inner.no_truncation()
        self.inner.no_padding()
        self.size: int = max(self.inner.get_vocab().values(), default=-1) + 1  # ids may have gaps

    def encode(self, text: str) -> list[int]:
        """As in training: the whole text and nothing else, no special tokens around it."""
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids)))


def load_tokenizer(directory: str | os.PathLike[str], vocab_size: int) -> Tokenizer:
    """The `tokenizer.json` of a directory; without one, bytes where the vocabulary has at most 256 ids."""
    path = Path(directory) / "tokenizer.json"
    if path.is_file():
        found = FileTokenizer(path)
        if found.size > vocab_size:
            raise ValueError(f"{path} has {found.size} ids; expected at most {vocab_size}, the model's vocabulary")
        return found
    if vocab_size <= 256:
        return ByteTokenizer()
    raise FileNotFoundError(
        f"no {path}; a vocabulary of {vocab_size} ids is more than bytes: put the model's tokenizer.json there"
    )


class TextStream:
    """Text of tokens that come one by one: a character is given out when it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.context = 0  # ids from here on are decoded again: some tokenizers write a token by the one before it
        self.given = 0  # ids whose text has been given out

    def push(self, token: int) -> str:
        self.ids.append(token)
        text = self.pending()
        return "" if text.endswith(REPLACEMENT) else self.give(text)

    def finish(self) -> str:
        """What is left, half characters replaced."""
        return self.give(self.pending())

    def pending(self) -> str:
        before = self.tokenizer.decode(self.ids[self.context : self.given])
        return self.tokenizer.decode(self.ids[self.context :])[len(before) :]

    def give(self, text: str) -> str:
        if text:
            self.context, self.given = self.given, len(self.ids)
        return text
