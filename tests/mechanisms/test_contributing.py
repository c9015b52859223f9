"""The mechanism that CONTRIBUTING.md shows: extracted, registered as a package, and held to everything it says."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import depthmix as dm
from depthmix.analysis.invariants import make_probe, verify
from depthmix.cli.show import equations
from tests.mechanisms.test_flops import TOLERANCE, by_parts, by_read, deviation, lean  # noqa: F401

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
_, CODE, REFERENCE = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
NAME, TARGET = re.search(r'^(\w+) = "(\S+)"$', PAGE, re.M).groups()  # type: ignore[union-attr]
VARIANTS = [{}, {"gate": "channel"}, {"bias": 1.0}]
EACH = pytest.mark.parametrize("options", VARIANTS, ids=str)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with the entry point of the page, as pip would install it."""
    module = tmp_path / f"{TARGET.partition(':')[0].replace('.', '/')}.py"
    module.parent.mkdir()
    module.write_text(CODE)
    (tmp_path / "memory_reference.py").write_text(REFERENCE)
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[depthmix.mechanisms]\n{NAME} = {TARGET}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_package", "my_package.memory", "memory_reference"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return NAME


@pytest.fixture
def reference(memory: str) -> ModuleType:
    return importlib.import_module("memory_reference")


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1))


def test_it_has_every_method_and_about_fifty_lines_of_them(memory: str) -> None:
    cls = dm.mechanism(memory)
    for method in ("begin", "coeff", "combine", "value", "update", "spec", "facts", "reset_parameters", "groups"):
        assert method in vars(cls), method
    assert list(cls.variants) == VARIANTS
    body = CODE.partition("@classmethod")[2].splitlines()
    assert len([line for line in body if line.strip()]) <= 60


@EACH
def test_every_invariant_holds(memory: str, options: dict[str, Any]) -> None:
    checks = verify(memory, options)
    assert [c.name for c in checks if not c.holds] == []
    assert len(checks) >= len(verify("residual")) - 1  # it promises no row sums


@EACH
def test_it_agrees_with_its_reference(memory: str, reference: ModuleType, options: dict[str, Any]) -> None:
    probe = make_probe(memory, options, seed=1)
    x = probe.x.requires_grad_()
    arguments = (x, probe.sublayers, dict(probe.stack.named_parameters()))
    traced = dm.trace(probe.stack, x, probe.sublayers)
    inputs = torch.stack(reference.inputs(*arguments, **options))
    assert distance(traced.inputs, inputs) <= 1e-12
    assert distance(traced.M, reference.matrix(*arguments, **options)) <= 1e-12
    variables = [x, *probe.stack.parameters()]
    weight = torch.linspace(-1, 1.5, x.numel(), dtype=x.dtype).view_as(x)
    ours = torch.autograd.grad((probe.run() * weight).sum(), variables)
    theirs = torch.autograd.grad((inputs[-1] * weight).sum(), variables)
    assert max(map(distance, ours, theirs)) <= 1e-11
    assert "depthmix" not in REFERENCE


@EACH
@pytest.mark.parametrize("dim", TOLERANCE)
def test_its_flops_are_those_of_every_operation(memory: str, options: dict[str, Any], dim: int, lean: None) -> None:  # noqa: F811
    stack = dm.DepthStack(memory, dim=dim, depth=9, **options)
    for run in (by_read, by_parts):
        assert abs(deviation(lambda tokens, run=run: run(stack, tokens), stack.facts.flops)) < TOLERANCE[dim]


def test_it_reaches_its_rank_and_its_equations_have_lines_of_code(memory: str) -> None:
    probe = make_probe(memory, {}, seed=2)
    assert int(dm.trace(probe.stack, probe.x, probe.sublayers).rank().max()) == probe.stack.facts.rank == 2
    rows = equations(dm.mechanism(memory))
    assert [row["mark"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert all(row["code"] for row in rows)
    with pytest.raises(ValueError, match=r"memory: eps=0.0; expected a number above 0"):
        dm.DepthStack(memory, dim=8, depth=4, eps=0.0)


def test_the_page_names_every_field_that_a_mechanism_states() -> None:
    fields = {*dm.Facts.__dataclass_fields__, *dm.StateSpec.__dataclass_fields__, *dm.Site.__dataclass_fields__}
    attributes = {name for name in vars(dm.DepthMixer) if not name.startswith("_")} - {"resolve"}
    helpers = {"step", "check_state", "checked_output", "Config"}
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", PAGE))))
    assert (fields | attributes) - helpers <= words
