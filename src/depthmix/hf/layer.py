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
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthmix.hf.families import Family
from depthmix.hf.kv import OWNER, Deferred
from depthmix.mechanisms import DepthStack, State

MIXERS, VALUE_MIXER = "depthmix", "depthmix_kv"  # names of the modules that a wrapped layer has besides its own


class Run:
    """One pass through one layer: what its hooks share."""

    def __init__(self, layer: WrappedLayer, state: State, kv: State) -> None:
        family = layer.plan.family
        self.mixers = [*getattr(layer, MIXERS).runs.values()]  # not `iter(…)`: PEFT may have put a wrapper there
        self.parallel = family.parallel
        self.scale = getattr(layer, family.scale) if family.scale else None
        self.state, self.kv = state, kv
        self.deferred: Deferred | None = None  # where values are mixed
        self.branch: Tensor | None = None  # the first of two parallel ones
        self.site = self.reads = 0
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
    """What a wrapped layer knows of itself, the hooks that `unwrap` removes, and the passes through it."""

    family: Family
    cache_name: str  # of the argument of `forward`
    arguments: tuple[str, ...]  # names of those of `forward` after the hidden states
    reads: list[tuple[str, int]] = field(default_factory=list)  # names of submodules and ids of their hooks
    writes: list[tuple[str, int]] = field(default_factory=list)
    runs: dict[int, Run] = field(default_factory=dict)  # by thread: servers share a model among several

    def run(self) -> Run | None:
        return self.runs.get(this_thread())


