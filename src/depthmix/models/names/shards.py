"""A checkpoint in shards, as Hugging Face writes it: files of limited size and an index, or one file."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from depthmix.models.names.checkpoint import INDEX
from depthmix.models.names.target import REMEDY, kind_of
from depthmix.models.names.tensor_file import Entry, TensorFile
from depthmix.models.saved import CONFIG, WEIGHTS
from depthmix.support.files import flush
from depthmix.support.terminal import Progress

SHARD_SIZE = "5GB"
UNITS = {"": 1, **{f"{prefix}B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))}}
UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Bytes, from words such as 5GB, 500MB and 2GiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    size = int(float(found[1]) * units.get(found[2].lower(), 0)) if found and len(found[1]) <= 15 else 0
    if size < 1:
        raise ValueError(f"shard size {text!r}; expected a number of bytes above 0 with a unit, such as 5GB or 500MB")
    return size


def check_new(folder: Path) -> Path:
    """Return the folder if it does not exist or is empty: several files cannot replace older ones at once."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder. {REMEDY}")
    if folder.is_dir() and (names := sorted(path.name for path in folder.iterdir())):
        kind = kind_of(folder)
        what = f"it has {names[0]}" if kind is None else f"it holds {kind}"
        raise ValueError(
            f"{folder} is not empty: {what}. Several files cannot replace others at once: {REMEDY.lower()} or remove "
            "this one; nothing was written"
        )
    return folder


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder next to `target`, which it becomes at the end; until then there is nothing in `target`."""
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir()
    try:
        yield part
        for path in part.iterdir():
            flush(path)
        flush(part)
        if target.is_dir():  # empty, or this is an error
            target.rmdir()
        part.replace(target)
        flush(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_shards(target: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], most: int) -> tuple[str, ...]:
    """Write a configuration and tensors, in files of at most `most` bytes of tensors. The names of the files."""
    entries = {name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    groups = divide(entries, most)
    files = [WEIGHTS] if len(groups) == 1 else [shard_name(i, len(groups)) for i in range(len(groups))]
    total = sum(entry.nbytes for entry in entries.values())
    with new_folder(check_new(target)) as folder, Progress(total) as progress:
        done = 0
        for file, names in zip(files, groups, strict=True):
            with TensorFile(folder / file, {name: entries[name] for name in names}) as content:
                for name in names:
                    content.put(name, tensors[name])
                    done += entries[name].nbytes
                    progress.update(done, f"writing {file}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")
        if len(groups) > 1:
            held = {name: file for file, names in zip(files, groups, strict=True) for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(held.items()))}
            write_json(folder / INDEX, index)
            files.append(INDEX)
        write_json(folder / CONFIG, config)
    return (*files, CONFIG)


def divide(entries: Mapping[str, Entry], most: int) -> list[list[str]]:
    """The names in groups of at most `most` bytes, in their order; a larger tensor is alone in its group."""
    groups: list[list[str]] = []
    size = 0
    for name, entry in entries.items():
        if not groups or size + entry.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += entry.nbytes
    return groups


def shard_name(index: int, count: int) -> str:
    stem, _, suffix = WEIGHTS.rpartition(".")
    return f"{stem}-{index + 1:05}-of-{count:05}.{suffix}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
