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

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from depthmix.mechanisms import state as state_checks
from depthmix.mechanisms.options import Facts, KVFacts, MixerConfig, PreNorm, option, rank_cap
from depthmix.mechanisms.state import Coeff, Kind, Site, SourceWeights, State, StateSpec, output_names

__all__ = [  # all that the file of a mechanism needs
    "Coeff",
    "DepthMixer",
    "Facts",
    "KVFacts",
    "KVMixer",
    "Kind",
    "MixerConfig",
    "PreNorm",
    "Site",
    "SourceWeights",
    "State",
    "StateSpec",
    "option",
    "output_names",
    "rank_cap",
]

MOST_DIM, MOST_DEPTH, MOST_ELEMENTS = 2**20, 2**14, 2**40  # of a stream, of a stack, of one parameter


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
        """Learn which sites follow, this one first: those held by this stack or slice."""

    # The linear maps and what decides them.

    def begin(self, x: Tensor) -> State:
        """The state before sublayer 1. Linear."""
        return (x,)

    def coeff(self, state: State) -> Coeff:
        """Weights, gates, matrices: whatever depends on activations non-linearly."""
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

    # What a mechanism says of a pass, for traces and diagnostics.

    def source_weights(self, c: Coeff) -> SourceWeights | None:
        """The weights of this read where it weights a list of sources; None where it does not."""
        return None

    def streams(self, state: State) -> State:
        """What a state holds that is made of outputs, each [..., D] or [..., M, D]; by default all of width D."""
        return tuple(tensor for tensor in state if tensor.shape[-1] == self.site.dim)

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
        """For a `read` of your own: refuse a state that is not this site's."""
        state_checks.check_state(self.site, self.expects, state)

    def checked_output(self, state: State, y: Tensor) -> Tensor:
        """For a `write` of your own: the sublayer's output in the stream's dtype; refuse one that does not fit."""
        return state_checks.checked_output(self.site, self.expects, state, y)


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

    @classmethod
    def facts(cls, config: Any, *, heads: int, kv_heads: int, head_dim: int, order: tuple[int, ...]) -> KVFacts:
        """Cost of all executions in `order`; a class that does not say it states no FLOPs."""
        return KVFacts()

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
