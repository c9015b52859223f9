"""The names of others' weights: checkpoints of other projects, read into depthmix and written from it."""

from __future__ import annotations

import importlib
from pathlib import Path

from depthmix.mechanisms import DepthStack
from depthmix.models.decoder import Decoder
from depthmix.models.io import save_model
from depthmix.models.names.base import Converted, Format
from depthmix.models.names.checkpoint import Checkpoint
from depthmix.models.names.target import check_target
from depthmix.models.saved import StrPath, write_pair
from depthmix.models.stack_files import save_stack
from depthmix.support.checks import did_you_mean
from depthmix.support.files import version

__all__ = ["FORMATS", "Converted", "Format", "find_format", "read_checkpoint", "save_converted", "write_checkpoint"]

FORMATS: dict[str, str] = {
    "kimi_k3": "depthmix.models.names.attnres:KimiK3",
    "fla": "depthmix.models.names.attnres:FlashLinearAttention",
    "deepseek_v4": "depthmix.models.names.deepseek_v4:DeepSeekV4",
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


def write_checkpoint(module: DepthStack | Decoder, target: StrPath, name: str) -> Converted:
    """Write a stack, or what the format `name` has of a decoder, under the names of that format."""
    form = find_format(name)
    folder = check_target(Path(target), name)
    converted = form.write(module)
    assert converted.config is not None
    assert converted.state is not None
    fields = {**converted.config, "depthmix": version(), "depthmix_format": name}
    write_pair(folder, fields, converted.state)
    return converted


def save_converted(converted: Converted, target: StrPath) -> None:
    """Write what was read as depthmix's own files: a stack with `save_stack`, a decoder with `save_model`."""
    folder, module = Path(target), converted.module
    if isinstance(module, DepthStack):
        save_stack(module, check_target(folder, "stack"))
    else:
        save_model(module, check_target(folder, "model"))
