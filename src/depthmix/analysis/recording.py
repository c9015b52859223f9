"""Record one forward pass through the protocol: what each site reads, computes and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.mechanisms import DepthMixer, DepthStack, DividedModel, KVMixer, KVStack, State


@dataclass
class Record:
    """One forward pass of a stack."""

    embedding: Tensor | None = None
    inputs: dict[int, Tensor] = field(default_factory=dict)
    coefficients: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)  # y, in the stream's dtype
    written: dict[int, Tensor] = field(default_factory=dict)  # what `value` makes of it


@contextmanager
def recording(stack: DepthStack) -> Iterator[Record]:
    """While open, the stack's mixers run coeff → combine → value → update, never a fast path, and are recorded.

    With gradients enabled the model's own pass runs, for its graph, and the coefficients are computed separately.
    """
    record = Record()

    def begin(x: Tensor) -> State:
        if record.embedding is not None:
            raise ValueError("begin was called twice; expected one forward pass per trace")
        record.embedding = x.detach().clone()
        return type(stack).begin(stack, x)

    def read(mixer: DepthMixer, state: State) -> tuple[Tensor, Any]:
        site = mixer.site.index
        if site in record.inputs:
            raise ValueError(
                f"site {site} was read twice; expected one forward pass per trace, with a mixer for each execution"
            )
        if record.embedding is None:
            raise ValueError(f"{stack.name}: the stack's begin was not called; expected it before site {site} is read")
        if site != len(record.inputs):
            raise ValueError(f"site {site} was read after {len(record.inputs)} others; expected the sites in order")
        if len(record.written) < site:
            raise ValueError(f"site {site - 1} was not written; expected a write after each read, before site {site}")
        mixer.check_state(state)
        essential = state[: mixer.expects.essential]
        with torch.no_grad():
            c = mixer.coeff(essential)
        h, carry = type(mixer).read(mixer, state) if torch.is_grad_enabled() else (mixer.combine(essential, c), None)
        # Copies: a sublayer may work on h in place, and some coefficients are parameters, which may change or be freed.
        record.coefficients[site], record.inputs[site] = copy_coefficients(c), h.detach().clone()
        return h, carry

    def write(mixer: DepthMixer, state: State, carry: Any, y: Tensor) -> State:
        site = mixer.site.index
        if site in record.written:
            raise ValueError(f"site {site} was written twice; expected one forward pass per trace")
        essential = state[: mixer.expects.essential]
        y = mixer.checked_output(essential, y)
        with torch.no_grad():
            c, v = mixer.value(essential, record.coefficients[site], y)
        record.coefficients[site] = copy_coefficients(c)
        record.outputs[site] = y.detach().clone()
        record.written[site] = record.outputs[site] if v is y else v.detach().clone()
        return type(mixer).write(mixer, state, carry, y) if torch.is_grad_enabled() else mixer.update(essential, c, v)

    with replaced(stack, begin, read, write):
        yield record


@contextmanager
def replaced(
    stack: DepthStack,
    begin: Callable[[Tensor], State],
    read: Callable[[DepthMixer, State], tuple[Tensor, Any]],
    write: Callable[[DepthMixer, State, Any, Tensor], State],
) -> Iterator[None]:
    """While open, a stack and its mixers run these instead of their methods (or of earlier replacements)."""
    before: list[tuple[nn.Module, str, Any]] = []

    def patch(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        before.append((module, name, vars(module).get(name)))
        setattr(module, name, function)  # an instance attribute: it hides the method until it is deleted

    try:
        patch(stack.entry, "begin", begin)
        for mixer in stack.all_mixers():
            patch(mixer, "read", lambda state, m=mixer: read(m, state))
            patch(mixer, "write", lambda state, c, y, m=mixer: write(m, state, c, y))
        yield
    finally:
        for module, name, function in reversed(before):
            delattr(module, name) if function is None else setattr(module, name, function)


@contextmanager
def recording_values(model: nn.Module) -> Iterator[list[tuple[KVMixer, Any, Tensor]]]:
    """While open, each run of a value mixer is recorded: the mixer, its coefficients and the key beside the value."""
    layers: list[tuple[KVMixer, Any, Tensor]] = []

    def recording_coeff(mixer: KVMixer) -> Callable[[Tensor, Tensor, State], Any]:
        def coeff(q: Tensor, k: Tensor, kv: State) -> Any:
            c = type(mixer).coeff(mixer, q, k, kv)
            layers.append((mixer, copy_coefficients(c), k.detach()))
            return c

        return coeff

    mixers = value_mixers(model)
    try:
        for mixer in mixers:
            mixer.coeff = recording_coeff(mixer)  # type: ignore[method-assign, assignment]
        yield layers
    finally:
        for mixer in mixers:
            mixer.__dict__.pop("coeff", None)


def value_mixers(model: nn.Module) -> list[KVMixer]:
    """Those of all executions of attention, also those that share another one's parameters."""
    for module in model.modules():
        if isinstance(module, DividedModel):
            return module.value_mixers()
    parts = [part for m in model.modules() for part in (m if isinstance(m, KVStack) else [m])]
    return list(dict.fromkeys(m for m in parts if isinstance(m, KVMixer)))


def find_stack(model: nn.Module) -> DepthStack:
    """The stack of a model; of one whose layers hold slices of it, the joined one."""
    for module in model.modules():
        if isinstance(module, DividedModel):
            return module.depth_stack()
    stacks = {name: m for name, m in model.named_modules() if isinstance(m, DepthStack)}
    if len(stacks) != 1:
        names = f" ({', '.join(stacks)})" if stacks else ""
        raise ValueError(f"{type(model).__name__} contains {len(stacks)} DepthStacks{names}; expected exactly one")
    return next(iter(stacks.values()))


def copy_coefficients(c: Any) -> Any:
    """A copy: some coefficients are parameters, which the next optimiser step changes."""
    if isinstance(c, Tensor):
        return c.detach().clone()
    if isinstance(c, tuple):
        parts = [copy_coefficients(part) for part in c]
        return type(c)(*parts) if hasattr(c, "_fields") else tuple(parts)
    return c
