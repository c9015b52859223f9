"""A source as tokens on disk: prepared once, checked whenever it is opened.

A prepared folder contains `train-00000.bin`, `validation-00000.bin` and so on (little-endian ids without a header),
`tokenizer.json` unless tokens are bytes, and `manifest.json` with the sizes and hashes of these files. It is written
under a temporary name and renamed, so it is either complete or absent.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.data.manifest import MANIFEST, REMEDY, SIDES, check_file, describe_file, read_manifest, write_manifest
from depthmix.data.shards import SHARD_BYTES, Tokens, Writer, write_shards
from depthmix.data.sources import Census, Source, census, counted_pieces, open_source, read_with_progress
from depthmix.data.tokenizers import TOKENIZER_FILE, BatchTokenizer, identify_tokenizer, make_tokenizer
from depthmix.support.checks import user_path
from depthmix.support.files import flush, lock
from depthmix.support.terminal import say


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A prepared folder, opened."""

    folder: Path
    manifest: dict[str, Any]
    train: Tokens
    validation: Tokens

    @classmethod
    def load(cls, folder: str | os.PathLike[str], verify: bool | None = None) -> Corpus:
        """Open a folder that `prepare` made. Sizes are always compared.

        Args:
            verify: compare hashes too; None: unless this process has done so since the file was last written.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        tokenizer = manifest["tokenizer"]["file"]
        shards = {side: manifest[side]["shards"] for side in SIDES}
        for entry in ([tokenizer] if tokenizer else []) + [entry for side in SIDES for entry in shards[side]]:
            check_file(folder, entry, verify)
        tokens = {side: Tokens([folder / entry["file"] for entry in shards[side]], manifest["dtype"]) for side in SIDES}
        return cls(folder=folder, manifest=manifest, **tokens)

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["tokenizer"]["vocab_size"])

    @property
    def tokenizer_name(self) -> str:
        return str(self.manifest["tokenizer"]["name"])

    @property
    def separator(self) -> int | None:
        """The id that ends every document; None if the tokenizer has none."""
        return self.manifest["tokenizer"]["separator"]

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of the validation split, where bits per byte are measured."""
        return self.manifest["validation"]["bytes"] / self.manifest["validation"]["tokens"]

    @property
    def digest(self) -> str:
        """Digest of documents, split, tokenizer and tokens, independent of their location."""
        return str(self.manifest["digest"])


