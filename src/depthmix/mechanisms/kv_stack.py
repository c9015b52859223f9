"""KVStack: one value mixer for each execution of an attention layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from depthmix.mechanisms.base import KVFacts, KVMixer, Site, State, StateSpec
from depthmix.mechanisms.blend import blended
from depthmix.mechanisms.make import check_order, check_sizes, make_config
from depthmix.mechanisms.registry import kv_mechanism, naming_plugin
from depthmix.mechanisms.sharing import share_parameters
from depthmix.mechanisms.state import state_widths
from depthmix.support.checks import check_divides, check_range


class KVStack(nn.Module):
    """The value mixers of a network's attention layers, one for each execution, for use in your own attention.

    Args:
        name: a name from `list_mechanisms(kind="kv")`, or a subclass of `KVMixer`.
        head_dim: channels of a head.
        depth: number of attention layers N (give either `depth` or `order`).
        order: for layers that run more than once, the layer of each execution, such as (0, 1, 2, 1, 2, 3).
        share: whether the executions of a layer share their parameters.
        blend: add only g times the change of each value, with one learned number per layer that is 0 at first: a
            network that was trained without the mixers keeps its function.
        options: options of the mechanism; `depthmix show NAME` lists them.

    Call `state = stack.begin()`; then in each attention, after norms and RoPE of its queries and keys and before the
    cache, `v, state = stack[i].mix(q, k, v, state)`. Iterating over it gives its mixers. State-dict names are `{i}.…`,
    where i is the index of the execution, or with `share` of the layer (execution 0 is `first` if later executions of
    its layer have other parameters).
    """

    def __init__(
        self,
        name: str | type[KVMixer],
        *,
        head_dim: int,
        depth: int | None = None,
        order: Sequence[int] | None = None,
        share: bool = False,
        blend: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        cls = kv_mechanism(name) if isinstance(name, str) else name
        if not (isinstance(cls, type) and issubclass(cls, KVMixer)):
            raise TypeError(
                f"mechanism {name!r}; expected a name from list_mechanisms(kind='kv') or a subclass of KVMixer"
            )
        self.name = name if isinstance(name, str) else cls.__name__
        self.blend = blend
        if (depth is None) == (order is None):
            raise ValueError(
                f"{self.name}: depth={depth} and order={order}; expected exactly one of them: the number of attention "
                "layers, or the layer of each execution"
            )
        if order is None:
            check_sizes(self.name, depth=depth)
            order = range(depth or 0)
        else:
            check_order(self.name, order)
        self.order, self.head_dim = tuple(order), head_dim
        self.lo, self.hi = 0, len(self.order)
        check_sizes(self.name, head_dim=head_dim, depth=len(self.order))
        self.config = make_config(cls, self.name, options, dim=head_dim, depth=len(self.order))
        with naming_plugin(self.name):
            sites = [Site(i, len(self.order), head_dim, "attn") for i in range(len(self.order))]
            made = blended(cls) if blend else cls  # type: ignore[arg-type]
            mixers = [made(site, self.config, self.order) for site in sites]
            names = share_parameters(self.name, mixers, self.order) if share else [str(site.index) for site in sites]
            self.runs, self.names = dict(enumerate(mixers)), names
            for name, mixer in zip(names, mixers, strict=True):
                if name not in self._modules:
                    self.add_module(name, mixer)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        for mixer in self.children():
            mixer.reset_parameters()  # type: ignore[operator]

    def __iter__(self) -> Iterator[KVMixer]:
        return iter(self.runs.values())

    def __len__(self) -> int:
        return self.hi - self.lo

    def __getitem__(self, index: int) -> KVMixer:
        """The mixer of attention `index`, counted from 0 in the order of execution of the whole network."""
        if not self.lo <= index < self.hi:
            raise IndexError(f"attention {index}; this stack holds {self.lo} to {self.hi - 1}")
        return self.runs[index]

    def begin(self) -> State:
        """The state before the first attention."""
        return self[self.lo].begin()

    def spec(self, index: int) -> StateSpec:
        """The state's specification before attention `index`; shapes follow the leading axes [..., K, T]."""
        check_range("index", index, 0, len(self.order))
        any_mixer = self[self.lo]
        return any_mixer.spec(dataclasses.replace(any_mixer.site, index=index))

    def state_widths(self) -> tuple[float, float]:
        """Size of the largest state per token, at a cut and between reads, in widths of one vector per KV head."""
        return state_widths([self.spec(index) for index in range(len(self.order) + 1)], self.head_dim)

    def slice(self, lo: int, hi: int) -> KVStack:
        """The part for attention lo … hi−1, with the same mixers under the same names."""
        if not self.lo <= lo < hi <= self.hi:
            raise ValueError(f"slice({lo}, {hi}); expected {self.lo} <= lo < hi <= {self.hi}")
        part = KVStack.__new__(KVStack)
        nn.Module.__init__(part)
        part.name, part.order, part.head_dim, part.config = self.name, self.order, self.head_dim, self.config
        part.blend = self.blend
        part.lo, part.hi, part.names = lo, hi, self.names
        part.runs = {i: self.runs[i] for i in range(lo, hi)}
        for i in part.runs:
            part.add_module(self.names[i], self._modules[self.names[i]])
        part.training = self.training
        return part

    def facts(self, *, heads: int, kv_heads: int | None = None) -> KVFacts:
        """Cost of the mechanism in attention with these numbers of query heads and key-value heads (None: equal)."""
        kv_heads = heads if kv_heads is None else kv_heads
        check_sizes(self.name, heads=heads, kv_heads=kv_heads)
        check_divides("kv_heads", kv_heads, heads, of="the query heads, heads")
        with naming_plugin(self.name):
            sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": self.head_dim}
            facts = type(self[self.lo]).facts(self.config, order=self.order, **sizes)
            if not isinstance(facts, KVFacts):
                raise TypeError(f"facts returned a {type(facts).__name__}; expected a depthmix.KVFacts")
        held = sum(parameter.numel() for parameter in self.parameters())
        return facts if facts.parameters is not None else dataclasses.replace(facts, parameters=held)

    def extra_repr(self) -> str:
        part = "" if len(self) == len(self.order) else f", attention {self.lo} to {self.hi - 1}"
        return f"{self.name!r}, head_dim={self.head_dim}, depth={len(self.order)}{part}"
