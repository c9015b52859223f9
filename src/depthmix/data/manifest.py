"""The manifest of a prepared folder: sizes and hashes of its files, the settings used, and a digest of all these."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from depthmix.support.files import digest, flush, read_object, version

FORMAT = 1
MANIFEST = "manifest.json"
SIDES = ("train", "validation")
REMEDY = "Remove the folder and prepare it again"
# Fields that do not affect the tokens: the same text prepared elsewhere has the same digest.
NOT_DIGESTED = ("digest", "depthmix", "source", "stamp")
verified: set[tuple[Any, ...]] = set()  # files whose hash this process has verified


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    manifest = {"format": FORMAT, "depthmix": version(), **content}
    text = json.dumps({**manifest, "digest": digest_manifest(manifest)}, indent=1) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    flush(folder / MANIFEST)
    flush(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected a folder that depthmix prepared")
    manifest = read_object(path, REMEDY, ("format",))
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {manifest['format']!r}, written by depthmix {manifest.get('depthmix', '(unknown)')}; "
            f"this version reads format {FORMAT}. {REMEDY}"
        )
    whole = {"digest", "source", "stamp"} <= set(manifest) and isinstance(manifest.get("tokenizer"), dict)
    if not whole or manifest["digest"] != digest_manifest(manifest):
        raise ValueError(f"{path} was modified: its digest does not match its content. {REMEDY}")
    return manifest


def digest_manifest(manifest: dict[str, Any]) -> str:
    digested = {key: value for key, value in manifest.items() if key not in NOT_DIGESTED}
    digested["tokenizer"] = {key: value for key, value in digested["tokenizer"].items() if key != "name"}
    return hashlib.sha256(json.dumps(digested, sort_keys=True).encode()).hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    """The manifest's entry of a file."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest(path)}


def check_file(folder: Path, entry: dict[str, Any], verify: bool | None) -> None:
    """Check that a file has the size in its entry and, depending on `verify` (see `Corpus.load`), the hash."""
    path = folder / entry["file"]
    if not path.is_file():
        raise FileNotFoundError(f"{path}, listed in {MANIFEST}, does not exist. {REMEDY}")
    state = path.stat()
    if state.st_size != entry["bytes"]:
        damage = "truncated" if state.st_size < entry["bytes"] else "modified"
        raise ValueError(f"{path} is {damage}: {state.st_size:,} bytes; {MANIFEST} says {entry['bytes']:,}. {REMEDY}")
    key = (str(path.resolve()), state.st_ino, state.st_mtime_ns, entry["sha256"])
    if verify or (verify is None and key not in verified):
        if digest(path) != entry["sha256"]:
            raise ValueError(f"{path} is modified or damaged: its SHA-256 differs from the one in {MANIFEST}. {REMEDY}")
        verified.add(key)
