"""`depthmix convert`: others' checkpoints, or their depth mixing, read and written."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from depthmix.cli.generate import saved_model
from depthmix.cli.shared import flag, open_run_folder, switch
from depthmix.mechanisms import DepthStack
from depthmix.models import Decoder, load_stack
from depthmix.models.io import map_model
from depthmix.models.names import (
    FORMATS,
    Converted,
    WholeFormat,
    convert_checkpoint,
    find_format,
    write_checkpoint,
)
from depthmix.models.names.shards import SHARD_SIZE, parse_size
from depthmix.models.names.target import kind_of
from depthmix.models.saved import AGAIN, CONFIG, MODEL, list_first
from depthmix.support.checks import import_package
from depthmix.support.files import read_object
from depthmix.support.terminal import print_wrapped, printable, say
from depthmix.training.build import disk_errors

EXAMPLES = (
    "depthmix convert runs/small out/fla --to fla",
    "depthmix convert out/fla out/mixers --from fla --json",
)
NAMES = ", ".join(FORMATS)


def run(
    source: Annotated[
        Path,
        tyro.conf.Positional,
        flag(
            "With --from, the folder of another project's checkpoint. With --to, that of a run of `depthmix train`, or "
            "one that `dm.save_model` or `dm.save_stack` wrote.",
            "SOURCE",
        ),
    ],
    target: Annotated[Path, tyro.conf.Positional, flag("The folder to write.", "TARGET")],
    *,
    from_: Annotated[
        str | None, flag(f"Read a checkpoint of this format: {NAMES}.", "NAME", default="", name="from")
    ] = None,
    to: Annotated[str | None, flag(f"Write a checkpoint of this format: {NAMES}.", "NAME", default="")] = None,
    shard_size: Annotated[
        str,
        flag(
            "With --to kimi_linear, the largest size of a file, such as 5GB or 500MB.",
            "NUMBER{MB,GB,GiB}",
        ),
    ] = SHARD_SIZE,
    json: Annotated[bool, switch("Print one JSON object.")] = False,
) -> int:
    """Read another project's checkpoint, or write one.

    kimi_linear is a whole model: load the result with `dm.load_model`. It is converted tensor by tensor and need not
    fit into memory. Of the other formats only the depth mixing is taken: load the result with `dm.load_stack`, and put
    it into a model of yours. What is written has the names and shapes of the other project; but for kimi_linear, it
    contains the mixers only.

    The target is a new folder, an empty one, or one that an earlier conversion of the same kind wrote. With --to
    kimi_linear it is a new or an empty one.
    """
    if (from_ is None) == (to is None):
        given = "neither" if from_ is None else f"--from {from_} and --to {to}"
        raise ValueError(f"got {given}; expected exactly one of --from NAME and --to NAME. Names: {NAMES}")
    check_shard_size(shard_size, to)
    with disk_errors():
        if from_ is not None:
            converted = convert_checkpoint(source, target, from_)
        else:
            assert to is not None
            converted = write_checkpoint(open_source(source), target, to, shard_size=shard_size)
    figures = describe(converted, source, target, read=from_, written=to)
    if json:
        print(json_format.dumps(figures, indent=2))
    else:
        print_figures(figures)
    say(printable(f"written to {target}: {list_first([*converted.files], 4)}"))
    return 0


def check_shard_size(size: str, to: str | None) -> None:
    """Raise an error for a size that means nothing: only whole models are written in several files."""
    parse_size(size)
    if size != SHARD_SIZE and (to is None or not isinstance(find_format(to), WholeFormat)):
        raise ValueError(
            f"--shard-size {size} without --to kimi_linear; expected it only there: nothing else has shards"
        )


def open_source(folder: Path) -> DepthStack | Decoder:
    """The stack or the decoder in a folder of depthmix."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist or is not a folder; expected a run, a saved model or a stack")
    if kind_of(folder) == "stack":
        return load_stack(folder)
    if (stack := stack_of_transformers(folder)) is not None:
        return stack
    place = saved_model(folder)
    if place is not None:
        return map_model(place)
    if (folder / "config.toml").is_file():
        return open_run_folder(folder, "cpu", functions=False).model
    raise FileNotFoundError(
        f"{folder} is neither the folder of a run of `depthmix train` (it has no config.toml) nor a folder written by "
        f"{MODEL.writer} or save_stack (it has no {CONFIG})"
    )


def stack_of_transformers(folder: Path) -> DepthStack | None:
    """The mixers of a run with --from-hf, or of a wrapped model that was saved; None for other folders."""
    for place in (folder, folder / "final"):
        path = place / CONFIG
        if path.is_file() and read_object(path, AGAIN, ()).get("model_type") == "depthmix_wrapped":
            import_package("transformers", "a wrapped model", "'depthmix[hf]'")
            from depthmix.hf.continued import load_continued

            stack: DepthStack = load_continued(place, torch.float32).depth_stack()
            return stack
    return None


def describe(
    converted: Converted, source: Path, target: Path, *, read: str | None, written: str | None
) -> dict[str, Any]:
    """What was converted, as plain JSON values."""
    module = converted.module
    stack = module if isinstance(module, DepthStack) else module.depth
    return {
        "source": str(source),
        "target": str(target),
        "from": read,
        "to": written,
        "mechanism": stack.registered,
        "dim": stack.dim,
        "depth": stack.depth,
        "options": stack.config.resolved(dim=stack.dim, depth=stack.depth),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "tensors": converted.tensors,
        "units": dict(converted.units),
        "notes": list(converted.notes),
    }


def print_figures(figures: dict[str, Any]) -> None:
    verb, name = ("read", figures["from"]) if figures["from"] else ("written", figures["to"])
    print_wrapped(
        f"{figures['mechanism']}, D = {figures['dim']}, {figures['depth']} sublayers: "
        f"{figures['tensors']} tensors of {name} {verb}, {figures['parameters']:,} parameters"
    )
    if figures["options"]:
        print_wrapped(f"options  {', '.join(f'{k}={v}' for k, v in figures['options'].items())}", indent="  ")
    if figures["units"]:
        print_wrapped(f"units    {' = '.join(f'{key} {value}' for key, value in figures['units'].items())}")
    for note in figures["notes"]:
        print_wrapped(f"- {note}", indent="  ")
