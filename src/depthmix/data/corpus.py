"""A source as tokens on disk: prepared once, checked whenever it is opened.

A prepared folder holds `train-00000.bin`, `validation-00000.bin` and so on (bare little-endian ids), `tokenizer.json`
unless tokens are bytes, and `manifest.json` with sizes and hashes of all of them. It is made beside its place and
renamed, so it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.data.batches import Tokens
from depthmix.data.sources import Census, Progress, Source, census, open_source, watched
from depthmix.data.tokenizers import FILE, SHARD, Writer, full_name, make_encoder, write_shards
from depthmix.support.checks import user_path
from depthmix.support.files import digest, flush, read_json, version

FORMAT = 1
MANIFEST = "manifest.json"
SIDES = ("train", "validation")
# What says nothing about the tokens: the same text prepared elsewhere has the same digest.
ASIDE = ("digest", "depthmix", "source", "stamp")
AGAIN = "Remove the folder and prepare it again"
checked: set[tuple[Any, ...]] = set()  # files whose hash this process has seen to be right


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A prepared folder, opened."""

    folder: Path
    manifest: dict[str, Any]
    train: Tokens
    validation: Tokens

    @classmethod
    def load(cls, folder: str | os.PathLike[str], verify: bool | None = None) -> Corpus:
        """Open what `prepare` made. Sizes are always compared.

        Args:
            verify: compare hashes too; None: where this process has not done so since the file was last written.
        """
        place = Path(folder)
        manifest = read_manifest(place / MANIFEST)
        tokenizer = manifest["tokenizer"]["file"]
        for about in ([tokenizer] if tokenizer else []) + [s for side in SIDES for s in manifest[side]["shards"]]:
            check_file(place / about["file"], about, verify)
        sides = {
            s: Tokens([place / shard["file"] for shard in manifest[s]["shards"]], manifest["dtype"]) for s in SIDES
        }
        return cls(folder=place, manifest=manifest, **sides)

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["tokenizer"]["vocab_size"])

    @property
    def tokenizer_name(self) -> str:
        return str(self.manifest["tokenizer"]["name"])

    @property
    def separator(self) -> int | None:
        """The id that ends every document; None where the tokenizer has none."""
        return self.manifest["tokenizer"]["separator"]

    @property
    def bytes_per_token(self) -> float:
        """Of the validation side, where bits per byte are measured."""
        return self.manifest["validation"]["bytes"] / self.manifest["validation"]["tokens"]

    @property
    def digest(self) -> str:
        """Of documents, split, tokenizer and tokens, wherever they lie."""
        return str(self.manifest["digest"])


