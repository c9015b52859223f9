"""A bare stack on disk: a folder with the weights of its mixers and a configuration that says what they compute.

The mixers of your own model, or of a checkpoint that `depthmix convert` has read, without attention and MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from depthmix.mechanisms import DepthStack
from depthmix.mechanisms.registry import lookup
from depthmix.models.config import Choice
from depthmix.models.io import refuse_functions
from depthmix.models.saved import (
    AGAIN,
    STACK,
    WEIGHTS,
    StrPath,
    assign_tensors,
    check_tensors,
    find_description,
    write_folder,
)
from depthmix.support.checks import check_device
from depthmix.support.files import read_tensors

FIELDS = ("mixer", "dim", "depth", "kinds", "order")  # of a stack in its configuration


def save_stack(stack: DepthStack, directory: StrPath) -> None:
    """Write the weights of a stack, in their dtypes, and its mechanism with every option; an existing stack in the
    folder stays intact until the end."""
    check_whole(stack)
    write_folder(Path(directory), STACK, describe_stack(stack), stack.state_dict())


def load_stack(
    directory: StrPath,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    functions: bool = False,
) -> DepthStack:
    """Load a stack that `save_stack` wrote, in evaluation mode; `dtype` converts its parameters.

    Everything is read and checked before memory for the stack is allocated. If its configuration names user-defined
    functions (options such as kernel and score), their modules are imported only with `functions=True`, since that runs
    their code.
    """
    folder = Path(directory)
    check_device(device)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist or is not a folder; expected a folder that save_stack wrote")
    path, description = find_description(folder, STACK)
    fields = description["stack"]
    if missing := [f"stack.{name}" for name in FIELDS if name not in fields]:
        raise ValueError(f"{path} has no {', '.join(missing)}; expected what save_stack writes. {AGAIN}")
    if not functions:
        refuse_functions(path, fields, STACK)
    try:
        stack = empty_stack(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a valid configuration for this version: {error}") from error
    tensors, _ = read_tensors(folder / WEIGHTS, AGAIN)
    check_tensors(folder / WEIGHTS, tensors, stack.state_dict())
    assign_tensors(stack, tensors, device, dtype)
    return stack.eval()


def describe_stack(stack: DepthStack) -> dict[str, Any]:
    """The configuration of a stack, with every option of its mechanism, so that new defaults do not change it."""
    options = stack.config.resolved(dim=stack.dim, depth=stack.depth)
    kinds = [mixer.site.kind for mixer in stack]
    values = ({"name": stack.registered, **options}, stack.dim, stack.depth, kinds, stack.order)
    return dict(zip(FIELDS, values, strict=True))


def empty_stack(fields: Mapping[str, Any]) -> DepthStack:
    """The stack that a configuration describes, on the meta device."""
    choice = Choice.of(fields["mixer"])
    with torch.device("meta"):
        return DepthStack(
            choice.name,
            dim=fields["dim"],
            depth=fields["depth"],
            kinds=fields["kinds"],
            order=fields["order"],
            **choice.options,
        )


def check_whole(stack: DepthStack, caller: str = "save_stack") -> None:
    """Raise an error for what could not be loaded again."""
    if not isinstance(stack, DepthStack):
        raise TypeError(f"{caller} got a {type(stack).__name__}; expected a DepthStack, such as model.depth")
    if len(stack) != stack.depth:
        raise ValueError(
            f"{caller} got a slice, sublayers {stack.lo} to {stack.hi - 1} of {stack.depth}; expected the whole stack"
        )
    cls: type = type(stack[0])
    known: Any = lookup(stack.registered)
    if known is None or known.resolve(stack.config) is not cls:
        raise ValueError(
            f"{caller} got mixers of the class {cls.__name__}, which is not registered, so nobody could load them "
            "again. Register it in the entry-point group depthmix.mechanisms, or keep the stack's state_dict()"
        )
