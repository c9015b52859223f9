"""Sources of text: their documents in pieces of at most a few megabytes, always in the same order.

A document has a split value between 0 and 1, from a hash of its name (a file) or of its content (a row of JSONL or
Parquet): values below the validation share are held out. So a document stays in its split when others are added, and
equal rows are in the same split. In a single text file the end is held out.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from depthmix.data.rows import ROW_READERS, hub_rows
from depthmix.support.checks import user_path
from depthmix.support.terminal import Progress

PIECE_BYTES = 1 << 22  # of a text that are in memory at once
SAMPLE_BYTES = 1 << 16  # that are examined to decide whether a file is text
EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
PREPARED_FILES = ("manifest.json", "train-00000.bin")  # files that every folder of tokens contains


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a document; `last` marks the end of the document."""

    split_value: float
    data: bytes
    last: bool = True


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of text that can be read several times."""

    name: str
    read: Callable[[], Iterator[Piece]]
    bytes: int | None = None  # size of its files, for the progress display
    stamp: str | None = None  # hash of names, sizes and times: an equal stamp means unchanged content
    skipped: tuple[str, ...] = ()  # files that are not text


@dataclass(frozen=True, kw_only=True)
class Census:
    """Counts of a source, and a hash over the split values and contents of all documents in order."""

    documents: int
    bytes: int
    sha256: str
    lowest: float  # split value
    highest: float


def open_source(source: str, *, field: str = "text", share: float, seed: int) -> Source:
    """Open `stdlib` (Python's standard library), a folder, a file, or `hf:NAME[:CONFIG]`.

    Args:
        field: field that contains the text in a row of JSONL, Parquet or a dataset.
        share: share of a single text file that is held out, at its end.
        seed: seed of the split values.
    """
    if source.startswith("hf:"):
        return Source(name=source, read=lambda: row_pieces(hub_rows(source, field), seed))
    if source == "stdlib":
        return files_source(source, stdlib_files(), field, share, seed)
    path = user_path(source)
    if path.is_dir():
        return files_source(str(path.resolve()), folder_files(path), field, share, seed)
    if path.is_file():
        return files_source(str(path.resolve()), [(path.name, path)], field, share, seed)
    raise FileNotFoundError(
        f"{source!r} does not exist; expected stdlib, a folder, a text, .jsonl or .parquet file, or hf:NAME"
    )


def stdlib_files() -> list[tuple[str, Path]]:
    """Python files of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(name, path) for name, path in folder_files(root, EXCLUDED_FOLDERS) if path.suffix == ".py"]
    if not files:
        raise FileNotFoundError(
            f"no *.py files in {root}: this Python has no sources of its standard library. Use a folder or a file"
        )
    return files


def folder_files(root: Path, without: Collection[str] = ()) -> list[tuple[str, Path]]:
    """Name and path of all files that are not hidden and not in folders named in `without`, sorted by name.

    Folders of tokens are excluded: they may have been made from these files.
    """
    named_paths = []
    for parent, folders, files in os.walk(root):
        if set(PREPARED_FILES) <= set(files):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        paths = [Path(parent) / name for name in files if not name.startswith(".")]
        named_paths += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(named_paths)


