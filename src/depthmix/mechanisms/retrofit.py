"""Options with which a network that was trained without a mechanism keeps its function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from depthmix.mechanisms.make import make_config
from depthmix.mechanisms.registry import mechanism


def retrofit_options(name: str, options: Mapping[str, Any], *, dim: int, depth: int) -> dict[str, Any]:
    """The given options and those that keep a trained network's function, unless the given ones exclude these."""
    cls = mechanism(name)
    kept = {key: value for key, value in cls.Config.retrofit.items() if key not in options}
    make_config(cls, name, options, dim=dim, depth=depth)  # its errors are about what was given
    try:
        make_config(cls, name, {**kept, **options}, dim=dim, depth=depth)
    except ValueError:
        kept = {}
    return {**kept, **options}
