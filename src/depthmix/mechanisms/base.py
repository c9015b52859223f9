"""The protocol that every mechanism follows.

A model is a list of sublayers. Before each of them stands a mixer, which decides what the sublayer reads from
everything below it::

    state = depth.begin(x)
    for mixer, sublayer in depth.pairs(sublayers):
        h, carry = mixer.read(state)
        state = mixer.write(state, carry, sublayer(h))
    h = depth.end(state)

A mixer is a non-linear part (`coeff`, `value`) and linear maps (`begin`, `combine`, `update`). Replaying the linear
maps on one-hot sources gives the depth mixing matrix M of a running model.

Axes: ... any leading shape (batch, token), D channel, M stream. A state is a plain tuple of tensors [..., D] or
[..., M, D]; it is immutable, local to a token, and all that crosses from one sublayer to the next.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from depthmix.support.checks import check_option

State: TypeAlias = tuple[Tensor, ...]
Coeff: TypeAlias = Any  # a tensor, or a (named) tuple of tensors, with the leading shape of the state
Kind: TypeAlias = Literal["attn", "mlp", "out"]
PreNorm: TypeAlias = Literal["exact", "up to scale", "no"]
MOST_DIM, MOST_DEPTH, MOST_ELEMENTS = 2**20, 2**14, 2**40  # of a stream, of a stack, of one parameter


@dataclass(frozen=True)
class Site:
    """A place where a mechanism reads: before sublayer `index` (from 0), or before the head (`index == depth`)."""

    index: int
    depth: int
    dim: int
    kind: Kind
    is_first: bool = dataclasses.field(init=False)  # it can read the embedding only: no read-side parameters
    is_out: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Flags and not comparisons in `forward`: a compiler would guard on every layer's own index.
        object.__setattr__(self, "is_first", self.index == 0)
        object.__setattr__(self, "is_out", self.index == self.depth)


@dataclass(frozen=True)
class StateSpec:
    """What is alive before a site, so that a pipeline can size its buffers and send only what is new.

    shapes: trailing dimensions of each tensor, after the leading ones.
    essential: how many of them (the first ones) are needed; the others can be made again.
    sealed: how many leading ones never change again.
    """

    shapes: tuple[tuple[int, ...], ...]
    essential: int
    sealed: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a mechanism says of itself for given options, width and depth. `verify` measures all but the traffic."""

    preserves_prenorm: PreNorm
    rank: int | None  # semiseparable rank that generic coefficients reach or stay below; None: operator-valued
    parameters: int
    reads: float  # elements read per token and sublayer, the sublayer's own excluded; counted, not measured
    writes: float
    two_phase: bool = False  # reads of several sites share a pass over finished sources
    row_sums: tuple[float, ...] | None = None  # of M, where they do not depend on the parameters
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """Options of a mechanism. Values are checked against the annotations when it is built.

    starts: options that decide how parameters start and nothing after that.
    either: groups of options of which at most one is given; setting one drops the others.
    """

    starts: ClassVar[frozenset[str]] = frozenset()
    either: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            check_option(field.name, getattr(self, field.name), hints[field.name])

    def check(self, *, dim: int, depth: int) -> None:
        """Raise ValueError where an option does not fit the width or the depth."""

    def resolved(self, *, dim: int, depth: int) -> dict[str, Any]:
        """Every option, as files hold it: a default that follows from width or depth as the value that it has here."""
        return dataclasses.asdict(self)

    def canonical(self, *, dim: int, depth: int) -> dict[str, Any]:
        """Every option, equal for equal mechanisms, however they were asked for."""
        return self.resolved(dim=dim, depth=depth)

    def function(self, *, dim: int, depth: int) -> dict[str, Any]:
        """The options that decide what given parameters compute."""
        return {k: v for k, v in self.canonical(dim=dim, depth=depth).items() if k not in self.starts}


