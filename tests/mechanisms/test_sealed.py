"""What a spec says of a state: its shapes, what is needed of it, and what never changes again, no more and no less."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import depthmix as dm
from depthmix.analysis.invariants import Probe, make_probe
from tests.cases import ALL, label

# Options at their ends, beside the variants that every mechanism names.
ENDS: list[tuple[str, dict[str, Any]]] = [
    *(("attnres", {"window": window}) for window in (3, 6, 7, 8, 99)),
    ("attnres", {"window": 7, "mixing": "static"}),
    *(("block_attnres", {"block_sublayers": size}) for size in (4, 5, 6, 7)),
    ("denseformer", {"block_sublayers": 3}),
    ("denseformer", {"block_sublayers": 99}),
    ("denseformer", {"period": 99}),
]
EVERY_CASE = pytest.mark.parametrize(
    ("name", "options"), [*ALL, *(pytest.param(*case, id=label(*case)) for case in ENDS)]
)
DEPTHS = (7, 8)


def least_depth(name: str, options: dict[str, Any]) -> int:
    """Blocks of block_attnres have to fit the depth."""
    return max(options.get("block_sublayers", 1), options.get("num_blocks", 1)) if name == "block_attnres" else 1


def probes(name: str, options: dict[str, Any], *depths: int) -> list[Probe]:
    """With parameters that are off their start."""
    return [make_probe(name, options, depth=depth) for depth in depths or DEPTHS]


def plain_states(probe: Probe) -> list[dm.State]:
    """The state before each site by the mechanism's definition: no fast path, nothing derived."""
    states = [probe.stack.begin(probe.x)]
    for mixer, f in zip(probe.stack, probe.sublayers, strict=True):
        c = mixer.coeff(states[-1])
        y = f(mixer.combine(states[-1], c))
        states.append(mixer.update(states[-1], *mixer.value(states[-1], c, y)))
    return states


@EVERY_CASE
@torch.no_grad()
def test_sealed_tensors_are_in_every_later_state_as_they_are(name: str, options: dict[str, Any]) -> None:
    for probe in probes(name, options):
        for states in (probe.states(), plain_states(probe)):
            kept = [tuple(t.clone() for t in state) for state in states]
            for index, state in enumerate(states):
                sealed = probe.stack.spec(index).sealed
                assert 0 <= sealed <= probe.stack.spec(index).essential
                for later in states[index + 1 :]:
                    assert [id(t) for t in later[:sealed]] == [id(t) for t in state[:sealed]]
                assert all(torch.equal(a, b) for a, b in zip(state, kept[index], strict=True)), "changed in place"


@EVERY_CASE
@torch.no_grad()
def test_whatever_never_changes_again_is_sealed(name: str, options: dict[str, Any]) -> None:
    """Before the output nothing is left that could change: what is sealed there is a matter of definition."""
    first = least_depth(name, options)
    for probe in probes(name, options, *range(first, max(first, 8) + 1)):
        states = probe.states()
        for index, state in enumerate(states[:-1]):
            lasting = 0
            while lasting < len(state) and all(
                lasting < len(later) and torch.equal(later[lasting], state[lasting]) for later in states[index + 1 :]
            ):
                lasting += 1
            assert probe.stack.spec(index).sealed == lasting, f"before site {index} of {probe.stack.depth}"


# Of blocks of 3 sublayers: the embedding and finished blocks, and at a boundary the partial too.
@pytest.mark.parametrize(
    ("name", "options", "depth", "sealed"),
    [
        ("residual", {}, 4, [0, 0, 0, 0, 0]),
        ("mhc", {}, 4, [0, 0, 0, 0, 0]),
        ("ddl", {}, 4, [0, 0, 0, 0, 0]),
        ("mrla", {}, 4, [0, 0, 0, 0, 0]),
        ("mrla", {"form": "base"}, 4, [1, 4, 6, 8, 10]),
        ("block_attnres", {"block_sublayers": 3}, 7, [1, 1, 1, 2, 2, 2, 3, 3]),
        ("block_attnres", {"block_sublayers": 3}, 8, [1, 1, 1, 2, 2, 2, 3, 3, 3]),
        ("block_attnres", {"block_sublayers": 3}, 9, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4]),
        ("block_attnres", {"block_sublayers": 1}, 4, [1, 2, 3, 4, 5]),
        ("denseformer", {}, 5, [1, 1, 2, 2, 3, 3]),
        ("attnres", {}, 5, [1, 2, 3, 4, 5, 6]),
        ("attnres", {"window": 2}, 5, [1, 1, 1, 1, 1, 1]),
        ("attnres", {"window": 4}, 5, [1, 1, 1, 1, 1, 1]),
        ("attnres", {"window": 5}, 5, [1, 2, 3, 4, 5, 6]),
        ("delta_attnres", {}, 5, [1, 2, 3, 4, 5, 6]),
    ],
    ids=str,
)
def test_how_many_are_sealed_before_each_site(
    name: str, options: dict[str, Any], depth: int, sealed: list[int]
) -> None:
    stack = dm.DepthStack(name, dim=4, depth=depth, **options)
    assert [stack.spec(index).sealed for index in range(depth + 1)] == sealed


@EVERY_CASE
@torch.no_grad()
def test_shapes_and_essential_tensors_are_those_of_the_real_state(name: str, options: dict[str, Any]) -> None:
    for probe in probes(name, options):
        lead = len(probe.x.shape) - 1
        for index, (state, plain) in enumerate(zip(probe.states(), plain_states(probe), strict=True)):
            spec = probe.stack.spec(index)
            assert [tuple(t.shape[lead:]) for t in state] == list(spec.shapes)
            assert [tuple(t.shape[lead:]) for t in plain] == list(spec.shapes[: spec.essential])


@EVERY_CASE
def test_every_mixer_and_every_slice_tell_the_spec_of_every_site(name: str, options: dict[str, Any]) -> None:
    stack = dm.DepthStack(name, dim=8, depth=7, **options)
    own = [mixer.expects for mixer in stack.all_mixers()]
    for part in (stack, stack.slice(0, 3), stack.slice(2, 5), stack.slice(5, 7)):
        assert [part.spec(index) for index in range(8)] == own
    for mixer in stack.all_mixers():
        assert [mixer.spec(other.site) for other in stack.all_mixers()] == own
