"""The protocol that every mechanism follows.

A model is a list of sublayers. Each of them has a mixer, which decides what the sublayer reads from everything
below it::

    state = depth.begin(x)
    for mixer, sublayer in depth.pairs(sublayers):
        h, carry = mixer.read(state)
        state = mixer.write(state, carry, sublayer(h))
    h = depth.end(state)

A mixer consists of a non-linear part (`coeff`, `value`) and linear maps (`begin`, `combine`, `update`). Applying the
linear maps to one-hot sources gives the depth mixing matrix M of a running model.

Axes: ... any leading shape (batch, token), D channel, M stream. A state is a plain tuple of tensors [..., D] or
[..., M, D]; it is immutable, local to a token, and the only thing passed from one sublayer to the next.
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

__all__ = [  # everything that the file of a mechanism needs
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

MOST_DIM, MOST_DEPTH, MOST_ELEMENTS = 2**20, 2**14, 2**40  # limits: width, sublayers, size of a parameter


class DepthMixer(nn.Module):
    """One site of a mechanism. Subclasses implement the methods and describe themselves in the class attributes."""

    Config: ClassVar[type[MixerConfig]] = MixerConfig
    paper: ClassVar[str] = ""
    holds: ClassVar[str] = ""  # short description of the state
    rank_formula: ClassVar[str] = ""
    parameters_formula: ClassVar[str] = ""
    operator_valued: ClassVar[bool] = False  # sources are multiplied by matrices, not by scalar weights
    takes_decay: ClassVar[frozenset[str]] = frozenset()  # parameters with weight decay; the others must have none
    takes_muon: ClassVar[frozenset[str]] = frozenset()  # parameters that Muon may train: large hidden matrices
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)  # options that together cover every line
    twins: ClassVar[tuple[tuple[Mapping[str, Any], str, Mapping[str, Any]], ...]] = ()  # (options, name, its options):
    # with these options it equals the other mechanism, parameter by parameter

    def __init__(self, site: Site, config: MixerConfig) -> None:
        super().__init__()
        self.site = site
        self.config: Any = config
        self.expects = self.spec(site)  # so `spec` may use only site and config

    def add_parameter(self, name: str, *shape: int, exists: bool = True) -> None:
        """Declare a parameter; if the site does not own it (`exists=False`), the attribute is None."""
        if exists and math.prod(shape) > MOST_ELEMENTS:
            raise ValueError(
                f"{name} would have the shape {list(shape)} (dim={self.site.dim}, {self.config}); expected at most "
                "2^40 elements. Choose a smaller width or a smaller option"
            )
        self.register_parameter(name, nn.Parameter(torch.empty(shape)) if exists else None)

    @classmethod
    def resolve(cls, config: Any) -> type[DepthMixer]:
        """The class to build for these options, if one name covers several forms."""
        return cls

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        raise NotImplementedError(f"{cls.__name__} must implement `facts`")

    def reset_parameters(self) -> None:
        """Initialise every parameter. Called at construction, and by users after `to_empty`."""

    def bind(self, following: Sequence[DepthMixer]) -> None:
        """Receive this site and those after it that this stack or slice holds."""

    # The linear maps and their coefficients.

    def begin(self, x: Tensor) -> State:
        """The state before sublayer 1. Linear."""
        return (x,)

    def coeff(self, state: State) -> Coeff:
        """Weights, gates and matrices: everything that depends non-linearly on activations."""
        return None

    def combine(self, state: State, c: Coeff) -> Tensor:
        """What the sublayer reads. Linear in `state`."""
        raise NotImplementedError(f"{type(self).__name__} must implement `combine`")

    def value(self, state: State, c: Coeff, y: Tensor) -> tuple[Coeff, Tensor]:
        """The value that is written, and the coefficients that depend on it."""
        return c, y

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        """The state after the write. Linear in `(state, v)`."""
        raise NotImplementedError(f"{type(self).__name__} must implement `update`")

    def spec(self, site: Site) -> StateSpec:
        """The tensors of the state before `site`. By default one stream."""
        return StateSpec(shapes=((site.dim,),), essential=1, sealed=0)

    @property
    def groups(self) -> int:
        """The number of channel groups with their own M: 1, the number of heads, or the width."""
        return 1

    # Information about a forward pass, for traces and diagnostics.

    def source_weights(self, c: Coeff) -> SourceWeights | None:
        """The weights of this read over a list of sources; None if it does not weight a list of sources."""
        return None

    def with_weights(self, c: Coeff, weights: Tensor) -> Coeff:
        """`c` with other weights over its sources, so that `source_weights` returns these. Override it together."""
        raise NotImplementedError(f"{type(self).__name__} must implement `with_weights`")

    @property
    def weights_sum_to_one(self) -> bool:
        """Whether the weights that `source_weights` gives are normalised, as by a softmax."""
        return True

    def streams(self, state: State) -> State:
        """The tensors of a state that consist of outputs, [..., D] or [..., M, D]; by default all of width D."""
        return tuple(tensor for tensor in state if tensor.shape[-1] == self.site.dim)

    # The methods that a model calls.

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
        """For subclasses that override `read`: raise an error if a state does not belong to this site."""
        state_checks.check_state(self.site, self.expects, state)

    def checked_output(self, state: State, y: Tensor) -> Tensor:
        """For subclasses that override `write`: the output in the stream's dtype, or an error if it does not fit."""
        return state_checks.checked_output(self.site, self.expects, state, y)


