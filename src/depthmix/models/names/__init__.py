"""The names of others' weights: checkpoints of other projects, read into depthmix and written from it."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

from depthmix.mechanisms import DepthStack
from depthmix.models.decoder import Decoder
from depthmix.models.io import save_model
from depthmix.models.names.base import Converted, Format, WholeFormat
from depthmix.models.names.checkpoint import Checkpoint
from depthmix.models.names.shards import SHARD_SIZE, check_new, parse_size, write_shards
from depthmix.models.names.target import check_target
from depthmix.models.saved import StrPath, write_pair
from depthmix.models.stack_files import save_stack
from depthmix.support.checks import did_you_mean
from depthmix.support.files import version

__all__ = [
    "FORMATS",
    "Converted",
    "Format",
    "WholeFormat",
    "convert_checkpoint",
    "find_format",
    "read_checkpoint",
    "save_converted",
    "write_checkpoint",
]

FORMATS: dict[str, str] = {
    "kimi_k3": "depthmix.models.names.attnres:KimiK3",
    "fla": "depthmix.models.names.attnres:FlashLinearAttention",
    "deepseek_v4": "depthmix.models.names.deepseek_v4:DeepSeekV4",
    "kimi_linear": "depthmix.models.names.kimi_linear:KimiLinear",
}


def find_format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(
            f"unknown format of checkpoints {name!r}. {did_you_mean(name, FORMATS)}Known: {', '.join(FORMATS)}"
        )
    module, _, attribute = FORMATS[name].partition(":")
    made: Format = getattr(importlib.import_module(module), attribute)()
    return made


def read_checkpoint(source: StrPath, name: str) -> Converted:
    """What depthmix can take from a checkpoint in the format `name`: `.module` is a stack or a decoder."""
    return find_format(name).read(Checkpoint.open(Path(source)))


def convert_checkpoint(source: StrPath, target: StrPath, name: str) -> Converted:
    """`read_checkpoint` and `save_converted` in one: a whole model is written tensor by tensor and need not fit into
    memory; `.module` is then on the meta device."""
    form, folder = find_format(name), Path(target)
    if isinstance(form, WholeFormat):
        return form.save(Checkpoint.open(Path(source)), check_target(folder, "model"))
    converted = read_checkpoint(source, name)
    save_converted(converted, folder)
    return converted


def write_checkpoint(
    module: DepthStack | Decoder, target: StrPath, name: str, *, shard_size: str = SHARD_SIZE
) -> Converted:
    """Write a stack or a decoder, or what the format `name` has of it, under the names of that format.

    A whole model is written in files of at most `shard_size`, such as 5GB, with an index if they are several.
    """
    form, folder, most = find_format(name), Path(target), parse_size(shard_size)
    whole = isinstance(form, WholeFormat)
    folder = check_new(folder) if whole else check_target(folder, name)
    converted = form.write(module)
    assert converted.config is not None
    assert converted.state is not None
    fields = {**converted.config, "depthmix": version(), "depthmix_format": name}
    if whole:
        return dataclasses.replace(converted, files=write_shards(folder, fields, converted.state, most))
    write_pair(folder, fields, converted.state)
    return converted


def save_converted(converted: Converted, target: StrPath) -> None:
    """Write what was read as depthmix's own files: a stack with `save_stack`, a decoder with `save_model`."""
    folder, module = Path(target), converted.module
    if isinstance(module, DepthStack):
        save_stack(module, check_target(folder, "stack"))
    else:
        save_model(module, check_target(folder, "model"))
