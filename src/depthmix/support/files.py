"""Files that are complete or absent: written to a temporary path, flushed, renamed. Errors of reading name the file.

Also locks, and hashes of files and strings.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORMAT = 2  # of model and run files; `mechanisms.legacy` reads older ones


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    content = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            content.update(block)
    return content.hexdigest()


def seed_of(*words: object, separator: str = "/") -> int:
    """A seed derived from `words`: the same on every machine, and unrelated for different words.

    Weights and texts are drawn with it, so neither the formula nor the separator of a caller may ever change.
    """
    return int.from_bytes(hashlib.sha256(separator.join(map(str, words)).encode()).digest()[:7], "big")


@contextmanager
def lock(path: Path, refusal: str | None = None) -> Iterator[None]:
    """Hold an exclusive lock; it is released when the process ends, however it ends.

    Args:
        path: a file that serves only as the lock; it is not removed afterwards.
        refusal: message of the ValueError if another process holds the lock; None: wait, with a message on stderr.
    """
    with path.open("w") as file:
        try:
            import fcntl
        except ModuleNotFoundError:  # Windows: there is no lock, a second process is not kept out
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if refusal is not None:
                raise ValueError(refusal) from None
            print(f"waiting for another process to release {path}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A temporary path next to `target`; it is removed afterwards unless it was renamed."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path to write to; it replaces `target` at the end. Until then an older file stays intact."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with beside(target) as part:
        yield part
        flush(part)
        part.replace(target)
        flush(target.parent)


def write_text(target: Path, text: str) -> None:
    """Write a text file; an older one stays intact until the new one is complete."""
    with replacing(target) as part:
        part.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Write a file's content, or a folder's entries, to disk; a file gets the permissions of any new file."""
    if path.is_file():
        mask = os.umask(0)
        os.umask(mask)
        path.chmod(0o666 & ~mask)
    elif os.name == "nt":  # Windows cannot open folders
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
        raise ValueError(f"{path} is damaged: it is not valid UTF-8 ({error}). {remedy}") from error


def read_json(path: Path, remedy: str) -> Any:
    """The content of a JSON file. Errors name the file and end with `remedy`."""
    try:
        return json.loads(read_text(path, remedy))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: it is not valid JSON ({error}). {remedy}") from error


def read_object(path: Path, remedy: str, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """The content of a JSON file: an object that has the fields `needed`."""
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it contains a {type(content).__name__}; expected an object. {remedy}")
    if missing := [name for name in needed if name not in content]:
        raise ValueError(f"{path} is damaged: it has no {', '.join(missing)}. {remedy}")
    return content


def read_lines(path: Path, remedy: str) -> list[dict[str, Any]]:
    """The objects of a JSONL file, one per line."""
    objects = []
    for number, line in enumerate(read_text(path, remedy).splitlines(), 1):
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is damaged: it is not valid JSON ({error}). {remedy}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path}, line {number}, is damaged: {line[:40]!r} is not an object. {remedy}")
        objects.append(content)
    return objects


def parse_toml(text: str, where: str, remedy: str) -> dict[str, Any]:
    try:
        toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise ModuleNotFoundError("TOML needs Python 3.11 or newer, or the package tomli: pip install tomli") from None
    try:
        return dict(toml.loads(text))
    except toml.TOMLDecodeError as error:
        raise ValueError(f"{where} is damaged: it is not valid TOML ({error}). {remedy}") from error


def read_tensors(
    path: Path, remedy: str, names: Collection[str] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of a safetensors file, or only those of `names` that it has, and its metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            wanted = [name for name in file.keys() if names is None or name in names]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in wanted}, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file ({error}). {remedy}") from error


def format_of(content: Mapping[str, Any], where: object) -> int:
    """The format number of a file; 1 if it has none, as files of 0.1.0. An unknown number is an error."""
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
    """The lines of a TOML table. TOML has no null: fields that are None, which is their default, are comments."""
    for name, value in table.items():
        if value is None:
            yield f"# {name} = none"
        elif not isinstance(value, Mapping):
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
    except importlib.metadata.PackageNotFoundError:  # not installed, but run from a source tree
        return "unknown"
