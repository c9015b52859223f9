"""A folder with `model.safetensors` and `config.json`: how models and stacks are kept on disk.

A save writes both files next to the old ones, flushes them, and renames the weights first. From then on the new weights
belong to `config.json.new`; before that the old ones belong to `config.json`. A configuration contains the size and the
SHA-256 of its weights, and a reader uses the one that matches. So a save that is interrupted anywhere leaves one model
intact.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthmix.mechanisms.record import is_record, with_records
from depthmix.models.kinds import parameter_dtype
from depthmix.support.files import FORMAT, beside, digest, flush, format_of, read_json, version

AGAIN = "Save or copy the model again"
WEIGHTS, CONFIG, STAGED = MODEL_FILES = "model.safetensors", "config.json", "config.json.new"
StrPath = str | os.PathLike[str]


class Content(NamedTuple):
    """What a folder holds: the field of its configuration, and the functions that write and load it."""

    field: str
    writer: str
    loader: str


MODEL = Content("model", "save_model", "load_model")
STACK = Content("stack", "save_stack", "load_stack")


def write_folder(folder: Path, content: Content, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write weights, in their dtypes, and their description; what the folder held stays intact until the end."""
    write_pair(folder, {"format": FORMAT, "depthmix": version(), content.field: fields}, tensors)


def write_pair(folder: Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write weights, and a configuration of these fields with the size and the SHA-256 of the weights."""
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_sealed(folder, fields, lambda path: save_file(plain, path, {"format": "pt"}))


def write_sealed(folder: Path, fields: Mapping[str, Any], write: Callable[[Path], None]) -> None:
    """As `write_pair`, with weights that `write` writes to a path."""
    folder.mkdir(parents=True, exist_ok=True)
    with beside(folder / WEIGHTS) as weights, beside(folder / STAGED) as config:
        write(weights)
        sealed = {"file": WEIGHTS, "bytes": weights.stat().st_size, "sha256": digest(weights)}
        description = {**fields, "weights": sealed}
        config.write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for part in (weights, config):
            flush(part)
        config.replace(folder / STAGED)
        flush(folder)
        weights.replace(folder / WEIGHTS)
        flush(folder)
        (folder / STAGED).replace(folder / CONFIG)
        flush(folder)


def find_description(folder: Path, content: Content) -> tuple[Path, dict[str, Any]]:
    """The description that belongs to the weights of `folder`, and its file."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file() and not (name == CONFIG and (folder / STAGED).is_file()):
            refuse_foreign(folder, content)
            raise FileNotFoundError(
                f"no {name} in {folder}; expected {CONFIG} and {WEIGHTS}, which {content.writer} writes"
            )
    paths = [folder / name for name in (CONFIG, STAGED) if (folder / name).is_file()]
    problems = []
    for path in paths:
        description = read_description(path, content)
        problem = find_mismatch(folder / WEIGHTS, description["weights"])
        if problem is None:
            return path, description
        problems.append(problem)
    raise ValueError(problems[0])


def read_description(path: Path, content: Content) -> dict[str, Any]:
    description = read_json(path, AGAIN)
    if not isinstance(description, dict) or "format" not in description:
        raise not_ours(path, description, content)
    format_of(description, path)
    for other in (MODEL, STACK):
        if content != other and content.field not in description and other.field in description:
            raise ValueError(
                f"{path.parent} holds a {other.field}, not a {content.field}: {other.writer} wrote it. Load it with "
                f"{other.loader}"
            )
    entries: dict[str, type]
    for field, entries in ((content.field, {}), ("weights", {"bytes": int, "sha256": str})):
        part = description.get(field)
        if not isinstance(part, dict) or not all(isinstance(part.get(key), kind) for key, kind in entries.items()):
            raise ValueError(f"{path} is damaged: the field {field!r} is missing or incomplete. {AGAIN}")
    return description


def refuse_foreign(folder: Path, content: Content) -> None:
    """Raise the error about another project's checkpoint where its weights have other file names, as shards have."""
    if (folder / CONFIG).is_file() and not (folder / STAGED).is_file():
        description = read_json(folder / CONFIG, AGAIN)
        if isinstance(description, dict) and "format" not in description and "model_type" in description:
            raise not_ours(folder / CONFIG, description, content)


def not_ours(path: Path, description: Any, content: Content) -> ValueError:
    """The error for a configuration that depthmix did not write; it says what can be taken from such a checkpoint."""
    kind = description.get("model_type") if isinstance(description, dict) else None
    if kind is None:
        return ValueError(f"{path} has no field 'format'; expected a file that {content.writer} wrote")
    return ValueError(
        f"{path} describes another project's model (model_type {kind!r}), not one that {content.writer} wrote. "
        "Of such models depthmix takes what it knows, Kimi Linear as a whole and the depth mixing of some others: "
        "depthmix convert SOURCE TARGET --from NAME"
    )


def find_mismatch(path: Path, expected: Mapping[str, Any]) -> str | None:
    """What is wrong with a weights file, by its size and then its content; None if nothing is."""
    size = path.stat().st_size
    if size != expected["bytes"]:
        what = "truncated or from another save" if size < expected["bytes"] else "from another save"
        return f"{path} has {size} bytes; {CONFIG} expects {expected['bytes']}. It is {what}: copy both files again"
    if digest(path) != expected["sha256"]:
        return f"{path} is damaged or from another save: its SHA-256 is not the one in {CONFIG}. Copy both files again"
    return None


def check_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    missing = [name for name in missing if not is_record(name)]  # not in files of 0.1.0
    problems = [f"{what}: {list_first(names)}" for what, names in (("missing", missing), ("extra", extra)) if names]
    wrong = []
    for name in sorted(expected.keys() & tensors.keys()):
        got, want = tensors[name], expected[name]
        if got.shape != want.shape and not is_record(name):
            wrong.append(f"{name} has shape {list(got.shape)}, expected {list(want.shape)}")
        elif got.is_floating_point() != want.is_floating_point():
            wrong.append(f"{name} is {got.dtype}, expected {want.dtype}")
    if wrong:
        problems.append(list_first(wrong))
    if problems:
        raise ValueError(f"{path} does not match its configuration: {'; '.join(problems)}. Nothing was loaded")


def assign_tensors(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    copy: bool = True,
) -> None:
    """Give a module on the meta device these tensors, which `check_tensors` has accepted; `dtype` is for parameters."""
    dtypes = {} if dtype is None else {name: parameter_dtype(name, dtype) for name, _ in module.named_parameters()}
    moved = {name: tensor.to(device=device, dtype=dtypes.get(name), copy=copy) for name, tensor in tensors.items()}
    module.load_state_dict(with_records(module, moved), assign=True)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:  # counters, which are not saved
                setattr(part, name, torch.zeros_like(buffer, device=device))


def list_first(words: list[str], most: int = 20) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
