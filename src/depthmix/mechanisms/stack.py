"""DepthStack: one mixer per sublayer and one for the output, kept separate from the sublayers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from depthmix.mechanisms.base import DepthMixer, Facts, Kind, Site, State, StateSpec
from depthmix.mechanisms.make import check_order, check_sizes, make_config, make_sites
from depthmix.mechanisms.record import Recorded
from depthmix.mechanisms.registry import mechanism, name_of, naming_plugin
from depthmix.mechanisms.sharing import share_parameters
from depthmix.mechanisms.state import state_widths
from depthmix.support.checks import check_range

Sublayers: TypeAlias = Sequence[Any] | nn.ModuleList | nn.Sequential


class DepthStack(Recorded):
    """The mixers of a network of `depth` sublayers of width `dim`.

    Args:
        name: a name from `list_mechanisms()`, or a subclass of `DepthMixer`.
        dim: width D of the stream.
        depth: number of sublayers L; attention and MLP count separately.
        kinds: "attn" or "mlp" for each sublayer; by default they alternate, attention first.
        order: for sublayers that run more than once, the sublayer index of each of the `depth` executions; executions
            of the same sublayer then share parameters. By default every execution has its own.
        options: options of the mechanism; `depthmix show NAME` lists them.

    Iterating over it gives the L mixers; `out` is the mixer of the output row. State-dict names are `mixers.{i}.…` and
    `out.…`, the same in a slice as in the whole stack; with an `order`, i is the index of the sublayer, and execution 0
    is `mixers.first` if later executions of its sublayer have other parameters. A state dict also holds the options
    that determine the function (see `Recorded`) and loads only into a stack with the same ones; otherwise use
    `load_converted`.

    `stack(x, sublayers)` runs a network, `stack.bind(sublayers)` makes it a module, and your own loop can use
    `stack.pairs(sublayers)`. All three reject a wrong number of sublayers; a plain `zip` would drop some of them.
    """

    parts: tuple[DepthStack, ...] = ()  # the slices of a joined stack
    order: tuple[int, ...] | None  # the sublayer of each execution, if executions share parameters

    def __init__(
        self,
        name: str | type[DepthMixer],
        *,
        dim: int,
        depth: int,
        kinds: Sequence[Kind] | None = None,
        order: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        cls = mechanism(name) if isinstance(name, str) else name
        if not (isinstance(cls, type) and issubclass(cls, DepthMixer)):
            raise TypeError(f"mechanism {name!r}; expected a name from list_mechanisms() or a subclass of DepthMixer")
        self.name = name if isinstance(name, str) else cls.__name__
        self.registered = name if isinstance(name, str) else name_of(cls)
        check_sizes(self.name, dim=dim, depth=depth)
        self.dim, self.depth = dim, depth
        self.lo, self.hi = 0, depth
        self.config = make_config(cls, self.name, options, dim=dim, depth=depth)
        sites = [*make_sites(dim, depth, kinds), Site(depth, depth, dim, "out")]
        with naming_plugin(self.name):
            cls = cls.resolve(self.config)
            self.facts: Facts = cls.facts(self.config, dim=dim, depth=depth)
            if not isinstance(self.facts, Facts):
                raise TypeError(f"facts returned a {type(self.facts).__name__}; expected a depthmix.Facts")
            *mixers, out = [cls(site, self.config) for site in sites]
            self.register_mixers(dict(enumerate(mixers)), self.name_mixers(mixers, order))
            self.out: DepthMixer | None = out
            if order is not None:
                count = sum(parameter.numel() for parameter in self.parameters())
                self.facts = dataclasses.replace(self.facts, parameters=count)
            self.bind_mixers()
            self.reset_parameters()

    def name_mixers(self, mixers: Sequence[DepthMixer], order: Sequence[int] | None) -> list[str]:
        """Names of the executions' parameters; with an order, executions of the same sublayer share theirs."""
        self.shared, self.order = order is not None, None
        if order is None:
            return [str(i) for i in range(len(mixers))]
        check_order(self.name, order, len(mixers))
        self.order = tuple(order)
        return share_parameters(self.name, mixers, order)

    def register_mixers(self, runs: dict[int, DepthMixer], names: list[str]) -> None:
        """Store a mixer for each execution, and register each set of parameters once."""
        self.runs, self.names = runs, names
        self.mixers = nn.ModuleDict()
        for i, mixer in runs.items():
            if names[i] not in self.mixers:
                self.mixers[names[i]] = mixer

    def record(self) -> dict[str, Any]:
        """Options of the whole network, in a slice too; shared parameters allow any number of executions."""
        sizes = {"dim": self.dim, "depth": self.depth}
        if self.shared:
            options = self.config.deciding(self.config.canonical(**sizes))
        else:
            options = self.config.function(**sizes)
        return {"mechanism": self.registered, **options}

    def bind_mixers(self) -> None:
        mixers = self.all_mixers()
        for i, mixer in enumerate(mixers):
            mixer.bind(mixers[i:])

    def reset_parameters(self) -> None:
        for mixer in (*self.mixers.values(), *([] if self.out is None else [self.out])):
            mixer.reset_parameters()  # type: ignore[operator]

    def all_mixers(self) -> list[DepthMixer]:
        """The mixers of the sublayers and, if this part holds it, of the output."""
        return [*self] if self.out is None else [*self, self.out]

    def __iter__(self) -> Iterator[DepthMixer]:
        return iter(self.runs.values())

    def __len__(self) -> int:
        return self.hi - self.lo

    def __getitem__(self, index: int) -> DepthMixer:
        """The mixer of sublayer `index`, counted from 0 in the whole network."""
        if not self.lo <= index < self.hi:
            raise IndexError(f"sublayer {index}; this stack holds {self.lo} to {self.hi - 1}")
        return self.runs[index]

    def begin(self, x: Tensor) -> State:
        """The state before sublayer 0, from the embedding `[..., dim]`."""
        if self.lo:
            raise ValueError(f"this slice begins at sublayer {self.lo}; call begin on the slice with sublayer 0")
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"begin got {got}; expected a floating-point tensor [..., {self.dim}]: embed tokens first")
        if x.dim() < 1 or x.shape[-1] != self.dim:
            raise ValueError(
                f"begin got a tensor of shape {list(x.shape)}; expected [..., {self.dim}] (dim={self.dim})"
            )
        home = next((p.device for p in self.parameters()), x.device)
        if x.device != home:
            raise ValueError(
                f"begin got a tensor on {x.device}, but the stack is on {home}: move one of them with .to(device)"
            )
        return next(iter(self)).begin(x)

    def end(self, state: State) -> Tensor:
        """The tensor that the head reads."""
        if self.out is None:
            raise ValueError(f"this slice ends before sublayer {self.hi} of {self.depth}; call end on the last slice")
        return self.out.read(state)[0]

    def forward(self, x: Tensor, sublayers: Sublayers) -> Tensor:
        """The whole loop, for networks whose sublayers take and return one tensor."""
        pairs = self.pairs(sublayers)
        state = self.begin(x)
        for mixer, sublayer in pairs:
            state = mixer.step(state, sublayer)
        return self.end(state)

    def pairs(self, sublayers: Sublayers) -> list[tuple[DepthMixer, Any]]:
        """Pairs (mixer, sublayer) in order, for your own loop; a wrong number of sublayers is an error.

        A slice takes its own sublayers: `stack.slice(6, 12).pairs(sublayers[6:12])`.
        """
        if not isinstance(sublayers, (Sequence, nn.ModuleList, nn.Sequential)):
            raise TypeError(f"sublayers is a {type(sublayers).__name__}; expected a list of {len(self)} sublayers")
        if len(sublayers) != len(self):
            part = "" if len(self) == self.depth else f" of this slice, {self.lo} to {self.hi - 1}"
            raise ValueError(
                f"got {len(sublayers)} sublayers for {len(self)} mixers; expected {len(self)} sublayers{part}, one for "
                "each mixer. Attention and MLP count separately, and depth is the number of sublayers"
            )
        return list(zip(self, sublayers, strict=True))

    def bind(self, sublayers: Sublayers) -> BoundStack:
        """The whole network as one module, for sublayers that take and return one tensor."""
        return BoundStack(self, sublayers)

    def spec(self, index: int) -> StateSpec:
        """The state's specification before sublayer `index`, or before the output (`index == depth`)."""
        check_range("index", index, 0, self.depth)
        any_mixer = self.all_mixers()[0]
        return any_mixer.spec(dataclasses.replace(any_mixer.site, index=index))

    def state_widths(self) -> tuple[float, float]:
        """Size of the largest state per token, in widths D: at a cut, and between reads with the derived tensors."""
        return state_widths([self.spec(index) for index in range(self.depth + 1)], self.dim)

    def slice(self, lo: int, hi: int) -> DepthStack:
        """The part for sublayers lo … hi−1: what a pipeline stage holds. Its mixers share this stack's parameters."""
        if not self.lo <= lo < hi <= self.hi:
            raise ValueError(f"slice({lo}, {hi}); expected {self.lo} <= lo < hi <= {self.hi}")
        part = DepthStack.__new__(DepthStack)
        nn.Module.__init__(part)
        part.inherit(self)
        part.lo, part.hi = lo, hi
        part.register_mixers({i: copy.copy(self.runs[i]) for i in range(lo, hi)}, self.names)
        part.out = copy.copy(self.out) if hi == self.depth else None
        part.bind_mixers()
        if self.shared:  # parameters are initialised as at their first execution, which this slice may not hold
            part.mixers = nn.ModuleDict({name: copy.copy(self.mixers[name]) for name in part.mixers})
            for mixer in part.mixers.values():
                mixer.bind([mixer])  # type: ignore[operator]
        return part

    @classmethod
    def joined(cls, parts: Sequence[DepthStack]) -> DepthStack:
        """The whole stack of which `parts` are consecutive slices. It holds their mixers themselves, and each of these
        shares passes with those of its own slice only."""
        bounds = [(part.lo, part.hi) for part in parts]
        joints = [0, *(hi for _, hi in bounds)]
        if [lo for lo, _ in bounds] != joints[:-1] or joints[-1] != parts[-1].depth:
            raise ValueError(
                f"slices {bounds} of {parts[-1].depth} sublayers; expected every slice of a stack, in order"
            )
        whole = cls.__new__(cls)
        nn.Module.__init__(whole)
        whole.inherit(parts[0])
        whole.lo, whole.hi, whole.parts, whole.out = 0, whole.depth, tuple(parts), parts[-1].out
        whole.register_mixers({i: mixer for part in parts for i, mixer in part.runs.items()}, parts[0].names)
        return whole

    def inherit(self, other: DepthStack) -> None:
        """Take over what does not depend on the part of the network: options, sizes and names."""
        self.name, self.registered, self.dim, self.depth = other.name, other.registered, other.dim, other.depth
        self.config, self.facts, self.shared, self.training = other.config, other.facts, other.shared, other.training
        self.order = other.order

    @property
    def entry(self) -> DepthStack:
        """The stack whose `begin` a model calls: of a joined one its first slice."""
        return self.parts[0] if self.parts else self

    def extra_repr(self) -> str:
        part = "" if len(self) == self.depth else f", sublayers {self.lo} to {self.hi - 1}"
        note = f", {self.facts.note}" if self.facts.note else ""
        return f"{self.name!r}, dim={self.dim}, depth={self.depth}{part}{note}"


