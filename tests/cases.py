"""Every mechanism with every set of options that it names: what most tests run over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import depthmix as dm


def label(name: str, options: Mapping[str, Any]) -> str:
    return "-".join([name, *(f"{k}={v}" for k, v in options.items())])


ALL = [pytest.param(n, dict(o), id=label(n, o)) for n in dm.list_mechanisms() for o in dm.mechanism(n).variants]
DEFAULTS = [pytest.param(n, dict(dm.mechanism(n).variants[0]), id=n) for n in dm.list_mechanisms()]
EVERY_CASE = pytest.mark.parametrize(("name", "options"), ALL)
EVERY_MECHANISM = pytest.mark.parametrize(("name", "options"), DEFAULTS)
