"""Options of mechanisms and what a mechanism says of itself under them."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from depthmix.support.checks import check_option

PreNorm: TypeAlias = Literal["exact", "up to scale", "no"]


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """Options of a mechanism. Values are checked against the annotations when it is built.

    starts: options that decide how parameters start and nothing after that.
    either: groups of options of which at most one is given; setting one drops the others.
    functions: options that may name a function, package.module:function, which is imported when they do.
    """

    starts: ClassVar[frozenset[str]] = frozenset()
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
        return {k: v for k, v in self.canonical(dim=dim, depth=depth).items() if k not in self.starts}


def option(default: Any, meaning: str) -> Any:
    """A field of a mechanism's options, with the words that `depthmix show` prints for it."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


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


def rank_cap(depth: int) -> int:
    """The largest semiseparable rank that a lower-triangular matrix of depth + 1 rows can have."""
    return (depth + 2) // 2
