"""Options of mechanisms and what a mechanism says of itself under them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from depthmix.support.checks import check_option

PreNorm: TypeAlias = Literal["exact", "up to scale", "no"]


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """Options of a mechanism. Values are checked against the annotations when it is built.

    starts: options that decide how parameters start and nothing after that.
    rounding: options that decide the order of sums and no value.
    either: groups of options of which at most one is given; setting one drops the others.
    functions: options that may name a function, package.module:function, which is imported when they do.
    """

    starts: ClassVar[frozenset[str]] = frozenset()
    rounding: ClassVar[frozenset[str]] = frozenset()
    either: ClassVar[tuple[tuple[str, ...], ...]] = ()
    functions: ClassVar[frozenset[str]] = frozenset()

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
        return self.deciding(self.canonical(dim=dim, depth=depth))

    def deciding(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Without those that decide a start or rounding alone."""
        return {k: v for k, v in options.items() if k not in self.starts | self.rounding}


def option(default: Any, meaning: str) -> Any:
    """A field of a mechanism's options, with the words that `depthmix show` prints for it."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a mechanism says of itself for given options, width and depth.

    `verify` measures all but traffic and FLOPs. FLOPs are those of a forward pass, per token, of all sites with the
    output's; `arithmetic` says what counts as one.
    """

    preserves_prenorm: PreNorm
    rank: int | None  # semiseparable rank that generic coefficients reach or stay below; None: operator-valued
    parameters: int
    reads: float  # elements read per token and sublayer, the sublayer's own excluded; counted, not measured
    writes: float
    two_phase: bool = False  # reads of several sites share a pass over finished sources
    row_sums: tuple[float, ...] | None = None  # of M, where they do not depend on the parameters
    flops: int | None = None  # where each site reads on its own; None: not stated
    flops_two_phase: int | None = None  # where reads share passes; None: they do not
    note: str = ""

    @property
    def forward_flops(self) -> int:
        """FLOPs of what runs: in two phases where reads share passes. Where none are stated, 2 for each parameter."""
        stated = self.flops if self.flops_two_phase is None else self.flops_two_phase
        return 2 * self.parameters if stated is None else stated


@dataclass(frozen=True, kw_only=True)
class KVFacts:
    """What a KV mechanism says of itself for given options and sizes of attention. FLOPs are as those of `Facts`."""

    parameters: int | None = None  # None: not stated, and counted
    flops: int | None = None  # of all executions of attention; None: not stated
    note: str = ""

    @property
    def forward_flops(self) -> int | None:
        """Where no FLOPs are stated, 2 for each parameter; None where these are not stated either."""
        stated = None if self.parameters is None else 2 * self.parameters
        return stated if self.flops is None else self.flops


def rank_cap(depth: int) -> int:
    """The largest semiseparable rank that a lower-triangular matrix of depth + 1 rows can have."""
    return (depth + 2) // 2
