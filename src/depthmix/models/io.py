"""A decoder on disk: a directory with `model.safetensors` and `config.json`. Nothing in it is ever executed, and a
function that its configuration names (`package.module:function`) is imported only if the caller allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from depthmix.mechanisms import kv_mechanism, mechanism
from depthmix.models.config import Choice, DecoderConfig
from depthmix.models.decoder import Decoder, SublayerLoop
from depthmix.models.saved import (
    AGAIN,
    MODEL,
    WEIGHTS,
    Content,
    StrPath,
    assign_tensors,
    check_tensors,
    find_description,
    write_folder,
)
from depthmix.models.segment import Segment
from depthmix.support.checks import check_device
from depthmix.support.files import read_tensors

M = TypeVar("M", bound=SublayerLoop)


def save_model(model: Decoder, directory: StrPath) -> None:
    """Write weights, in their dtypes, and configuration; an existing model stays intact until the end."""
    write_folder(Path(directory), MODEL, model.config.saved(), model.state_dict())


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


def map_model(directory: StrPath) -> Decoder:
    """As `load_model`, but the weights stay in their file until they are used: for one pass over them, of a model that
    need not fit into memory. The file must not be replaced meanwhile."""
    return load_into(Decoder, directory, "cpu", None, False, copy=False)


def load_into(
    build: Callable[[DecoderConfig], M],
    directory: StrPath,
    device: torch.device | str,
    dtype: torch.dtype | None,
    functions: bool,
    copy: bool = True,
) -> M:
    folder = Path(directory)
    check_device(device)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist or is not a folder; expected a folder that save_model wrote")
    config = read_config(folder, functions)
    with torch.device("meta"):
        model = build(config)
    fill(model, folder, device, dtype, copy)
    return model.eval()


def fill(
    model: SublayerLoop,
    folder: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    copy: bool = True,
) -> None:
    """Give a decoder or a segment the weights in `folder`, in place of its own."""
    expected = model.state_dict()
    tensors, _ = read_tensors(folder / WEIGHTS, AGAIN, expected if isinstance(model, Segment) else None)
    check_tensors(folder / WEIGHTS, tensors, expected)
    assign_tensors(model, tensors, device, dtype, copy)


def check_weights(folder: Path) -> None:
    """Check that the weights of a folder have the SHA-256 that its configuration contains."""
    read_config(folder)


def read_config(folder: Path, functions: bool = True) -> DecoderConfig:
    """The configuration that belongs to the weights of `folder`; `functions=False` rejects one that names functions."""
    path, description = find_description(folder, MODEL)
    if not functions:
        refuse_functions(path, description["model"])
    try:
        return DecoderConfig.from_saved(description["model"], description["format"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a valid configuration for this version: {error}") from error


def refuse_functions(path: Path, fields: Mapping[str, Any], content: Content = MODEL) -> None:
    """Raise an error if a configuration names functions, before anything is imported."""
    verb = " or `depthmix generate --functions`" if content == MODEL else ""
    for option, value in functions_in(fields):
        raise ValueError(
            f"{path} names the function {value} ({option}); loading this {content.field} imports it, which runs the "
            f"code of its module. If you trust it, use {content.loader}(directory, functions=True){verb}"
        )


def functions_in(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Options of a configuration that name functions as `package.module:function`, with these names."""
    for child, get in (("mixer", mechanism), ("kv_mixer", kv_mechanism)):
        if fields.get(child) is not None:
            choice = Choice.of(fields[child])
            for option in get(choice.name).Config.functions:
                if ":" in (value := str(choice.options.get(option))):
                    yield f"{child}.{option}", value