def prepare(
    source: str = "stdlib",
    *,
    tokenizer: str = "bytes",
    folder: str | os.PathLike[str],
    validation: float = 0.05,
    seed: int = 0,
    field: str = "text",
    shard_bytes: int = SHARD_BYTES,
) -> Corpus:
    """Tokenise a source into `folder`; if the folder is already prepared, check and open it.

    Args:
        source: `stdlib`, a folder, a text, .jsonl or .parquet file, or `hf:NAME`.
        tokenizer: `bytes`, `bpe:4096` (trained on the training split) or the path of a tokenizer.json.
        folder: folder for the tokens; another process that prepares the same folder waits.
        validation: share of the documents that is held out.
        seed: seed of the choice of these documents.
        field: field that contains the text in a row of JSONL, Parquet or a dataset.
        shard_bytes: largest size of a file of tokens.
    """
    if not 0 < validation < 1:
        raise ValueError(f"validation={validation}; expected a number between 0 and 1, both excluded")
    target = Path(folder)
    request = Request(
        source=source, tokenizer=tokenizer, name=identify_tokenizer(tokenizer), share=validation, seed=seed, field=field
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    with lock(target.with_name(f".{target.name}.lock")):
        if (target / MANIFEST).is_file():
            corpus = Corpus.load(target)
            check_request(corpus, request)
            return corpus
        if target.is_dir() and any(target.iterdir()):
            raise FileExistsError(
                f"{target} contains files but no {MANIFEST}; {REMEDY.lower()}, or choose another folder"
            )
        # Left by an interrupted process: this process holds the lock.
        part = target.with_name(f".{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            build(request, part, shard_bytes)
            if target.is_dir():
                target.rmdir()
            part.rename(target)
            flush(target.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return Corpus.load(target)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `prepare`."""

    source: str
    tokenizer: str
    name: str  # name of the tokenizer in the manifest
    share: float  # share of the documents that is held out
    seed: int
    field: str

    def open(self) -> Source:
        return open_source(self.source, field=self.field, share=self.share, seed=self.seed)

    def settings(self) -> dict[str, Any]:
        """The settings as stored in the manifest."""
        return {"share": self.share, "seed": self.seed, "field": self.field}


def build(request: Request, folder: Path, shard_bytes: int) -> None:
    """One pass counts and hashes, one may train the tokenizer, one writes."""
    begun = time.monotonic()
    source = request.open()
    if source.skipped:
        names = ", ".join(source.skipped[:5]) + (" …" if len(source.skipped) > 5 else "")
        say(f"{source.name}: skipped {len(source.skipped)} files that are not text: {names}")
    counted = census(read_with_progress(source, "reading"))
    bound = split_bound(source, counted, request.share)
    training_pieces = (piece for piece in source.read() if piece.split_value >= bound)
    tokenizer = make_tokenizer(request.tokenizer, folder, training_pieces)
    if tokenizer.separator is None:
        say(f"{request.tokenizer} has no token that ends a document: documents are joined without a separator")
    dtype = "<u2" if tokenizer.size <= 1 << 16 else "<u4"
    writers = {side: Writer(folder, side, dtype, shard_bytes) for side in SIDES}
    if write_sides(source, tokenizer, bound, writers) != counted:
        raise ValueError(
            f"{source.name} changed while it was being read. Prepare it again when no other process writes to it"
        )
    file = folder / TOKENIZER_FILE
    write_manifest(
        folder,
        {
            "source": source.name,
            "stamp": source.stamp,
            **request.settings(),
            "documents": {"count": counted.documents, "bytes": counted.bytes, "sha256": counted.sha256},
            "tokenizer": {
                "name": request.name,
                "vocab_size": tokenizer.size,
                "separator": tokenizer.separator,
                "file": describe_file(file) if file.is_file() else None,
            },
            "dtype": dtype,
            **{side: writer.manifest() for side, writer in writers.items()},
        },
    )
    sizes = " + ".join(f"{writer.count.tokens:,} {side}" for side, writer in writers.items())
    took = time.monotonic() - begun
    say(f"{source.name}: {counted.documents:,} documents, {sizes} tokens, {took:.1f} s")


def write_sides(source: Source, tokenizer: BatchTokenizer, bound: float, writers: dict[str, Writer]) -> Census:
    """Write the shards of both splits; the documents read are counted once more."""
    counted: list[Census] = []
    try:
        pieces = counted_pieces(read_with_progress(source, "tokenising"), counted.append)
        write_shards(pieces, tokenizer, bound, **writers)
        for writer in writers.values():
            writer.close()
    finally:
        for writer in writers.values():
            writer.abandon()
    return counted[0]


def split_bound(source: Source, counted: Census, share: float) -> float:
    """The bound below which split values are held out: the share, adjusted if it would leave one split empty."""
    if counted.lowest >= counted.highest:
        raise ValueError(
            f"{source.name} has {counted.documents} documents that can be split; expected at least two different ones, "
            "so that one can be held out"
        )
    if counted.lowest >= share:
        return math.nextafter(counted.lowest, 1.0)
    return min(share, counted.highest)


def check_request(corpus: Corpus, request: Request) -> None:
    """Check that the folder matches the request; the source by its content, or by its name if it no longer exists."""
    manifest, folder = corpus.manifest, corpus.folder
    prepared = {**manifest, "tokenizer": corpus.tokenizer_name}
    for key, value in {"tokenizer": request.name, **request.settings()}.items():
        if prepared[key] != value:
            option = {"share": "validation"}.get(key, key)
            raise ValueError(
                f"{folder} was prepared with {option}={prepared[key]!r}, not {value!r}. Choose another folder"
            )
    try:
        source = request.open()
    except FileNotFoundError:
        if manifest["source"] == str(user_path(request.source).resolve()):
            say(f"{request.source} no longer exists; using its tokens in {folder}")
            return
        raise
    if source.stamp is None:  # a dataset, by name
        same = source.name == manifest["source"]
    else:
        same = source.stamp == manifest["stamp"] or census(source.read()).sha256 == manifest["documents"]["sha256"]
    if not same:
        raise ValueError(
            f"{folder} was prepared from {manifest['source']}, whose content differs from {request.source} now. "
            "Choose another folder, or remove this one to prepare it again"
        )
