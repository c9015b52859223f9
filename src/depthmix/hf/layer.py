"""A layer of transformers whose additions to the stream a mechanism replaces.

The family's own `forward` runs unchanged. Hooks on its submodules do the mixing: what a writer returns is written, and
a reader gets the next read instead of the family's own sum. From layer to layer travels `(x, state, kv)` in the place
of the hidden states: x is the layer's own sum, which only `output_hidden_states` shows. The first layer takes a tensor
and the last one returns one, so the rest of the model is untouched.

Axes: B batch, T token, D channel.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from depthmix.hf.families import Family
from depthmix.hf.kv import OWNER, Deferred
from depthmix.mechanisms import DepthStack, State

MIXERS, VALUE_MIXER = "depthmix", "depthmix_kv"  # names of the modules that a wrapped layer has besides its own


class Run:
    """One pass through one layer: what its hooks share."""

    def __init__(self, stack: DepthStack, plan: LayerPlan, state: State, kv: State) -> None:
        self.mixers = [*stack.runs.values()]  # not `iter(stack)`: PEFT may have put a wrapper there
        self.parallel, self.scale = plan.family.parallel, plan.scale
        self.state, self.kv = state, kv
        self.branch: Tensor | None = None  # the first of two parallel ones
        self.site = 0
        self.h, self.carry = self.mixers[0].read(state)

    def write(self, y: Tensor) -> None:
        """After a writer has returned: write its output and read for the next sublayer."""
        if self.scale is not None:
            y = y * self.scale
        if self.parallel:
            if self.branch is None:
                self.branch = y
                return
            y = self.branch + y
        self.state = self.mixers[self.site].write(self.state, self.carry, y)
        self.site += 1
        if self.site < len(self.mixers):
            self.h, self.carry = self.mixers[self.site].read(self.state)


@dataclass
class LayerPlan:
    """What a wrapped layer knows of itself, and the hooks that `unwrap` removes."""

    family: Family
    scale: float | None
    cache_name: str  # of the argument of `forward`
    arguments: tuple[str, ...]  # names of those of `forward` after the hidden states
    hooks: list[Any] = field(default_factory=list)
    run: Run | None = None
    deferred: Deferred | None = None


class WrappedLayer(nn.Module):
    """Stands before the family's layer class. Its methods that hooks call are bound to it, never closures: a deep copy
    of the model then copies them with their layer."""

    plan: LayerPlan

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        stack: DepthStack = getattr(self, MIXERS)
        if isinstance(hidden_states, tuple):
            _, state, kv = hidden_states
        else:
            state, kv = stack.begin(hidden_states), self.begin_values()
        run = Run(stack, self.plan, state, kv)
        self.plan.run = run
        try:
            out = self.layer_forward(run.h, *args, **kwargs)
        finally:
            self.plan.run = None
        if run.site != len(run.mixers):
            raise RuntimeError(
                f"{type(self).__name__} wrote {run.site} of {len(run.mixers)} sublayers: this version of transformers "
                "computes it in another way than depthmix knows. Please report it with both versions"
            )
        x, *others = out if isinstance(out, tuple) else (out,)
        new = (x, run.state, run.kv) if stack.out is None else stack.end(run.state)
        return (new, *others) if isinstance(out, tuple) else new

    def layer_forward(self, h: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(h, *args, **kwargs)

    def begin_values(self) -> State:
        return ()

    def read_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.plan.run
        if run is None:
            return None
        if args:
            return (run.h, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": run.h}

    def write_hook(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        run = self.plan.run
        if run is not None:
            run.write(out[0] if isinstance(out, tuple) else out)


class MixingLayer(WrappedLayer):
    """A wrapped layer whose attention mixes values over depth."""

    def begin_values(self) -> State:
        state: State = getattr(self, VALUE_MIXER).begin()
        return state

    def layer_forward(self, h: Tensor, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan
        kwargs = {**kwargs, **dict(zip(plan.arguments, args, strict=False))}
        plan.deferred = kwargs[plan.cache_name] = Deferred(kwargs.get(plan.cache_name))
        try:
            out = super().layer_forward(h, **kwargs)
            if not plan.deferred.attended:
                raise RuntimeError(
                    f"the attention of {type(self).__name__} ran without mixing values: set its implementation with "
                    "model.set_attn_implementation, not in the configuration"
                )
        finally:
            plan.deferred = None
        return out

    def mix_values(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to, from those of the new tokens: mixed first, then cached."""
        run, deferred = self.plan.run, self.plan.deferred
        assert run is not None
        assert deferred is not None
        v, run.kv = getattr(self, VALUE_MIXER).mix(q, k, v, run.kv)
        return deferred.put(k, v)


