"""Helpers for both kinds of stacks: they check sizes and build sites and a mechanism's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from depthmix.mechanisms.base import MOST_DEPTH, MOST_DIM, DepthMixer, Kind, KVMixer, MixerConfig, Site
from depthmix.mechanisms.registry import naming_plugin
from depthmix.support.checks import check_range, did_you_mean


def check_sizes(name: str, **sizes: Any) -> None:
    for what, number in sizes.items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"{name}: {what}={number!r}; expected a whole number")
        check_range(f"{name}: {what}", number, 1, MOST_DEPTH if what == "depth" else MOST_DIM)


def check_order(name: str, order: Any, depth: int | None = None) -> None:
    """Check `order`, the layer or sublayer of each execution."""
    whole = isinstance(order, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in order)
    if not whole or (depth is not None and len(order) != depth):
        count = "" if depth is None else f"{depth} numbers, "
        raise ValueError(
            f"{name}: order={order!r}; expected {count}the layer of each execution, such as (0, 1, 2, 1, 2, 3)"
        )


def make_sites(dim: int, depth: int, kinds: Sequence[Kind] | None) -> list[Site]:
    alternating: list[Kind] = ["attn" if i % 2 == 0 else "mlp" for i in range(depth)]
    kinds = alternating if kinds is None else list(kinds)
    if len(kinds) != depth or not set(kinds) <= {"attn", "mlp"}:
        raise ValueError(f"kinds={kinds!r}; expected {depth} entries 'attn' or 'mlp', one per sublayer")
    return [Site(i, depth, dim, kind) for i, kind in enumerate(kinds)]


def make_config(
    cls: type[DepthMixer] | type[KVMixer], name: str, options: Mapping[str, Any], *, dim: int, depth: int
) -> MixerConfig:
    with naming_plugin(name, passing=ValueError):
        known = [field.name for field in dataclasses.fields(cls.Config)]
        for option in options:
            if option not in known:
                hint = did_you_mean(option, known)
                raise ValueError(f"{name} has no option {option!r}. {hint}Known: {', '.join(known) or 'none'}")
        try:
            config = cls.Config(**options)
            config.check(dim=dim, depth=depth)
            return config
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
