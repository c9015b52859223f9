"""A decoder on disk: a directory with `model.safetensors` and `config.json`. Nothing in it is ever executed, and a
function that its configuration names (`package.module:function`) is imported only if the caller allows it.

A save writes both files next to the old ones, flushes them, and renames the weights first. From then on the new weights
belong to `config.json.new`; before that the old ones belong to `config.json`. A configuration contains the size and the
SHA-256 of its weights, and a reader uses the one that matches. So a save that is interrupted anywhere leaves one model
intact.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from depthmix.mechanisms import kv_mechanism, mechanism
from depthmix.mechanisms.record import is_record, with_records
from depthmix.models.config import Choice, DecoderConfig
from depthmix.models.decoder import Decoder, SublayerLoop
from depthmix.models.segment import Segment
from depthmix.support.checks import check_device
from depthmix.support.files import FORMAT, beside, digest, flush, format_of, read_json, read_tensors, version

AGAIN = "Save or copy the model again"
WEIGHTS, CONFIG, STAGED = MODEL_FILES = "model.safetensors", "config.json", "config.json.new"
StrPath = str | os.PathLike[str]
M = TypeVar("M", bound=SublayerLoop)


def save_model(model: Decoder, directory: StrPath) -> None:
    """Write weights, in their dtypes, and configuration; an existing model stays intact until the end."""
    from safetensors.torch import save_file

    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with beside(folder / WEIGHTS) as weights, beside(folder / STAGED) as config:
        save_file(tensors, weights, {"format": "pt"})
        description = {
            "format": FORMAT,
            "depthmix": version(),
            "model": model.config.saved(),
            "weights": {"file": WEIGHTS, "bytes": weights.stat().st_size, "sha256": digest(weights)},
        }
        config.write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for part in (weights, config):
            flush(part)
        config.replace(folder / STAGED)
        flush(folder)
        weights.replace(folder / WEIGHTS)
        flush(folder)
        (folder / STAGED).replace(folder / CONFIG)
        flush(folder)


def load_model(
    directory: StrPath,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    functions: bool = False,
) -> Decoder:
    """Load a decoder that `save_model` wrote, in evaluation mode; `dtype` converts its parameters.

    Everything is read and checked before memory for a model is allocated. If its configuration names user-defined
    functions (options such as kernel and score), their modules are imported only with `functions=True`, since that runs
    their code.
    """
    return load_into(Decoder, directory, device, dtype, functions)


def load_segment(
    directory: StrPath,
    lo: int,
    hi: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    functions: bool = False,
) -> Segment:
    """Load executions lo … hi − 1 of a decoder that `save_model` wrote; see `Segment`. The rest is as in `load_model`.

    Only the segment's own tensors are read into memory. The whole file is read once, to check its SHA-256.
    """
    return load_into(lambda config: Segment(config, lo, hi), directory, device, dtype, functions)


def load_into(
    build: Callable[[DecoderConfig], M],
    directory: StrPath,
    device: torch.device | str,
    dtype: torch.dtype | None,
    functions: bool,
) -> M:
    folder = Path(directory)
    check_device(device)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist or is not a folder; expected a folder that save_model wrote")
    config = read_config(folder, functions)
    with torch.device("meta"):
        model = build(config)
    fill(model, folder, device, dtype)
    return model.eval()


def fill(
    model: SublayerLoop, folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> None:
    """Give a decoder or a segment the weights in `folder`, in place of its own."""
    expected = model.state_dict()
    tensors, _ = read_tensors(folder / WEIGHTS, AGAIN, expected if isinstance(model, Segment) else None)
    check_tensors(folder / WEIGHTS, tensors, expected)
    parameters = {name for name, _ in model.named_parameters()}
    moved = {
        name: tensor.to(device=device, dtype=dtype if name in parameters else None, copy=True)
        for name, tensor in tensors.items()
    }
    model.load_state_dict(with_records(model, moved), assign=True)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:  # counters, which are not saved
                setattr(module, name, torch.zeros_like(buffer, device=device))


def check_weights(folder: Path) -> None:
    """Check that the weights of a folder have the SHA-256 that its configuration contains."""
    read_config(folder)


def read_config(folder: Path, functions: bool = True) -> DecoderConfig:
    """The configuration that belongs to the weights of `folder`; `functions=False` rejects one that names functions."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file() and not (name == CONFIG and (folder / STAGED).is_file()):
            raise FileNotFoundError(f"no {name} in {folder}; expected {CONFIG} and {WEIGHTS}, which save_model writes")
    paths = [folder / name for name in (CONFIG, STAGED) if (folder / name).is_file()]
    problems = []
    for path in paths:
        description = read_description(path)
        problem = find_mismatch(folder / WEIGHTS, description["weights"])
        if problem is None:
            if not functions:
                refuse_functions(path, description["model"])
            try:
                return DecoderConfig.from_saved(description["model"], description["format"])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path} is not a valid configuration for this version: {error}") from error
        problems.append(problem)
    raise ValueError(problems[0])


def refuse_functions(path: Path, fields: Mapping[str, Any]) -> None:
    """Raise an error if a configuration names functions, before anything is imported."""
    for option, value in functions_in(fields):
        raise ValueError(
            f"{path} names the function {value} ({option}); loading this model imports it, which runs the code of its "
            "module. If you trust it, use load_model(directory, functions=True) or `depthmix generate --functions`"
        )


def functions_in(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Options of a configuration that name functions as `package.module:function`, with these names."""
    for child, get in (("mixer", mechanism), ("kv_mixer", kv_mechanism)):
        if fields.get(child) is not None:
            choice = Choice.of(fields[child])
            for option in get(choice.name).Config.functions:
                if ":" in (value := str(choice.options.get(option))):
                    yield f"{child}.{option}", value


def read_description(path: Path) -> dict[str, Any]:
    description = read_json(path, AGAIN)
    if not isinstance(description, dict) or "format" not in description:
        raise ValueError(f"{path} has no field 'format'; expected a file that save_model wrote")
    format_of(description, path)
    entries: dict[str, type]
    for field, entries in (("model", {}), ("weights", {"bytes": int, "sha256": str})):
        part = description.get(field)
        if not isinstance(part, dict) or not all(isinstance(part.get(key), kind) for key, kind in entries.items()):
            raise ValueError(f"{path} is damaged: the field {field!r} is missing or incomplete. {AGAIN}")
    return description


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


def list_first(words: list[str], most: int = 20) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
