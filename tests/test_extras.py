"""Extras: a message that tells what to install names one that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from depthmix.support.files import parse_toml

ROOT = Path(__file__).parent.parent
ALIASES = {"train": "bpe", "report": "figures", "eval": "parquet"}


@pytest.fixture(scope="module")
def extras() -> dict[str, Any]:
    content = parse_toml((ROOT / "pyproject.toml").read_text(), "pyproject.toml", "")
    return content["project"]["optional-dependencies"]


def test_every_extra_that_the_source_names_is_in_pyproject_and_no_old_alias(extras: dict[str, Any]) -> None:
    named = {
        name: path.relative_to(ROOT)
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"depthmix\[([^\]]*)\]", path.read_text())
    }
    assert {"figures", "bpe", "parquet", "datasets", "kernels", "bench"} <= set(named)
    assert {name: path for name, path in named.items() if name not in extras or name in ALIASES} == {}


@pytest.mark.parametrize(("old", "new"), ALIASES.items())
def test_an_old_name_installs_what_the_new_one_does(old: str, new: str, extras: dict[str, Any]) -> None:
    assert extras[old] == [f"depthmix[{new}]"]
    assert new in extras
