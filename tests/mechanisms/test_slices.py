"""A stack in slices is the stack: cut anywhere, resumed from the plain tuple, each with its own sites' parameters."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from depthmix.analysis.invariants import Probe, distance, make_probe
from tests.cases import EVERY_CASE, label

DEPTHS = pytest.mark.parametrize("depth", range(7, 14))
# Those whose sites know of each other, or that hand on what they derived.
BOUND: list[tuple[str, dict[str, Any]]] = [
    ("attnres", {}),
    *(("block_attnres", {"block_sublayers": size}) for size in (2, 3, 5)),
    ("delta_attnres", {}),
]
EVERY_BOUND = pytest.mark.parametrize(("name", "options"), [pytest.param(*case, id=label(*case)) for case in BOUND])


def small(name: str, options: dict[str, Any], depth: int) -> Probe:
    """Every parameter of every site is noise of its own."""
    return make_probe(name, options, depth=depth, dim=4, tokens=(3,))


def run(part: dm.DepthStack, state: dm.State, probe: Probe) -> dm.State:
    for mixer, f in zip(part, probe.sublayers[part.lo : part.hi], strict=True):
        state = mixer.step(state, f)
    return state


def gradients(out: Tensor, x: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(out.sin().sum(), [x, *parameters.values()], allow_unused=True)
    return dict(zip(["x", *parameters], found, strict=True))


def whole(probe: Probe, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = probe.stack.end(run(probe.stack, probe.stack.begin(x), probe))
    return out.detach(), gradients(out, x, dict(probe.stack.named_parameters()))


def check(out: Tensor, mine: dict[str, Tensor], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert distance(out.detach(), want[0]) <= 1e-12
    assert mine.keys() == want[1].keys()
    for name, gradient in mine.items():
        assert distance(gradient, want[1][name]) <= 1e-12, name


def stage(stack: dm.DepthStack, lo: int, hi: int) -> dm.DepthStack:
    """The slice as a rank of a pipeline has it: what belongs to other sites is not there, here NaN."""
    there = copy.deepcopy(stack)
    part = there.slice(lo, hi)
    own = {id(p) for p in part.parameters()}
    with torch.no_grad():
        for parameter in there.parameters():
            if id(parameter) not in own:
                parameter.fill_(torch.nan)
    return part


def run_stages(parts: Sequence[dm.DepthStack], probe: Probe, x: Tensor, dropped: bool = False) -> Any:
    """Output and gradients through these stages, each handing on all that it has or the essential part."""
    state = parts[0].begin(x)
    for part in parts:
        state = run(part, state, probe)
        if dropped:
            state = state[: part.spec(part.hi).essential]
    out = parts[-1].end(state)
    return out, gradients(out, x, {name: p for part in parts for name, p in part.named_parameters()})


@EVERY_BOUND
@DEPTHS
def test_two_stages_that_know_their_own_sites_only_are_the_whole(
    name: str, options: dict[str, Any], depth: int
) -> None:
    probe = small(name, options, depth)
    x = probe.x.clone().requires_grad_()
    want = whole(probe, x)
    for cut in range(1, depth):
        parts = [stage(probe.stack, 0, cut), stage(probe.stack, cut, depth)]
        for dropped in (False, True):
            check(*run_stages(parts, probe, x, dropped), want)


@EVERY_BOUND
def test_any_number_of_stages_that_know_their_own_sites_only_are_the_whole(name: str, options: dict[str, Any]) -> None:
    depth = 7
    probe = small(name, options, depth)
    x = probe.x.clone().requires_grad_()
    want = whole(probe, x)
    stages = {(lo, hi): stage(probe.stack, lo, hi) for lo, hi in itertools.combinations(range(depth + 1), 2)}
    for count in range(depth):
        for cuts in itertools.combinations(range(1, depth), count):
            parts = [stages[bounds] for bounds in itertools.pairwise([0, *cuts, depth])]
            check(*run_stages(parts, probe, x), want)


def check_taken_over(probe: Probe) -> None:
    """The whole runs to the cut, a slice from there on: with what the whole derived for its sites, and without."""
    x = probe.x.clone().requires_grad_()
    want = whole(probe, x)
    states = [probe.stack.begin(x)]
    for mixer, f in zip(probe.stack, probe.sublayers, strict=True):
        states.append(mixer.step(states[-1], f))
    for cut in range(1, len(probe.stack)):
        part, essential = probe.stack.slice(cut, len(probe.stack)), probe.stack.spec(cut).essential
        for length in {essential, len(states[cut])}:
            out = part.end(run(part, states[cut][:length], probe))
            found = torch.autograd.grad(
                out.sin().sum(), [x, *probe.stack.parameters()], retain_graph=True, allow_unused=True
            )
            check(out, dict(zip(want[1], found, strict=True)), want)


@EVERY_BOUND
@DEPTHS
def test_a_slice_takes_over_from_the_whole_at_any_site(name: str, options: dict[str, Any], depth: int) -> None:
    check_taken_over(small(name, options, depth))


@EVERY_CASE
def test_a_slice_of_every_mechanism_takes_over_from_the_whole(name: str, options: dict[str, Any]) -> None:
    check_taken_over(make_probe(name, options, depth=7, tokens=(2,)))


@EVERY_BOUND
@torch.no_grad()
def test_a_slice_of_a_slice_is_the_slice_of_the_whole(name: str, options: dict[str, Any]) -> None:
    depth = 8
    probe = small(name, options, depth)
    states = probe.states()
    for lo, hi in itertools.combinations(range(depth + 1), 2):
        plain = {i: states[i][: probe.stack.spec(i).essential] for i in (lo, hi)}
        direct = run(probe.stack.slice(lo, hi), plain[lo], probe)
        for a, b in zip(direct, plain[hi], strict=False):
            assert distance(a, b) <= 1e-12
        for outer in {(0, hi), (lo, depth), (max(0, lo - 1), min(depth, hi + 1))}:
            part = stage(probe.stack.slice(*outer), lo, hi)
            nested = run(part, plain[lo], probe)
            assert len(nested) == len(direct)
            assert all(torch.equal(a, b) for a, b in zip(nested, direct, strict=True))
            if hi == depth:
                assert distance(part.end(nested), probe.stack.end(states[-1])) <= 1e-12


@EVERY_BOUND
@torch.no_grad()
def test_slicing_leaves_the_whole_and_its_slices_as_they_were(name: str, options: dict[str, Any]) -> None:
    """A group that crosses a cut is still read at once by whoever holds all of it."""
    probe = small(name, options, 11)
    before, outer = probe.states(), probe.stack.slice(2, 11)
    plain = before[2][: probe.stack.spec(2).essential]
    resumed = run(outer, plain, probe)
    for lo, hi in itertools.combinations(range(2, 12), 2):
        for source in (probe.stack, outer):
            source.slice(lo, hi)
            pairs = [*zip(probe.states(), before, strict=True), (run(outer, plain, probe), resumed)]
            for now, then in pairs:
                assert len(now) == len(then)
                assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))
    assert [m.site.index for m in outer] == list(range(2, 11))