@functools.cache
def layer_class(base: type, mixes_values: bool) -> type:
    """The class of a wrapped layer. It has the name of the family's: `_no_split_modules` and the policies of FSDP look
    for names; and its module, whose source transformers reads to learn what a class supports."""
    first: type = MixingLayer if mixes_values else WrappedLayer
    return type(base.__name__, (first, base), {"__module__": base.__module__, "base": base})


def wrap_layer(layer: nn.Module, family: Family, mixers: DepthStack, value_mixer: nn.Module | None) -> None:
    """Put mixers and hooks into a layer and change its class."""
    names = tuple(inspect.signature(type(layer).forward).parameters)[2:]
    cache_name = "layer_past" if "layer_past" in names else "past_key_values"
    scale = getattr(layer, family.scale) if family.scale else None
    plan = LayerPlan(family=family, scale=scale, cache_name=cache_name, arguments=names)
    parts = find_parts(layer, family)
    layer.add_module(MIXERS, mixers)
    if value_mixer is not None:
        layer.add_module(VALUE_MIXER, value_mixer)
        parts.attention.__dict__[OWNER] = (layer,)  # in a tuple: not as a submodule
    layer.__dict__["plan"] = plan
    for reader in parts.readers:
        hook = bound(WrappedLayer.read_hook, layer)
        plan.hooks.append(reader.register_forward_pre_hook(hook, with_kwargs=True))
    for writer in parts.writers:
        plan.hooks.append(writer.register_forward_hook(bound(WrappedLayer.write_hook, layer)))
    layer.__dict__.pop("forward", None)  # some versions leave one behind, which would hide the class's
    base: Any = type(layer)
    layer.__class__ = layer_class(base, value_mixer is not None)


def unwrap_layer(layer: Any) -> None:
    for hook in layer.plan.hooks:
        hook.remove()
    layer.__dict__.pop("forward", None)
    find_parts(layer, layer.plan.family).attention.__dict__.pop(OWNER, None)
    for name in (MIXERS, VALUE_MIXER):
        layer._modules.pop(name, None)
    del layer.__dict__["plan"]
    layer.__class__ = type(layer).base


class Parts(NamedTuple):
    """The submodules of a layer that its family names."""

    writers: list[nn.Module]
    readers: list[nn.Module]
    attention: nn.Module


def find_parts(layer: nn.Module, family: Family) -> Parts:
    """Also a check, before anything is changed, that this version of transformers builds the layer as we know it."""
    return Parts(
        [find_part(layer, names) for names in family.writers],
        [find_part(layer, (name,)) for name in family.readers],
        find_part(layer, family.attention),
    )


def find_part(layer: nn.Module, names: tuple[str, ...]) -> nn.Module:
    for name in names:
        if isinstance(part := getattr(layer, name, None), nn.Module):
            return part
    raise ValueError(
        f"{type(layer).__name__} has no {' or '.join(names)}: this version of transformers builds the layer in another "
        "way than depthmix knows. Please report it with both versions"
    )


def bound(method: Callable[..., Any], layer: nn.Module) -> Any:
    return types.MethodType(method, layer)