class Owner:
    """The layer that a hook belongs to. Where only a submodule is copied with its hooks, as PEFT does, the copy still
    belongs to this layer; where the layer is copied with it, to that copy."""

    def __init__(self, layer: WrappedLayer) -> None:
        self.layer = layer

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        return Owner(memo.get(id(self.layer), self.layer))

    def read_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a reader: give it what the mechanism reads."""
        run = self.layer.plan.run()
        if run is None:
            return None
        run.reads += 1
        if args:
            return (run.h, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": run.h}

    def write_hook(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        """After a writer: take what it has written."""
        run = self.layer.plan.run()
        if run is not None:
            run.write(out[0] if isinstance(out, tuple) else out)


class WrappedLayer(nn.Module):
    """Stands before the family's layer class."""

    plan: LayerPlan

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        stack: DepthStack = getattr(self, MIXERS)
        if isinstance(hidden_states, tuple):
            _, state, kv = hidden_states
        else:
            state, kv = stack.begin(hidden_states), self.begin_values()
        run, thread = Run(self, state, kv), this_thread()
        if not torch.compiler.is_compiling():
            self.order_hooks()
        self.plan.runs[thread] = run
        try:
            out = self.layer_forward(run, *args, **kwargs)
        finally:
            del self.plan.runs[thread]
        self.check_run(run)
        x, *others = out if isinstance(out, tuple) else (out,)
        new = (x, run.state, run.kv) if stack.out is None else stack.end(run.state)
        return (new, *others) if isinstance(out, tuple) else new

    def layer_forward(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        return super().forward(run.h, *args, **kwargs)

    def begin_values(self) -> State:
        return ()

    def order_hooks(self) -> None:
        """Let a user's hooks, also those added after wrapping, see what was read, and change what is written."""
        for hooks, number, last in hooks_of(self):
            if number in hooks and len(hooks) > 1:
                hooks.move_to_end(number, last=last)

    def check_run(self, run: Run) -> None:
        """Every reader and writer must have been called; otherwise the layer would compute something else, silently."""
        family = self.plan.family
        for did, got, want in (
            ("wrote", run.site, len(run.mixers)),
            ("read", run.reads, 0 if family.parallel else len(family.readers)),
        ):
            if got != want:
                names = family.readers if did == "read" else [name for names in family.writers for name in names]
                raise RuntimeError(
                    f"{type(self).__name__} {did} at {got} of {want} sublayers. If {', '.join(names)} of a layer was "
                    "replaced after dm.wrap (by quantisation or an adapter), unwrap, replace it, and wrap again. "
                    "Otherwise this version of transformers computes the layer in another way than depthmix knows: "
                    "please report it with both versions"
                )


class MixingLayer(WrappedLayer):
    """A wrapped layer whose attention mixes values over depth."""

    def begin_values(self) -> State:
        state: State = getattr(self, VALUE_MIXER).begin()
        return state

    def layer_forward(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan
        kwargs = {**kwargs, **dict(zip(plan.arguments, args, strict=False))}
        run.deferred = kwargs[plan.cache_name] = Deferred(kwargs.get(plan.cache_name))
        out = super().layer_forward(run, **kwargs)
        if not run.deferred.attended:
            raise RuntimeError(
                f"the attention of {type(self).__name__} ran without mixing values: set its implementation with "
                "model.set_attn_implementation, not in the configuration"
            )
        return out

    def mix_values(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to, from those of the new tokens: mixed first, then cached."""
        run = self.plan.run()
        if run is None or run.deferred is None:
            raise RuntimeError(f"the attention of {type(self).__name__} was called outside of its layer")
        v, run.kv = getattr(self, VALUE_MIXER).mix(q, k, v, run.kv)
        return run.deferred.put(k, v)


def this_thread() -> int:
    """A compiled pass is traced once, in whatever thread."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


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
    plan, owner = LayerPlan(family=family, cache_name=cache_name, arguments=names), Owner(layer)  # type: ignore[arg-type]
    parts = find_parts(layer, family)
    layer.add_module(MIXERS, mixers)
    if value_mixer is not None:
        layer.add_module(VALUE_MIXER, value_mixer)
        getattr(layer, parts.attention).__dict__[OWNER] = owner
    layer.__dict__["plan"] = plan
    for name in parts.readers:
        handle = getattr(layer, name).register_forward_pre_hook(owner.read_hook, with_kwargs=True)
        plan.reads.append((name, handle.id))
    for name in parts.writers:
        plan.writes.append((name, getattr(layer, name).register_forward_hook(owner.write_hook).id))
    layer.__dict__.pop("forward", None)  # some versions leave one behind, which would hide the class's
    base: Any = type(layer)
    layer.__class__ = layer_class(base, value_mixer is not None)


def unwrap_layer(layer: Any) -> None:
    for hooks, number, _ in hooks_of(layer):
        hooks.pop(number, None)
    for name, number in layer.plan.reads:
        getattr(layer, name)._forward_pre_hooks_with_kwargs.pop(number, None)
    layer.__dict__.pop("forward", None)
    getattr(layer, find_parts(layer, layer.plan.family).attention).__dict__.pop(OWNER, None)
    for name in (MIXERS, VALUE_MIXER):
        layer._modules.pop(name, None)
    del layer.__dict__["plan"]
    layer.__class__ = type(layer).base


def hooks_of(layer: Any) -> Iterator[tuple[OrderedDict[int, Any], int, bool]]:
    """For each hook of a wrapped layer: those of the same kind at its submodule, its id, and whether it comes last."""
    for name, number in layer.plan.reads:
        yield getattr(layer, name)._forward_pre_hooks, number, False
    for name, number in layer.plan.writes:
        yield getattr(layer, name)._forward_hooks, number, True


class Parts(NamedTuple):
    """The submodules of a layer that its family names."""

    writers: list[str]
    readers: list[str]
    attention: str


def find_parts(layer: nn.Module, family: Family) -> Parts:
    """Also a check, before anything is changed, that this version of transformers builds the layer as we know it."""
    return Parts(
        [find_part(layer, names) for names in family.writers],
        [find_part(layer, (name,)) for name in family.readers],
        find_part(layer, family.attention),
    )


def find_part(layer: nn.Module, names: tuple[str, ...]) -> str:
    """The first of these names that a submodule of the layer has."""
    for name in names:
        if isinstance(getattr(layer, name, None), nn.Module):
            return name
    raise ValueError(
        f"{type(layer).__name__} has no {' or '.join(names)}: this version of transformers builds the layer in another "
        "way than depthmix knows. Please report it with both versions"
    )