class BoundStack(nn.Module):
    """A stack and its sublayers as one module: `depth.bind(sublayers)(x)` is `depth(x, sublayers)`.

    It owns both: parameters are `depth.mixers.{i}.…`, `depth.out.…` and `sublayers.{i}.…`. The parts are `bound.depth`
    and `bound.sublayers`. If you also assign them to the same model, they appear in its state dict twice.
    """

    def __init__(self, depth: DepthStack, sublayers: Sublayers) -> None:
        super().__init__()
        if len(depth) != depth.depth:
            raise ValueError(
                f"bind was called on a slice, sublayers {depth.lo} to {depth.hi - 1} of {depth.depth}; expected the "
                "whole stack. A slice takes and returns a state: loop over its pairs(sublayers)"
            )
        for i, (_, sublayer) in enumerate(depth.pairs(sublayers)):
            if not isinstance(sublayer, nn.Module):
                raise TypeError(
                    f"sublayer {i} is a {type(sublayer).__name__}; expected an nn.Module, so that its parameters are "
                    "registered. depth(x, sublayers) accepts any callable"
                )
        self.depth = depth
        self.sublayers = sublayers if isinstance(sublayers, nn.ModuleList) else nn.ModuleList(sublayers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.depth(x, self.sublayers)
        return out