def files_source(name: str, files: list[tuple[str, Path]], field: str, share: float, seed: int) -> Source:
    """A source of those `files` (name and path) that are text, JSONL or Parquet."""
    readable = [path.suffix in ROW_READERS or is_text(path) for _, path in files]
    kept = [named for named, can in zip(files, readable, strict=True) if can]
    skipped = tuple(file for (file, _), can in zip(files, readable, strict=True) if not can)
    if not kept:
        why = f"none of its {len(skipped)} files is text (the first is {skipped[0]})" if skipped else "it has no files"
        raise ValueError(f"{name}: {why}. Expected text, .jsonl or .parquet files")
    single = len(kept) == 1

    def read() -> Iterator[Piece]:
        for file, path in kept:
            if path.suffix in ROW_READERS:
                yield from row_pieces(ROW_READERS[path.suffix](path, field), seed)
            elif single:
                cut = line_after(path, int(path.stat().st_size * (1 - share)))
                yield from text_pieces(path, 1.0, 0, cut)
                yield from text_pieces(path, 0.0, cut, None)
            else:
                yield from text_pieces(path, hash_to_split(file.encode("utf-8", "surrogateescape"), seed), 0, None)

    stats = [(file, path.stat()) for file, path in kept]
    unread = repr([(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats])
    stamp = hashlib.sha256(unread.encode()).hexdigest()
    return Source(name=name, read=read, bytes=sum(stat.st_size for _, stat in stats), stamp=stamp, skipped=skipped)


def hash_to_split(key: bytes, seed: int) -> float:
    """The split value of a name or of a hash of content."""
    return int.from_bytes(hashlib.sha256(b"%d\0" % seed + key).digest()[:6], "big") / 2**48


def is_text(path: Path) -> bool:
    with path.open("rb") as file:
        sample = file.read(SAMPLE_BYTES)
    return (
        b"\0" not in sample and sample.decode("utf-8", "replace").count("\N{REPLACEMENT CHARACTER}") <= len(sample) / 10
    )


def line_after(path: Path, position: int) -> int:
    """The start of the first line at or after `position`; `position` itself if there is none."""
    with path.open("rb") as file:
        file.seek(max(position - 1, 0))
        line = file.readline(PIECE_BYTES)
        end = file.tell()
        return end if line.endswith(b"\n") and file.read(1) else position


def text_pieces(path: Path, split_value: float, start: int, stop: int | None) -> Iterator[Piece]:
    """A text in pieces that end with a line or, if a line is very long, with a complete character."""
    with path.open("rb") as file:
        file.seek(start)
        left = (path.stat().st_size if stop is None else stop) - start
        pending = b""
        while block := file.read(min(PIECE_BYTES, left)):
            left -= len(block)
            pending += block
            if left > 0:
                cut = pending.rfind(b"\n") + 1 or whole_characters(pending)
                yield Piece(split_value=split_value, data=pending[:cut], last=False)
                pending = pending[cut:]
        if pending:
            yield Piece(split_value=split_value, data=pending)


def whole_characters(data: bytes) -> int:
    for back in range(1, min(4, len(data))):
        if data[-back] & 0xC0 != 0x80:  # not a continuation byte: a character may begin here
            return len(data) - back
    return len(data)


def row_pieces(rows: Iterable[str], seed: int) -> Iterator[Piece]:
    for text in rows:
        data = text.encode("utf-8", "replace")
        if data:
            yield Piece(split_value=hash_to_split(hashlib.sha256(data).digest(), seed), data=data)


def read_with_progress(source: Source, label: str) -> Iterator[Piece]:
    size, total = 0, source.bytes
    with Progress(total, every=10) as progress:
        for piece in source.read():
            size += len(piece.data)
            share = f" of {total / 1e6:,.1f}, {size / max(total, 1):.0%}" if total else ""
            progress.update(size, f"{label}: {size / 1e6:,.1f} MB{share}")
            yield piece


def counted_pieces(pieces: Iterator[Piece], finish: Callable[[Census], None]) -> Iterator[Piece]:
    """The same pieces, counted and hashed while they are read."""
    documents, size, lowest, highest = 0, 0, 1.0, 0.0
    source_hash, document_hash = hashlib.sha256(), hashlib.sha256()
    for piece in pieces:
        document_hash.update(piece.data)
        size += len(piece.data)
        if piece.last:
            documents += 1
            lowest, highest = min(lowest, piece.split_value), max(highest, piece.split_value)
            source_hash.update(f"{piece.split_value!r} {document_hash.hexdigest()}\n".encode())
            document_hash = hashlib.sha256()
        yield piece
    finish(Census(documents=documents, bytes=size, sha256=source_hash.hexdigest(), lowest=lowest, highest=highest))


def census(pieces: Iterator[Piece]) -> Census:
    counted: list[Census] = []
    for _ in counted_pieces(pieces, counted.append):
        pass
    return counted[0]