class KVMixer(nn.Module):
    """A site inside attention, between QK-norm and RoPE on one side and the cache on the other.

    It mixes the values of the attention layers below, at the same token. Its state is a plain tuple: the keys and
    mixed values that later layers may read. The non-linear part and the linear maps are separate, as in `DepthMixer`.

    Axes: ... any leading shape, Q query head, K key-value head, T token, d channel of a head.
    """

    Config: ClassVar[type[MixerConfig]] = MixerConfig
    paper: ClassVar[str] = ""
    holds: ClassVar[str] = ""
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)

    def __init__(self, site: Site, config: MixerConfig, order: tuple[int, ...]) -> None:
        """`site` counts executions of attention, its dim is a head's width; `order` is the layer of each execution."""
        super().__init__()
        self.site = site
        self.config: Any = config
        self.order = order
        self.expects = self.spec(site)  # so `spec` may use only site, config and order

    @classmethod
    def facts(cls, config: Any, *, heads: int, kv_heads: int, head_dim: int, order: tuple[int, ...]) -> KVFacts:
        """Cost of all executions in `order`; a class that does not override this states no FLOPs."""
        return KVFacts()

    @property
    def mixes(self) -> bool:
        """Whether this site changes values; by default all but the first do."""
        return not self.site.is_first

    def reset_parameters(self) -> None:
        """Initialise every parameter."""

    def begin(self) -> State:
        """The state before the first attention."""
        return ()

    def coeff(self, q: Tensor, k: Tensor, kv: State) -> Coeff:
        """Weights of the layer's own value and of those in `kv`, at least float32. None: the value is unchanged."""
        raise NotImplementedError(f"{type(self).__name__} must implement `coeff`")

    def combine(self, v: Tensor, kv: State, c: Coeff) -> Tensor:
        """The mixed value. Linear in `v` and in the values of `kv`."""
        raise NotImplementedError(f"{type(self).__name__} must implement `combine`")

    def update(self, k: Tensor, v: Tensor, mixed: Tensor, kv: State) -> State:
        """The state that later layers may read. Linear in `v`, `mixed` and the values of `kv`."""
        raise NotImplementedError(f"{type(self).__name__} must implement `update`")

    def spec(self, site: Site) -> StateSpec:
        """Trailing shapes of the state before `site`, after the leading axes [..., K, T]."""
        raise NotImplementedError(f"{type(self).__name__} must implement `spec`")

    def mix(self, q: Tensor, k: Tensor, v: Tensor, kv: State) -> tuple[Tensor, State]:
        """The value to cache and attend to, and the new state, from q [..., Q, T, d] and k, v [..., K, T, d]."""
        want = len(self.expects.shapes)
        if len(kv) != want:
            raise ValueError(
                f"attention {self.site.index} got a state of {len(kv)} tensors; expected {want}. Run the attention "
                "layers in order, and pass the state that each returns to the next"
            )
        self.check_heads(q, k, v)
        mixed = self.combine(v, kv, self.coeff(q, k, kv))
        return mixed, self.update(k, v, mixed, kv)

    def check_heads(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise an error unless q, k and v are split into heads of the stack's width."""
        fits = min(q.dim(), k.dim(), v.dim()) >= 3 and q.shape[-1] == k.shape[-1] == self.site.dim
        if not (
            fits and q.shape[-2] == k.shape[-2] and v.shape[:-1] == k.shape[:-1] and q.shape[-3] % k.shape[-3] == 0
        ):
            shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
            raise ValueError(
                f"attention {self.site.index} got {shapes}; expected [..., heads, tokens, head_dim] with "
                f"head_dim={self.site.dim}, where the heads of k and v divide those of q"
            )
