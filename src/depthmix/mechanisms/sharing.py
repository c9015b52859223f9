"""Mixers that share parameters across the executions of a sublayer, so that a loop can run any number of times."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

FIRST = "first"  # the name of execution 0 if later executions of its sublayer have other parameters


def share_parameters(name: str, mixers: Sequence[nn.Module], order: Sequence[int]) -> list[str]:
    """Let all executions of a sublayer use the parameters of its first one, and name each by its sublayer.

    They share the parameter dictionaries, not only the entries: whatever replaces a parameter (a cast, FSDP2,
    torch.func, loading by assignment) replaces it for all. `order` is the sublayer of each execution.

    Execution 0 reads only the embedding. If its parameters therefore differ from those of later executions of its
    sublayer, it keeps its own, under the name "first".
    """
    names = [str(sublayer) for sublayer in order]
    again = [i for i, sublayer in enumerate(order) if i and sublayer == order[0]]
    if again and layout(mixers[0]) != layout(mixers[again[0]]):
        names[0] = FIRST
    owners: dict[str, int] = {}
    for i, (key, mixer) in enumerate(zip(names, mixers, strict=True)):
        owner = mixers[owners.setdefault(key, i)]
        if layout(owner) != layout(mixer):
            raise ValueError(
                f"{name}: the mixers of sublayer {key} cannot be shared: they have {describe(owner)} at execution "
                f"{owners[key]} and {describe(mixer)} at execution {i}. Parameters that depend on the number of "
                "sources need a mixer for each execution: do not set share_mixers (or order), or choose other options"
            )
        for part in ("_parameters", "_buffers", "_modules"):
            mixer.__dict__[part] = owner.__dict__[part]
    return names


def layout(mixer: nn.Module) -> dict[str, tuple[int, ...]]:
    tensors = (*mixer.named_parameters(), *mixer.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def describe(mixer: nn.Module) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in layout(mixer).items()) or "no parameters"
