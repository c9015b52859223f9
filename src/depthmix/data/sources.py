"""Where text comes from: documents of a source, in pieces of at most a few megabytes, always in the same order.

A document has a place between 0 and 1, by a hash of its name (a file) or of its content (a row of JSONL or Parquet):
places below the validation share are held out. So a document stays on its side when others are added, and equal rows
are on one side. A single text has no names to go by: its end is held out.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.support.checks import user_path

PIECE = 1 << 22  # bytes of a text that are held at once
SAMPLE = 1 << 16  # bytes that show whether a file is text
NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
ROWS = (".jsonl", ".parquet")
PREPARED = ("manifest.json", "train-00000.bin")  # what every folder of tokens holds


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a document; `last` where the document ends."""

    place: float
    data: bytes
    last: bool = True


@dataclass(frozen=True, kw_only=True)
class Source:
    """Something that can be read several times."""

    name: str
    read: Callable[[], Iterator[Piece]]
    bytes: int | None = None  # of its files, for the progress
    stamp: str | None = None  # equal: unchanged, without reading it; of names, sizes and times
    skipped: tuple[str, ...] = ()  # files that are no text


@dataclass(frozen=True, kw_only=True)
class Census:
    """What a source holds: the hash covers places and contents of all documents in their order."""

    documents: int
    bytes: int
    sha256: str
    lowest: float
    highest: float


def open_source(source: str, *, field: str = "text", share: float, seed: int) -> Source:
    """The standard library, a folder, a file, or `hf:NAME[:CONFIG]`.

    Args:
        field: of a JSONL or Parquet row, or of a dataset's: where its text is.
        share: of a single text: how much of its end is held out.
        seed: of the places.
    """
    if source.startswith("hf:"):
        return Source(name=source, read=lambda: from_rows(hub_rows(source, field), seed))
    if source == "stdlib":
        return from_files(source, stdlib_files(), field, share, seed)
    path = user_path(source)
    if path.is_dir():
        return from_files(str(path.resolve()), folder_files(path), field, share, seed)
    if path.is_file():
        return from_files(str(path.resolve()), [(path.name, path)], field, share, seed)
    raise FileNotFoundError(f"no {source!r}; expected stdlib, a folder, a text, .jsonl or .parquet file, or hf:NAME")


