"""Options of mechanisms, and the facts that a mechanism states for given options."""

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

    starts: options that affect only the initialisation.
    rounding: options that affect only the order of sums, so only rounding.
    either: groups of options of which at most one is given; setting one drops the others.
    functions: options that may name a function as package.module:function, which is then imported.
    retrofit: options with which a network that was trained without the mechanism keeps its function at first.
    """

    starts: ClassVar[frozenset[str]] = frozenset()
    rounding: ClassVar[frozenset[str]] = frozenset()
    either: ClassVar[tuple[tuple[str, ...], ...]] = ()
    functions: ClassVar[frozenset[str]] = frozenset()
    retrofit: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            check_option(field.name, getattr(self, field.name), hints[field.name])

    def check(self, *, dim: int, depth: int) -> None:
        """Raise ValueError if an option does not fit the width or the depth."""

    def resolved(self, *, dim: int, depth: int) -> dict[str, Any]:
        """Every option as stored in files, with the defaults that depend on width or depth replaced by their values."""
        return dataclasses.asdict(self)

    def canonical(self, *, dim: int, depth: int) -> dict[str, Any]:
        """Every option in a canonical form: the same for equal mechanisms, whichever options were given."""
        return self.resolved(dim=dim, depth=depth)

    def function(self, *, dim: int, depth: int) -> dict[str, Any]:
        """The options that determine what given parameters compute."""
        return self.deciding(self.canonical(dim=dim, depth=depth))

    def deciding(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """These options without those that affect only the initialisation or rounding."""
        return {k: v for k, v in options.items() if k not in self.starts | self.rounding}


def option(default: Any, meaning: str) -> Any:
    """A field of a mechanism's options, with the meaning that `depthmix show` prints."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that a mechanism states for given options, width and depth.

    `verify` measures all but traffic and FLOPs. FLOPs are per token, for the forward pass of all sites including the
    output's; the module `arithmetic` defines what counts as one.
    """

    preserves_prenorm: PreNorm
    rank: int | None  # upper bound of the semiseparable rank, for generic coefficients; None: operator-valued
    parameters: int
    reads: float  # elements read per token and sublayer, without the sublayer's own reads; counted, not measured
    writes: float
    two_phase: bool = False  # several sites share one pass over finished sources
    row_sums: tuple[float, ...] | None = None  # row sums of M, if they do not depend on the parameters
    flops: int | None = None  # if each site reads separately; None: not stated
    flops_two_phase: int | None = None  # if reads share passes; None: they do not
    note: str = ""

    @property
    def forward_flops(self) -> int:
        """FLOPs of the form that runs (two phases if reads share passes); if none are stated, 2 per parameter."""
        stated = self.flops if self.flops_two_phase is None else self.flops_two_phase
        return 2 * self.parameters if stated is None else stated


@dataclass(frozen=True, kw_only=True)
class KVFacts:
    """Facts that a KV mechanism states for given options and sizes of attention. FLOPs are counted as in `Facts`."""

    parameters: int | None = None  # None: not stated, so the parameters are counted
    flops: int | None = None  # of all executions of attention; None: not stated
    note: str = ""

    @property
    def forward_flops(self) -> int | None:
        """The stated FLOPs; otherwise 2 per parameter; None if the parameters are not stated either."""
        stated = None if self.parameters is None else 2 * self.parameters
        return stated if self.flops is None else self.flops


def rank_cap(depth: int) -> int:
    """The largest semiseparable rank that a lower-triangular matrix of depth + 1 rows can have."""
    return (depth + 2) // 2
