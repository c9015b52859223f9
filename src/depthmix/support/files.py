"""Files that are whole or not there: written beside their target, flushed, renamed; read so that damage names its file.

Also locks, and hashes of files and of words.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORMAT = 2  # of the files of models and runs; `mechanisms.legacy` reads the older ones


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    content = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            content.update(block)
    return content.hexdigest()


def seed_of(*words: object, separator: str = "/") -> int:
    """A seed from a few words, the same everywhere: seeds of different words have nothing in common.

    Weights and texts are drawn with it, so neither the formula nor the separator of a use may ever change.
    """
    return int.from_bytes(hashlib.sha256(separator.join(map(str, words)).encode()).digest()[:7], "big")


@contextmanager
def lock(path: Path, refusal: str | None = None) -> Iterator[None]:
    """One process at a time; the lock goes with the process, however it ends.

    Args:
        path: a file that exists for this only; it stays when the lock ends.
        refusal: of the ValueError where another process has the lock; None: wait for it, with a note on stderr.
    """
    with path.open("w") as file:
        try:
            import fcntl
        except ModuleNotFoundError:  # Windows: nothing keeps a second process out
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if refusal is not None:
                raise ValueError(refusal) from None
            print(f"waiting for another process at {path}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


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


def read_text(path: Path, remedy: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: no UTF-8 text ({error}). {remedy}") from error


def read_json(path: Path, remedy: str) -> Any:
    """The content of a JSON file; where it is none, an error with the file's name and what to do."""
    try:
        return json.loads(read_text(path, remedy))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: no JSON ({error}). {remedy}") from error


def read_object(path: Path, remedy: str, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """A JSON object that has the fields `needed`."""
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(content).__name__}, not an object. {remedy}")
    if missing := [name for name in needed if name not in content]:
        raise ValueError(f"{path} is damaged: it lacks {', '.join(missing)}. {remedy}")
    return content


def read_lines(path: Path, remedy: str) -> list[dict[str, Any]]:
    """The objects of a JSONL file, one per line."""
    objects = []
    for number, line in enumerate(read_text(path, remedy).splitlines(), 1):
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is damaged: no JSON ({error}). {remedy}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path}, line {number}, is damaged: {line[:40]!r} is not an object. {remedy}")
        objects.append(content)
    return objects


def parse_toml(text: str, where: str, remedy: str) -> dict[str, Any]:
    try:
        toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise ModuleNotFoundError("TOML needs Python 3.11, or the package tomli: pip install tomli") from None
    try:
        return dict(toml.loads(text))
    except toml.TOMLDecodeError as error:
        raise ValueError(f"{where} is damaged: no TOML ({error}). {remedy}") from error


def read_tensors(path: Path, remedy: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of a safetensors file and its metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file ({error}). {remedy}") from error


def format_of(content: Mapping[str, Any], where: object) -> int:
    """The format of a file; 1 where it says none, as in 0.1.0. One that this version does not know is an error."""
    number = content.get("format", 1)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{where} has format {number!r}; expected a whole number from 1 to {FORMAT}. Restore the file")
    if number > FORMAT:
        raise ValueError(
            f"{where} has format {number}, written by depthmix {content.get('depthmix', '(a later version)')}; this "
            f"version reads formats 1 to {FORMAT}. Install a newer depthmix"
        )
    return number


def toml_lines(table: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[str]:
    """TOML has no null: fields that are None are left out, which is their default."""
    for name, value in table.items():
        if value is not None and not isinstance(value, Mapping):
            yield f"{name} = {toml_value(value)}"
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield f"\n[{'.'.join((*above, name))}]"
            yield from toml_lines(value, (*above, name))


def toml_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False)


def version() -> str:
    try:
        return importlib.metadata.version("depthmix")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return "unknown"
