"""Texts that a trained model is measured on: a file, a prompt or its validation data, as rows of tokens.

Axes: B row of text, T token.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthmix.data.sources import text_pieces
from depthmix.data.tokenizers import BatchTokenizer
from depthmix.support.terminal import Progress
from depthmix.training.build import check_tokens, open_corpus, read_config

CONTEXT = 512  # of a saved model, which does not know that of its training
PASS_TOKENS = 2048  # in the rows of one batch


@dataclass
class Text:
    """The ids of a text in chunks, which are read and hashed one after the other."""

    source: str
    chunks: Iterable[np.ndarray]
    length: int  # tokens of a row
    total: float | None = None  # expected number of tokens, for the progress display
    hash: Any = field(default_factory=hashlib.sha256)  # of the ids that were read, as int64, little-endian

    def batches(self, label: str = "reading") -> Iterator[Tensor]:
        """Rows [B, T] of `length` tokens, and at last the rest as a shorter row; each token is in one row."""
        most = max(1, PASS_TOKENS // self.length)
        with Progress(self.total) as progress:
            done, pending = 0, np.empty(0, np.int64)
            for ids in self.chunks:
                self.hash.update(ids.astype("<i8").tobytes())
                pending = np.concatenate([pending, ids.astype(np.int64)])
                while len(pending) >= self.length:
                    rows = min(most, len(pending) // self.length)
                    part, pending = pending[: rows * self.length], pending[rows * self.length :]
                    yield torch.from_numpy(part).view(rows, self.length)
                    done += part.size
                    progress.update(done, f"{label}: {done:,} tokens")
            if len(pending):
                yield torch.from_numpy(pending).view(1, -1)

    def rows(self) -> Tensor:
        """All rows of equal length [B, T]; a text that is shorter than one row is a row of its own."""
        batches = list(self.batches())
        if not batches:
            raise ValueError(f"{self.source} has no tokens; expected at least 2")
        return torch.cat([batch for batch in batches if batch.shape[1] == batches[0].shape[1]])

    def digest(self) -> str:
        """Read the whole text for its digest alone."""
        for ids in self.chunks:
            self.hash.update(ids.astype("<i8").tobytes())
        return str(self.hash.hexdigest())

    def describe(self) -> dict[str, Any]:
        """What is kept with a result; complete once the text was read."""
        return {"source": self.source, "sha256": self.hash.hexdigest(), "context": self.length}


def measured_folder(folder: Path, *words: str) -> Path:
    """Where measurements of a run are kept: beside the run's files, or in a folder of their own if they are not of the
    whole run on its validation data; `words` say what is special about them, such as the name of a text."""
    slug = re.sub(r"[^A-Za-z0-9._+-]+", "_", "-".join(words)).strip("._")
    return folder / "measured" / (slug or "text") if words else folder


def row_length(folder: Path, context: int | None = None) -> int:
    """The given length of a row, else that of training, else `CONTEXT`."""
    if context is not None:
        return context
    return read_config(folder).data.tokens_per_row if (folder / "config.toml").is_file() else CONTEXT


def file_text(path: Path, tokenizer: BatchTokenizer, length: int, tokens: int | None = None) -> Text:
    chunks = (tokenizer.encode_batch([piece.data])[0] for piece in text_pieces(path, 0.0, 0, None))
    return Text(path.name, limited(chunks, tokens), length, tokens)


def prompt_text(prompt: str, tokenizer: BatchTokenizer, length: int, tokens: int | None = None) -> Text:
    ids = np.asarray(tokenizer.encode(prompt), dtype=np.int64)
    return Text("prompt", limited([ids], tokens), length, len(ids))


def validation_text(folder: Path, digest: str | None, length: int, tokens: int) -> Text:
    """Rows evenly spread over the validation data of a run, `tokens` in all; all of it if it has no more."""
    if digest is None:
        raise ValueError(f"{folder} is a saved model without validation data; give a text with --text or --prompt")
    data = read_config(folder).data
    corpus = open_corpus(data)
    check_tokens(corpus, digest, folder)
    held = corpus.validation
    if tokens >= len(held):
        starts, width = range(0, len(held), PASS_TOKENS), PASS_TOKENS
    else:
        count, width = max(1, tokens // length), min(length, tokens)
        starts = [k * (len(held) // width) // count * width for k in range(count)]  # type: ignore[assignment]
    chunks = (held[start : min(start + width, len(held))] for start in starts)
    return Text(f"validation data of {data.source}", chunks, length, min(tokens, len(held)))


def limited(chunks: Iterable[np.ndarray], tokens: int | None) -> Iterator[np.ndarray]:
    """The first `tokens` ids; None: all."""
    left = tokens
    for ids in chunks:
        yield ids if left is None else ids[:left]
        left = None if left is None else left - len(ids)
        if left is not None and left <= 0:
            return
