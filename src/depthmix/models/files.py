"""Files that are whole or not there: written beside their place, flushed, renamed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found.update(block)
    return found.hexdigest()


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A path next to `target`, which is gone afterwards unless it was renamed."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `target` at the end; an older file there stays whole until then."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with beside(target) as part:
        yield part
        flush(part)
        part.replace(target)
        flush(target.parent)


def write_text(target: Path, text: str) -> None:
    with replacing(target) as part:
        part.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Onto the disk, a file's content or a folder's names; a file gets the mode that any new one has."""
    if path.is_file():
        mask = os.umask(0)
        os.umask(mask)
        path.chmod(0o666 & ~mask)
    elif os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