def stdlib_files() -> list[tuple[str, Path]]:
    """Python files of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [(name, path) for name, path in folder_files(root, NOT_CORPUS) if path.suffix == ".py"]
    if not found:
        raise FileNotFoundError(
            f"no *.py in {root}: this Python has no sources of its library. Give a folder or a file"
        )
    return found


def folder_files(root: Path, without: Collection[str] = ()) -> list[tuple[str, Path]]:
    """Name and path of all files that are not hidden nor in folders called `without`, sorted by name.

    Folders of tokens are left out: they may have been made of these files.
    """
    found = []
    for here, folders, files in os.walk(root):
        if set(PREPARED) <= set(files):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        paths = [Path(here) / name for name in files if not name.startswith(".")]
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)


def from_files(name: str, found: list[tuple[str, Path]], field: str, share: float, seed: int) -> Source:
    binary = [file for file, path in found if path.suffix not in ROWS and not is_text(path)]
    files = [(file, path) for file, path in found if file not in set(binary)]
    if not files:
        why = f"none of its {len(binary)} files is text, the first is {binary[0]}" if binary else "it has no files"
        raise ValueError(f"{name}: {why}. Expected text, .jsonl or .parquet")
    single = len(files) == 1 and files[0][1].suffix not in ROWS

    def read() -> Iterator[Piece]:
        for file, path in files:
            if path.suffix in ROWS:
                yield from from_rows(
                    jsonl_rows(path, field) if path.suffix == ".jsonl" else parquet_rows(path, field), seed
                )
            elif single:
                cut = line_after(path, int(path.stat().st_size * (1 - share)))
                yield from text_pieces(path, 1.0, 0, cut)
                yield from text_pieces(path, 0.0, cut, None)
            else:
                yield from text_pieces(path, place(file.encode("utf-8", "surrogateescape"), seed), 0, None)

    facts = [(file, path.stat()) for file, path in files]
    stamp = hashlib.sha256(
        repr([(file, about.st_size, about.st_mtime_ns) for file, about in facts]).encode()
    ).hexdigest()
    total = sum(about.st_size for _, about in facts)
    return Source(name=name, read=read, bytes=total, stamp=stamp, skipped=tuple(binary))


def place(key: bytes, seed: int) -> float:
    return int.from_bytes(hashlib.sha256(b"%d\0" % seed + key).digest()[:6], "big") / 2**48


def is_text(path: Path) -> bool:
    with path.open("rb") as file:
        sample = file.read(SAMPLE)
    return (
        b"\0" not in sample and sample.decode("utf-8", "replace").count("\N{REPLACEMENT CHARACTER}") <= len(sample) / 10
    )


def line_after(path: Path, position: int) -> int:
    """The start of the first line at `position` or after; without one, `position` itself."""
    with path.open("rb") as file:
        file.seek(max(position - 1, 0))
        line = file.readline(PIECE)
        end = file.tell()
        return end if line.endswith(b"\n") and file.read(1) else position


def text_pieces(path: Path, where: float, start: int, stop: int | None) -> Iterator[Piece]:
    """A text in pieces that end with a line or, where a line is very long, with a whole character."""
    with path.open("rb") as file:
        file.seek(start)
        left = (path.stat().st_size if stop is None else stop) - start
        held = b""
        while block := file.read(min(PIECE, left)):
            left -= len(block)
            held += block
            if left > 0:
                cut = held.rfind(b"\n") + 1 or whole_characters(held)
                yield Piece(place=where, data=held[:cut], last=False)
                held = held[cut:]
        if held:
            yield Piece(place=where, data=held)


def whole_characters(data: bytes) -> int:
    for back in range(1, min(4, len(data))):
        if data[-back] & 0xC0 != 0x80:  # no continuation of a character: one may begin here
            return len(data) - back
    return len(data)


def from_rows(rows: Iterable[str], seed: int) -> Iterator[Piece]:
    for text in rows:
        data = text.encode("utf-8", "replace")
        if data:
            yield Piece(place=place(hashlib.sha256(data).digest(), seed), data=data)


def jsonl_rows(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: no JSON ({error}). Expected one object a line") from error
            yield text_of(row, field, f"{path}, line {number}")


def parquet_rows(path: Path, field: str) -> Iterator[str]:
    parquet = package("pyarrow.parquet", str(path), "'depthmix[eval]'")
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is damaged or no Parquet file ({error})") from error
    with file:
        names = file.schema_arrow.names
        if field not in names:
            raise ValueError(
                f"{path} has no column {field!r}; its columns are {', '.join(names)}: name one of them as data.field"
            )
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield text_of({field: value}, field, f"{path}, row {row}")


def hub_rows(source: str, field: str) -> Iterator[str]:
    name, _, config = source.removeprefix("hf:").partition(":")
    datasets = package("datasets", source, "datasets")
    try:
        rows = datasets.load_dataset(name, config or None, split="train")
    except Exception as error:  # the network, the name and the dataset's own code: the package has no common class
        raise OSError(
            f"{source} could not be loaded ({type(error).__name__}: {error}). Check the name and the network, or "
            "download it elsewhere and give its Parquet files by path"
        ) from error
    for number, row in enumerate(rows, 1):
        yield text_of(row, field, f"{source}, row {number}")


def text_of(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or field not in row:
        fields = ", ".join(map(str, row)) if isinstance(row, dict) else f"none: it is a {type(row).__name__}"
        raise ValueError(f"{where} has no field {field!r}; its fields are {fields}: name one of them as data.field")
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} is a {type(text).__name__}; expected text")
    return text or ""


def package(module: str, wish: str, install: str) -> Any:
    """A package that only some sources and tokenizers need."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = module.split(".")[0]
        raise ModuleNotFoundError(f"{wish} needs the package {name}: pip install {install}", name=error.name) from None


def watched(pieces: Iterator[Piece], progress: Progress | None, finish: Callable[[Census], None]) -> Iterator[Piece]:
    """The same pieces, counted and hashed on their way."""
    every, documents, size, lowest, highest = hashlib.sha256(), 0, 0, 1.0, 0.0
    one = hashlib.sha256()
    for piece in pieces:
        one.update(piece.data)
        size += len(piece.data)
        if piece.last:
            documents += 1
            lowest, highest = min(lowest, piece.place), max(highest, piece.place)
            every.update(f"{piece.place!r} {one.hexdigest()}\n".encode())
            one = hashlib.sha256()
        if progress is not None:
            progress.at(size)
        yield piece
    finish(Census(documents=documents, bytes=size, sha256=every.hexdigest(), lowest=lowest, highest=highest))


def census(source: Source, progress: Progress | None = None) -> Census:
    found: list[Census] = []
    for _ in watched(source.read(), progress, found.append):
        pass
    return found[0]


class Progress:
    """How far a pass over a source is: one line that is written over in a terminal, else a line every ten seconds."""

    def __init__(self, what: str, total: int | None) -> None:
        self.what, self.total, self.clock = what, total, time.monotonic
        self.terminal = sys.stderr.isatty()
        self.said = self.clock()

    def at(self, size: int) -> None:
        if self.clock() - self.said < (0.2 if self.terminal else 10):
            return
        self.said = self.clock()
        of = f" of {self.total / 1e6:,.1f}, {size / max(self.total, 1):.0%}" if self.total else ""
        ends = ("\r\x1b[K", "") if self.terminal else ("", "\n")
        print(f"{ends[0]}{self.what}: {size / 1e6:,.1f} MB{of}", end=ends[1], file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