def option(default: Any, meaning: str) -> Any:
    """A field of a mechanism's options, with the words that `depthmix show` prints for it."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


def rank_cap(depth: int) -> int:
    """The largest semiseparable rank that a lower-triangular matrix of depth + 1 rows can have."""
    return (depth + 2) // 2


class DepthMixer(nn.Module):
    """One site of a mechanism. Subclasses fill in the table of methods and say what they are."""

    Config: ClassVar[type[MixerConfig]] = MixerConfig
    paper: ClassVar[str] = ""
    holds: ClassVar[str] = ""  # what the state is, in a few words
    rank_formula: ClassVar[str] = ""
    parameters_formula: ClassVar[str] = ""
    operator_valued: ClassVar[bool] = False  # sources reach a row through matrices, not through weights
    takes_decay: ClassVar[frozenset[str]] = frozenset()  # parameters that take weight decay; the others must not
    takes_muon: ClassVar[frozenset[str]] = frozenset()  # parameters that may go to Muon: large hidden matrices
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)  # options that between them reach every line
    twins: ClassVar[tuple[tuple[Mapping[str, Any], str, Mapping[str, Any]], ...]] = ()  # (options, name, its options):
    # under these options it is that other mechanism, parameter for parameter

    def __init__(self, site: Site, config: MixerConfig) -> None:
        super().__init__()
        self.site = site
        self.config: Any = config
        self.expects = self.spec(site)  # so `spec` may use nothing but site and config

    def add_parameter(self, name: str, *shape: int, exists: bool = True) -> None:
        """Declare a parameter; where a site does not own it, the attribute is None."""
        if exists and math.prod(shape) > MOST_ELEMENTS:
            raise ValueError(
                f"{name} would have the shape {list(shape)}, by dim={self.site.dim}, {self.config}; expected at most "
                "2^40 elements. Choose a smaller width or option"
            )
        self.register_parameter(name, nn.Parameter(torch.empty(shape)) if exists else None)

    @classmethod
    def resolve(cls, config: Any) -> type[DepthMixer]:
        """The class to build for these options, where one name stands for several forms."""
        return cls

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        raise NotImplementedError(f"{cls.__name__} must say its facts")

    def reset_parameters(self) -> None:
        """Give every parameter its start. Called at construction, and by users after `to_empty`."""

    def bind(self, following: Sequence[DepthMixer]) -> None:
        """Learn which sites follow, this one first, as far as they are here; a slice binds the sites that it has."""

    # The linear maps and what decides them.

    def begin(self, x: Tensor) -> State:
        """The state before sublayer 1. Linear."""
        return (x,)

    def coeff(self, state: State) -> Coeff:
        """Weights, gates, matrices: whatever depends on activations in another than linear way."""
        return None

    def combine(self, state: State, c: Coeff) -> Tensor:
        """What the sublayer reads. Linear in `state`."""
        raise NotImplementedError(f"{type(self).__name__} must say what it reads")

    def value(self, state: State, c: Coeff, y: Tensor) -> tuple[Coeff, Tensor]:
        """What is written, and the coefficients that depend on it."""
        return c, y

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        """The state after the write. Linear in `(state, v)`."""
        raise NotImplementedError(f"{type(self).__name__} must say what it keeps")

    def spec(self, site: Site) -> StateSpec:
        """What is alive before `site`. By default one stream."""
        return StateSpec(shapes=((site.dim,),), essential=1, sealed=0)

    @property
    def groups(self) -> int:
        """In how many groups of channels M differs: 1, the number of heads, or the width."""
        return 1

    # What a model calls.

    def read(self, state: State) -> tuple[Tensor, Any]:
        self.check_state(state)
        c = self.coeff(state)
        return self.combine(state, c), c

    def write(self, state: State, carry: Any, y: Tensor) -> State:
        c, v = self.value(state, carry, self.checked_output(state, y))
        return self.update(state, c, v)

    def step(self, state: State, f: Callable[[Tensor], Tensor]) -> State:
        h, carry = self.read(state)
        return self.write(state, carry, f(h))

    def check_state(self, state: State) -> None:
        """Refuse the state of another site, and tensors that do not belong together: sums would broadcast silently."""
        self.check_length(state)
        first, want = state[0], self.expects.shapes
        lead = first.shape[: max(0, first.dim() - len(want[0]))]
        for i, (tensor, shape) in enumerate(zip(state, want, strict=False)):
            # A derived number per token, such as a log-sum-exp, is as wide as an accumulator.
            dtype = first.dtype if shape else torch.promote_types(first.dtype, torch.float32)
            if tensor.shape != lead + shape or tensor.dtype != dtype or tensor.device != first.device:
                raise ValueError(
                    f"site {self.site.index} got a state with tensor {i} {tensor.dtype} of shape {list(tensor.shape)} "
                    f"on {tensor.device}; expected {dtype} of shape {[*lead, *shape]} on {first.device}, "
                    "to go with tensor 0"
                )

    def check_length(self, state: State) -> None:
        if not isinstance(state, tuple):
            got = type(state).__name__
            raise TypeError(f"site {self.site.index} got a {got}; expected a tuple: what `begin` or `write` returned")
        if not self.expects.essential <= len(state) <= len(self.expects.shapes):
            raise ValueError(
                f"site {self.site.index} got a state of {len(state)} tensors; expected {len(self.expects.shapes)}. "
                "Sites must be read and written in their order, and `spec` must tell what they hold"
            )

    def checked_output(self, state: State, y: Tensor) -> Tensor:
        """The sublayer's output in the stream's dtype, or an error where it would broadcast."""
        self.check_length(state)
        stream = state[0]
        shape = stream.shape[: stream.dim() - len(self.expects.shapes[0])] + (self.site.dim,)  # noqa: RUF005
        if not isinstance(y, Tensor):
            raise TypeError(
                f"sublayer {self.site.index} returned a {type(y).__name__}; expected a floating tensor of shape "
                f"{list(shape)}: take it out of what the module returns"
            )
        if y.shape != shape or not y.is_floating_point() or y.device != stream.device:
            raise ValueError(
                f"sublayer {self.site.index} returned {y.dtype} of shape {list(y.shape)} on {y.device}; "
                f"expected a floating tensor of shape {list(shape)} on {stream.device}, as it was given"
            )
        return y.to(stream.dtype)


class KVMixer(nn.Module):
    """A site inside attention, between QK-norm and RoPE on one side and the cache on the other.

    It mixes the values of the attention layers below, at the same token. Its state is a plain tuple: the keys and
    mixed values that later layers may read. Non-linear part and linear maps are split as in `DepthMixer`.

    Axes: ... any leading shape, Q query head, K key-value head, T token, d channel of a head.
    """

    Config: ClassVar[type[MixerConfig]] = MixerConfig
    paper: ClassVar[str] = ""
    holds: ClassVar[str] = ""
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)

    def __init__(self, site: Site, config: MixerConfig, order: tuple[int, ...]) -> None:
        """`site` counts executions of attention, its dim is a head's width; `order` says which layer each one runs."""
        super().__init__()
        self.site = site
        self.config: Any = config
        self.order = order
        self.expects = self.spec(site)  # so `spec` may use nothing but site, config and order

    def reset_parameters(self) -> None:
        """Give every parameter its start."""

    def begin(self) -> State:
        """The state before the first attention."""
        return ()

    def coeff(self, q: Tensor, k: Tensor, kv: State) -> Coeff:
        """Weights of the own value and of what `kv` holds; in float32 at least. None: the value stays as it is."""
        raise NotImplementedError(f"{type(self).__name__} must say its weights")

    def combine(self, v: Tensor, kv: State, c: Coeff) -> Tensor:
        """The mixed value. Linear in `v` and in the values of `kv`."""
        raise NotImplementedError(f"{type(self).__name__} must say what it mixes")

    def update(self, k: Tensor, v: Tensor, mixed: Tensor, kv: State) -> State:
        """What later layers may read. Linear in `v`, `mixed` and the values of `kv`."""
        raise NotImplementedError(f"{type(self).__name__} must say what it keeps")

    def spec(self, site: Site) -> StateSpec:
        """Shapes alive before `site`, after the leading ones [..., K, T]."""
        raise NotImplementedError(f"{type(self).__name__} must say its shapes")

    def mix(self, q: Tensor, k: Tensor, v: Tensor, kv: State) -> tuple[Tensor, State]:
        """The value to cache and attend to, and the new state, from q [..., Q, T, d] and k, v [..., K, T, d]."""
        want = len(self.expects.shapes)
        if len(kv) != want:
            raise ValueError(
                f"attention {self.site.index} got a state of {len(kv)} tensors; expected {want}. Attention layers must "
                "be run in their order, each handing on what it returned"
            )
        mixed = self.combine(v, kv, self.coeff(q, k, kv))
        return mixed, self.update(k, v, mixed, kv)
