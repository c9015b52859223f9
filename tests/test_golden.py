"""Golden files: what configurations resolve to, and the losses of tiny runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import golden


@pytest.mark.parametrize("name", golden.CONFIGURATIONS)
def test_configurations_resolve_to_what_they_did(name: str) -> None:
    found = json.loads(golden.as_text(golden.CONFIGURATIONS[name]()))
    kept = golden.read(name)
    assert found.keys() == kept.keys(), golden.RENEW
    for key in kept:
        assert found[key] == kept[key], f"{key} of tests/golden/{name}.json. {golden.RENEW}"


@pytest.mark.parametrize("name", golden.RUNS)
def test_losses_are_what_they_were(name: str, tmp_path: Path) -> None:
    found = golden.losses(tmp_path, *golden.RUNS[name])
    problem = golden.far(found, golden.read("losses")["runs"][name])
    assert problem is None, f"{name}: {problem}. {golden.RENEW}"


def test_the_golden_losses_are_of_the_runs_that_are_here_and_say_why() -> None:
    kept = golden.read("losses")
    assert kept["why"].strip()
    assert [*kept["runs"]] == [*golden.RUNS], golden.RENEW


def test_losses_that_differ_are_named() -> None:
    kept = {"train": [5.0, 4.0]}
    assert golden.far({"train": [5.0, 4.0003]}, kept) is None
    assert golden.far({"train": [5.0, 4.001]}, kept) == "train loss 2 is 4.001; 4.0 is kept"
    assert golden.far({"train": [5.0, float("nan")]}, kept) is not None
    assert golden.far({"train": [5.0]}, kept) == "1 train losses; 2 are kept"
