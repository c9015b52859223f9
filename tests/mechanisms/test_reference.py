"""Every mechanism and option against its paper, transcribed as plain loops under tests/reference."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import depthmix as dm
from depthmix.analysis.invariants import Probe, make_probe
from tests.cases import ALL, EVERY_CASE, EVERY_MECHANISM

TIGHT = 1e-12


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = TIGHT) -> None:
    assert a.shape == b.shape
    error = (a - b).abs().max() if a.numel() else torch.tensor(0.0)
    assert error <= tolerance * b.abs().max().clamp(min=1) if b.numel() else True, f"differs by {error:.1e}"


def reference_inputs(name: str, options: dict[str, Any], probe: Probe) -> torch.Tensor:
    reference = importlib.import_module(f"tests.reference.{name}")
    params = dict(probe.stack.named_parameters())
    return torch.stack(reference.inputs(probe.x, probe.sublayers, params, **options))


@EVERY_CASE
def test_reads_what_the_paper_says(name: str, options: dict[str, Any]) -> None:
    probe = make_probe(name, options, seed=1)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    close(traced.inputs, reference_inputs(name, options, probe))


@EVERY_CASE
def test_the_replayed_matrix_is_the_closed_form(name: str, options: dict[str, Any]) -> None:
    reference = importlib.import_module(f"tests.reference.{name}")
    probe = make_probe(name, options, seed=2)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    arguments = (probe.x, probe.sublayers, dict(probe.stack.named_parameters()))
    if traced.kind == "operator":
        close(torch.stack([traced.contributions(r) for r in range(8)]), reference.contributions(*arguments, **options))
    else:
        close(traced.M, reference.matrix(*arguments, **options))


@EVERY_CASE
def test_gradients_are_those_of_the_paper(name: str, options: dict[str, Any]) -> None:
    probe = make_probe(name, options, depth=5, tokens=(2,), seed=3)
    x = probe.x.requires_grad_()
    variables = [x, *probe.stack.parameters()]
    names = ["x", *(n for n, _ in probe.stack.named_parameters())]
    weight = torch.linspace(-1, 1.5, x.numel(), dtype=x.dtype).view_as(x)
    ours = torch.autograd.grad((probe.run() * weight).sum(), variables)
    theirs = torch.autograd.grad((reference_inputs(name, options, probe)[-1] * weight).sum(), variables)
    for who, a, b in zip(names, ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-11 * b.abs().max().clamp(min=1), who


@EVERY_CASE
def test_gradcheck(name: str, options: dict[str, Any]) -> None:
    probe = make_probe(name, options, dim=4 if name != "mhc_lite" else 2, depth=4, tokens=(1,), seed=4, spread=0.3)
    names = [n for n, _ in probe.stack.named_parameters()]

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(probe.stack, state, (x, probe.sublayers))

    inputs = [probe.x.requires_grad_(), *(p.detach().requires_grad_() for p in probe.stack.parameters())]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    case=st.sampled_from(ALL),
    depth=st.integers(4, 9),
    tokens=st.sampled_from([(), (1,), (3,), (2, 1, 2)]),
    seed=st.integers(0, 10**6),
)
def test_reads_what_the_paper_says_at_any_size(case: Any, depth: int, tokens: tuple[int, ...], seed: int) -> None:
    name, options = case.values
    probe = make_probe(name, options, depth=depth, tokens=tokens, seed=seed, spread=0.3)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    close(traced.inputs, reference_inputs(name, options, probe))


@EVERY_MECHANISM
def test_the_reference_knows_nothing_of_the_library(name: str, options: dict[str, Any]) -> None:
    reference = importlib.import_module(f"tests.reference.{name}")
    with open(str(reference.__file__)) as file:
        assert "depthmix" not in file.read()


def test_a_changed_weight_is_noticed() -> None:
    """The comparison can fail: one query moved by 1e-6 is seen."""
    probe = make_probe("attnres", {}, seed=5)
    wanted = reference_inputs("attnres", {}, probe)
    with torch.no_grad():
        probe.stack[3].query[0] += 1e-6
    with pytest.raises(AssertionError):
        close(dm.trace(probe.stack, probe.x, probe.sublayers).inputs, wanted)
