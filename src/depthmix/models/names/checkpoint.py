"""Another project's checkpoint: a folder with `config.json` and safetensors, in one file or in shards with an index.

Only the tensors that are asked for are read, and one file is open at a time: of a checkpoint of many shards, those that
hold none of them need not be there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from depthmix.models.saved import CONFIG, STAGED, WEIGHTS, find_mismatch, list_first
from depthmix.support.checks import is_finite
from depthmix.support.files import read_json, read_object

AGAIN = "Copy or download the checkpoint again"
INDEX = f"{WEIGHTS}.index.json"
FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose tensors are read by name.

    config: the content of config.json.
    files: the file that holds each tensor.
    """

    folder: Path
    config: Mapping[str, Any]
    files: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} does not exist or is not a folder; expected that of a checkpoint")
        return cls(folder=folder, config=read_config(folder), files=find_files(folder))

    @property
    def path(self) -> Path:
        """The configuration's file, for errors about its fields."""
        return self.folder / CONFIG

    def read(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The tensors with these names and shapes, in the dtypes of their files."""
        self.check(shapes)
        tensors = dict(self.tensors(shapes))
        return {name: tensors[name] for name in shapes}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.dtype]:
        """The dtypes of the tensors with these names and shapes, by the headers of their files."""
        self.check_names(shapes)
        dtypes: dict[str, torch.dtype] = {}
        problems: list[str] = []
        for file, here in self.by_file(shapes).items():
            if not (self.folder / file).is_file():
                raise FileNotFoundError(f"{self.folder / file} is missing; it holds {list_first(here, 4)}. {AGAIN}")
            with open_file(self.folder / file) as content:
                held = set(content.keys())
                for name in here:
                    if problem := find_problem(content, held, name, shapes[name]):
                        problems.append(f"{problem} ({file})")
                    else:
                        dtypes[name] = getattr(torch, FLOATS[content.get_slice(name).get_dtype()])
        if problems:
            raise ValueError(f"{self.folder} does not match its {CONFIG}: {list_first(problems, 4)}. {AGAIN}")
        return dtypes

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, file by file; `check` has accepted them."""
        for file, here in self.by_file(names).items():
            with open_file(self.folder / file) as content:
                for name in here:
                    yield name, content.get_tensor(name)

    def by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The names in each file that holds some of them."""
        held: dict[str, list[str]] = {}
        for name in names:
            held.setdefault(self.files[name], []).append(name)
        return dict(sorted(held.items()))

    def check_names(self, wanted: Iterable[str]) -> None:
        if missing := [name for name in wanted if name not in self.files]:
            raise ValueError(
                f"{self.folder} does not match its {CONFIG}, by which it has {list_first(missing, 4)} too. {AGAIN}"
            )

    def number(self, fields: Mapping[str, Any], name: str, kind: type, remedy: str = "", *, zero: bool = False) -> Any:
        """A number above 0 of the configuration, or 0 if `zero`; `fields` may be a part of the configuration."""
        value: Any = fields.get(name)
        fits = is_finite(value) and (isinstance(value, int) or kind is float)
        if not fits or value < 0 or (value == 0 and not zero):
            what = f"a {'whole ' if kind is int else ''}number {'from 0' if zero else 'above 0'}"
            raise ValueError(f"{self.path} has {name}={value!r}; expected {what}{'. ' + remedy if remedy else ''}")
        return value


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration. Of a folder that depthmix wrote, the one that belongs to the weights."""
    paths = [folder / name for name in (CONFIG, STAGED) if (folder / name).is_file()]
    if not paths:
        raise FileNotFoundError(f"no {CONFIG} in {folder}; expected {CONFIG} and safetensors files of a checkpoint")
    problem = None
    for path in paths:
        config = read_object(path, AGAIN)
        sealed = config.get("weights") if "depthmix" in config else None
        if "format" in config and sealed is not None:
            raise ValueError(
                f"{path} was written by save_model or save_stack; expected another project's checkpoint. To write "
                "its mixers as one, use --to NAME"
            )
        if not is_seal(sealed) or not (folder / WEIGHTS).is_file():
            return config
        found = find_mismatch(folder / WEIGHTS, sealed)
        if found is None:
            return config
        problem = problem or found
    raise ValueError(f"{problem}")


def is_seal(sealed: Any) -> TypeGuard[dict[str, Any]]:
    """Whether these are the size and the SHA-256 of weights, as `write_pair` writes them."""
    kinds = {"bytes": int, "sha256": str}
    return isinstance(sealed, dict) and all(isinstance(sealed.get(key), kind) for key, kind in kinds.items())


def find_files(folder: Path) -> dict[str, str]:
    """The file of every tensor: one file of weights, or as the index of the shards says."""
    if (folder / WEIGHTS).is_file():
        with open_file(folder / WEIGHTS) as content:
            return dict.fromkeys(content.keys(), WEIGHTS)
    if (folder / INDEX).is_file():
        return read_index(folder / INDEX)
    pickled = next(iter(sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])), None)
    hint = "" if pickled is None else f" {pickled.name} is pickled, which can run code and is never read."
    raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}; expected a checkpoint in safetensors.{hint}")


def read_index(path: Path) -> dict[str, str]:
    index = read_json(path, AGAIN)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path} is damaged: it has no weight_map of tensors and their files. {AGAIN}")
    for name, file in files.items():
        plain = isinstance(file, str) and not set(file) & {"/", "\\", ":", "\0"} and file.endswith(".safetensors")
        if not plain:
            raise ValueError(
                f"{path} says that {name} is in {file!r}; expected the name of a safetensors file in the same folder"
            )
    return files


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as content:
            yield content
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated, damaged or not a safetensors file ({error}). {AGAIN}") from error


def find_problem(content: Any, held: set[str], name: str, shape: tuple[int, ...]) -> str | None:
    """What is wrong with a tensor, by the header of its file."""
    if name not in held:
        return f"{name} is not in its file, though the index says so"
    header = content.get_slice(name)
    if header.get_dtype() not in FLOATS:
        return f"{name} has dtype {header.get_dtype()}, expected one of {', '.join(FLOATS.values())}"
    if tuple(header.get_shape()) != shape:
        return f"{name} has shape {header.get_shape()}, expected {list(shape)}"
    return None