def prepare(
    source: str = "stdlib",
    *,
    tokenizer: str = "bytes",
    folder: str | os.PathLike[str],
    validation: float = 0.05,
    seed: int = 0,
    field: str = "text",
    shard_bytes: int = SHARD,
) -> Corpus:
    """Tokenise a source into `folder`, once: what is there already is checked and opened.

    Args:
        source: `stdlib`, a folder, a text, .jsonl or .parquet file, or `hf:NAME`.
        tokenizer: `bytes`, `bpe:4096` (trained on the training side) or the path of a tokenizer.json.
        folder: where the tokens are put; another process that prepares the same waits.
        validation: share of the documents that is held out.
        seed: of the choice which documents these are.
        field: where a row of JSONL, Parquet or a dataset has its text.
        shard_bytes: largest size of a file of tokens.
    """
    if not 0 < validation < 1:
        raise ValueError(f"validation={validation}; expected a share between 0 and 1")
    target = Path(folder)
    wish = {"tokenizer": full_name(tokenizer), "share": validation, "seed": seed, "field": field}
    target.parent.mkdir(parents=True, exist_ok=True)
    with alone(target.with_name(f".{target.name}.lock")):
        if (target / MANIFEST).is_file():
            found = Corpus.load(target)
            check_wish(found, source, wish)
            return found
        if target.is_dir() and any(target.iterdir()):
            raise FileExistsError(f"{target} has files but no {MANIFEST}; {AGAIN.lower()}, or choose another folder")
        # Whoever made this was interrupted: the lock is ours.
        part = target.with_name(f".{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            build(
                open_source(source, field=field, share=validation, seed=seed),
                tokenizer,
                wish,
                part,
                shard_bytes,
            )
            if target.is_dir():
                target.rmdir()
            part.rename(target)
            flush(target.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return Corpus.load(target)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process, however it ends."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows: a second process fails at the rename, and harms nothing
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process at {path}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(source: Source, tokenizer: str, wish: dict[str, Any], folder: Path, shard_bytes: int) -> None:
    """One pass counts and hashes, one may train the tokenizer, one writes."""
    begun = time.monotonic()
    if source.skipped:
        names = ", ".join(source.skipped[:5]) + (" …" if len(source.skipped) > 5 else "")
        print(f"{source.name}: left out {len(source.skipped)} files that are no text: {names}", file=sys.stderr)
    found = census(source, progress := Progress("reading", source.bytes))
    bound = boundary(source, found, wish["share"])
    encoder = make_encoder(tokenizer, folder, (piece for piece in source.read() if piece.place >= bound))
    dtype = "<u2" if encoder.size <= 1 << 16 else "<u4"
    if encoder.separator is None:
        print(f"{tokenizer} has no token that ends a document: documents follow each other bare", file=sys.stderr)
    writers = tuple(Writer(folder, side, dtype, shard_bytes) for side in SIDES)
    progress.what = "tokenising"
    again: list[Census] = []
    try:
        write_shards(watched(source.read(), progress, again.append), encoder, bound, (writers[0], writers[1]))
        for writer in writers:
            writer.close()
    finally:
        progress.end()
        for writer in writers:
            writer.abandon()
    if again[0] != found:
        raise ValueError(f"{source.name} changed while it was read. Prepare it again when nothing writes to it")
    file = folder / FILE
    own = {"file": FILE, "bytes": file.stat().st_size, "sha256": digest(file)} if file.is_file() else None
    manifest = {
        "format": FORMAT,
        "depthmix": version(),
        "source": source.name,
        "stamp": source.stamp,
        **{key: wish[key] for key in ("share", "seed", "field")},
        "documents": {"count": found.documents, "bytes": found.bytes, "sha256": found.sha256},
        "tokenizer": {
            "name": wish["tokenizer"],
            "vocab_size": encoder.size,
            "separator": encoder.separator,
            "file": own,
        },
        "dtype": dtype,
        **{side: writer.about() for side, writer in zip(SIDES, writers, strict=True)},
    }
    text = json.dumps({**manifest, "digest": digest_of(manifest)}, indent=1) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    flush(folder / MANIFEST)
    flush(folder)
    sizes = " + ".join(f"{writer.count.tokens:,} {side}" for side, writer in zip(SIDES, writers, strict=True))
    took = time.monotonic() - begun
    print(f"{source.name}: {found.documents:,} documents, {sizes} tokens, {took:.1f} s", file=sys.stderr, flush=True)


def boundary(source: Source, found: Census, share: float) -> float:
    """Places below it are held out: the share, moved where that leaves one side without any document."""
    if found.lowest >= found.highest:
        raise ValueError(
            f"{source.name} has {found.documents} different documents that can be split; expected two or more, so that "
            "one is held out"
        )
    if found.lowest >= share:
        return math.nextafter(found.lowest, 1.0)
    return min(share, found.highest)


def digest_of(manifest: dict[str, Any]) -> str:
    kept = {key: value for key, value in manifest.items() if key not in ASIDE}
    kept["tokenizer"] = {k: v for k, v in kept["tokenizer"].items() if k != "name"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no {path}; expected a folder that depthmix prepared")
    try:
        manifest = read_json(path, AGAIN)
        number = manifest["format"]
        if number != FORMAT:
            raise ValueError(
                f"{path} has format {number!r}, written by depthmix {manifest.get('depthmix', '(unknown)')}; this "
                f"version reads format {FORMAT}. {AGAIN}"
            )
        whole = manifest["digest"] == digest_of(manifest) and {"source", "stamp"} <= set(manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}). {AGAIN}") from error
    if not whole:
        raise ValueError(f"{path} was altered: its digest is not that of its content. {AGAIN}")
    return dict(manifest)


def check_file(path: Path, about: dict[str, Any], verify: bool | None) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"no {path}, which {MANIFEST} names. {AGAIN}")
    state = path.stat()
    if state.st_size != about["bytes"]:
        what = "truncated" if state.st_size < about["bytes"] else "altered"
        raise ValueError(f"{path} is {what}: {state.st_size:,} bytes; {MANIFEST} says {about['bytes']:,}. {AGAIN}")
    key = (str(path.resolve()), state.st_ino, state.st_mtime_ns, about["sha256"])
    if verify or (verify is None and key not in checked):
        if digest(path) != about["sha256"]:
            raise ValueError(f"{path} is altered or damaged: its SHA-256 is not the one in {MANIFEST}. {AGAIN}")
        checked.add(key)


def check_wish(found: Corpus, source: str, wish: dict[str, Any]) -> None:
    """What is there must be what is asked for; the source by its content, or by its name if it is gone."""
    manifest, folder = found.manifest, found.folder
    there = {"tokenizer": found.tokenizer_name, **{key: manifest[key] for key in ("share", "seed", "field")}}
    for key, value in wish.items():
        if there[key] != value:
            name = {"share": "validation"}.get(key, key)
            raise ValueError(f"{folder} was prepared with {name}={there[key]!r}, not {value!r}. Choose another folder")
    try:
        now = open_source(source, field=wish["field"], share=wish["share"], seed=wish["seed"])
    except FileNotFoundError:
        if manifest["source"] == str(user_path(source).resolve()):
            print(f"{source} is gone; going on with what {folder} has of it", file=sys.stderr, flush=True)
            return
        raise
    if now.stamp is None:  # a dataset, by name
        same = now.name == manifest["source"]
    else:
        same = now.stamp == manifest["stamp"] or census(now).sha256 == manifest["documents"]["sha256"]
    if not same:
        raise ValueError(
            f"{folder} was prepared from {manifest['source']}, whose content was not that of {source} now. Choose "
            "another folder, or remove this one to prepare it again"
        )
