"""Adding a mechanism from outside: one small class and one entry point, and every check applies to it."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch

import depthmix as dm
from depthmix.analysis.invariants import verify
from depthmix.cli.list import describe, on_meta
from depthmix.cli.show import equations
from depthmix.mechanisms import registry

OUTSIDE = '''
import torch, depthmix as dm

class Decayed(dm.DepthMixer):
    """A stream with a learned decay of what it holds.

    (1) x ← a x + v
    """
    paper, holds, rank_formula, parameters_formula = "none", "x", "1", "L"
    @classmethod
    def facts(cls, config, *, dim, depth):
        return dm.Facts(preserves_prenorm="exact", rank=1, parameters=depth, reads=2 * dim, writes=dim)
    def __init__(self, site, config):
        super().__init__(site, config)
        self.add_parameter("a", 1, exists=not site.is_out)
    def reset_parameters(self): self.a is None or torch.nn.init.ones_(self.a)
    def coeff(self, state): return self.a
    def combine(self, state, c): return state[0]
    def update(self, state, c, v): return (dm.ops.weighted_sum([state[0], v], [c, None]),)  # (1)
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with an entry point, as pip would install it."""
    (tmp_path / "decayed_mixer.py").write_text(textwrap.dedent(OUTSIDE))
    info = tmp_path / "decayed_mixer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: decayed-mixer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[depthmix.mechanisms]\ndecayed = decayed_mixer:Decayed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "decayed_mixer", raising=False)
    return "decayed"


def test_a_mechanism_from_another_package_gets_every_check(outside: str) -> None:
    assert outside in dm.list_mechanisms()
    checks = verify(outside)
    assert [c.name for c in checks if not c.holds] == []
    assert len(checks) == len(verify("residual")) - 1  # it promises no row sums
    assert describe(on_meta(outside, 8, 4))["parameters"] == 4
    assert equations(dm.mechanism(outside))[0]["code"][0].startswith("decayed_mixer.py:")


def test_a_mechanism_from_another_package_runs_and_traces(outside: str) -> None:
    stack = dm.DepthStack(outside, dim=4, depth=3)
    torch.nn.init.constant_(stack[1].a, 0.5)
    traced = dm.trace(stack, torch.randn(2, 4), [torch.tanh] * 3)
    want = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0.5, 0.5, 1, 0], [0.5, 0.5, 1, 1]])
    assert torch.allclose(traced.M, want.expand(2, 4, 4))


def test_it_is_about_fifteen_lines() -> None:
    body = OUTSIDE.partition("class Decayed")[2].splitlines()
    assert len([line for line in body if line.strip() and '"""' not in line and "(1) x" not in line]) <= 16


def test_a_class_can_be_given_instead_of_a_name() -> None:
    cls = dm.mechanism("residual")
    assert dm.DepthStack(cls, dim=4, depth=2).name == "Residual"


def test_the_registry_is_sorted_and_names_classes_that_exist() -> None:
    assert list(registry.DEPTH) == sorted(registry.DEPTH)
    for name, target in registry.DEPTH.items():
        assert dm.mechanism(name).__name__ == target.partition(":")[2]


def test_a_package_that_cannot_be_loaded_is_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "absent_mixer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: absent-mixer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[depthmix.mechanisms]\nabsent = no_such_module:Absent\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match=r"'absent' of no_such_module:Absent \(package .*\) cannot be loaded"):
        names = dm.list_mechanisms()
    assert "absent" not in names
    assert "residual" in names
    assert dm.DepthStack("residual", dim=4, depth=2).name == "residual"


def test_an_outside_mechanism_may_hold_modules() -> None:
    class Gated(dm.DepthMixer):
        @classmethod
        def facts(cls, config: object, *, dim: int, depth: int) -> dm.Facts:
            return dm.Facts(preserves_prenorm="no", rank=1, parameters=depth * (dim + 1), reads=2 * dim, writes=dim)

        def __init__(self, site: dm.Site, config: dm.MixerConfig) -> None:
            super().__init__(site, config)
            self.gate = None if site.is_out else torch.nn.Linear(site.dim, 1)

        def coeff(self, state: dm.State) -> object:
            return None if self.gate is None else torch.sigmoid(self.gate(state[0]))

        def combine(self, state: dm.State, c: object) -> torch.Tensor:
            return state[0]

        def update(self, state: dm.State, c: torch.Tensor, v: torch.Tensor) -> dm.State:
            return (state[0] + c * v,)

    assert [c.name for c in verify(Gated) if not c.holds] == []
    names = [name for group in dm.param_groups(dm.DepthStack(Gated, dim=4, depth=2)) for name in group["names"]]
    assert names == ["mixers.0.gate.weight", "mixers.0.gate.bias", "mixers.1.gate.weight", "mixers.1.gate.bias"]


def test_an_own_name_cannot_be_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "impostor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: impostor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[depthmix.mechanisms]\nresidual = nowhere:Nothing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert dm.mechanism("residual").__name__ == "Residual"
    assert dm.list_mechanisms().count("residual") == 1
