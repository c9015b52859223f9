"""Text of tokens, as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """What generation needs of a tokenizer; `depthmix.data` has two."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is no text becomes the replacement character."""


class TextStream:
    """Text of tokens that come one by one: a character is emitted when it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.context = 0  # ids from here on are decoded again: some tokenizers write a token by the one before it
        self.emitted = 0  # ids whose text has been emitted

    def push(self, token: int) -> str:
        self.ids.append(token)
        text = self.pending()
        return "" if text.endswith(REPLACEMENT) else self.emit(text)

    def finish(self) -> str:
        """What is left, half characters replaced."""
        return self.emit(self.pending())

    def pending(self) -> str:
        before = self.tokenizer.decode(self.ids[self.context : self.emitted])
        return self.tokenizer.decode(self.ids[self.context :])[len(before) :]

    def emit(self, text: str) -> str:
        if text:
            self.context, self.emitted = self.emitted, len(self.ids)
        return text
