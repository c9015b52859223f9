"""Streaming of decoded text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """The methods that generation needs of a tokenizer; `depthmix.data` implements two."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; invalid bytes become the replacement character."""


class TextStream:
    """The text of tokens that arrive one by one: a character is emitted when it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.context = 0  # ids from here are decoded again: some tokenizers decode a token depending on the one before
        self.emitted = 0  # ids whose text has been emitted

    def push(self, token: int) -> str:
        self.ids.append(token)
        text = self.pending()
        return "" if text.endswith(REPLACEMENT) else self.emit(text)

    def finish(self) -> str:
        """The remaining text, with incomplete characters replaced."""
        return self.emit(self.pending())

    def pending(self) -> str:
        before = self.tokenizer.decode(self.ids[self.context : self.emitted])
        return self.tokenizer.decode(self.ids[self.context :])[len(before) :]

    def emit(self, text: str) -> str:
        if text:
            self.context, self.emitted = self.emitted, len(self.ids)
        return text
