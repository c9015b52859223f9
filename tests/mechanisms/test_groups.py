"""Sites that are read in groups: which sites share a pass over the sources, and states whose derived tail was cut.

A group begins at every size-th site and ends before the next one, or with the output. What its first site found for the
others travels behind the essential tensors, a mixture and a log-sum-exp for each reader. A cut may drop any part of
that tail, also half a pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix import ops
from depthmix.analysis.invariants import Probe, distance, make_probe
from depthmix.mechanisms import two_phase
from tests.cases import label

# Sites by group; the last site is the output.
GROUPS: list[tuple[str, dict[str, Any], list[list[int]]]] = [
    ("block_attnres", {"block_sublayers": 1}, [[0], [1], [2], [3]]),
    ("block_attnres", {"block_sublayers": 2}, [[0, 1], [2, 3], [4, 5], [6]]),
    ("block_attnres", {"block_sublayers": 2}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("block_attnres", {"block_sublayers": 3}, [[0, 1, 2], [3, 4, 5], [6, 7]]),
    ("block_attnres", {"block_sublayers": 3}, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
    ("block_attnres", {"block_sublayers": 3}, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]),
    ("block_attnres", {"num_blocks": 3}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
    ("block_attnres", {"num_blocks": 3}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
    ("block_attnres", {"num_blocks": 3}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]]),
    ("block_attnres", {"block_sublayers": 5}, [[0, 1, 2, 3, 4], [5]]),
    ("block_attnres", {"block_sublayers": 5}, [[0, 1, 2, 3, 4], [5, 6]]),
    ("attnres", {}, [[0], [1], [2]]),
    ("attnres", {}, [[0, 1], [2, 3]]),
    ("attnres", {}, [[0, 1], [2, 3], [4, 5], [6]]),
    ("attnres", {}, [[0, 1, 2], [3, 4, 5], [6, 7]]),
    ("attnres", {"key_norm": False}, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
    ("attnres", {"scale": 0.3}, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]),
    ("attnres", {}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]),
]
EVERY_GROUPING = pytest.mark.parametrize(
    ("name", "options", "groups"), [pytest.param(*g, id=f"{label(*g[:2])}-depth={g[2][-1][-1]}") for g in GROUPS]
)
CUT: list[tuple[str, dict[str, Any], int]] = [
    *(("block_attnres", {"block_sublayers": size}, depth) for size in (2, 3, 4, 5) for depth in (7, 9, 10, 13)),
    *(("attnres", {}, depth) for depth in range(7, 14)),
    ("attnres", {"scale": 0.3, "key_norm": False}, 9),
    ("delta_attnres", {}, 9),
]
EVERY_CUT = pytest.mark.parametrize(
    ("name", "options", "depth"), [pytest.param(*c, id=f"{label(*c[:2])}-depth={c[2]}") for c in CUT]
)


def small(name: str, options: Mapping[str, Any], depth: int) -> Probe:
    return make_probe(name, options, depth=depth, dim=4, tokens=(3,))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Number of sources and of queries of every pass that serves a group."""
    calls: list[tuple[int, int]] = []

    def read_many(sources: Any, query: Tensor, prior: Any = None, *, options: Any) -> Any:
        if prior is None:
            calls.append((len(sources), query.numel() // sources[0].shape[-1]))
        return ops.read_many(sources, query, prior, options=options)

    with monkeypatch.context() as patch:
        patch.setattr(two_phase, "ops", Spied(read_many))
        yield calls


class Spied:
    """`ops` with another `read_many`."""

    def __init__(self, read_many: Callable[..., Any]) -> None:
        self.read_many = read_many

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)


def shared(groups: list[list[int]]) -> list[list[int]]:
    """Groups with something to share: more than one reader, and more than the embedding finished."""
    return [group for group in groups[1:] if len(group) > 1]


@EVERY_GROUPING
def test_a_group_is_passed_over_once_for_all_its_sites_the_output_among_them(
    name: str, options: dict[str, Any], groups: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = groups[-1][-1]
    with counted(monkeypatch) as calls, torch.no_grad():
        small(name, options, depth).run()
    finished = {group[0]: 1 + (group[0] if name == "attnres" else number) for number, group in enumerate(groups)}
    assert calls == [(finished[group[0]], len(group)) for group in shared(groups)]


@EVERY_GROUPING
def test_a_state_carries_a_pair_for_each_site_of_its_group_that_is_still_to_be_read(
    name: str, options: dict[str, Any], groups: list[list[int]]
) -> None:
    probe = small(name, options, groups[-1][-1])
    want = [0] * (groups[-1][-1] + 1)
    for group in shared(groups):
        for place, site in enumerate(group[1:], 1):
            want[site] = 2 * (len(group) - place)
    with torch.no_grad():
        states = probe.states()
    specs = [probe.stack.spec(index) for index in range(len(want))]
    assert [len(spec.shapes) - spec.essential for spec in specs] == want
    assert [len(state) - spec.essential for state, spec in zip(states, specs, strict=True)] == want


@EVERY_GROUPING
def test_the_pairs_are_in_the_order_of_their_readers(
    name: str, options: dict[str, Any], groups: list[list[int]]
) -> None:
    probe = small(name, options, groups[-1][-1])
    mixers: list[Any] = probe.stack.all_mixers()
    how = {"normalize": options.get("key_norm", True), "scale": options.get("scale", 1.0)}
    with torch.no_grad():
        states = probe.states()
        for group in shared(groups):
            finished = states[group[0]]  # at a boundary every source is finished
            alone = [ops.attend(finished, mixers[i].query, mixers[i].key_weight, **how) for i in group]
            for place, site in enumerate(group[1:], 1):
                tail = states[site][probe.stack.spec(site).essential :]
                pairs = zip(tail[::2], tail[1::2], strict=True)
                for (h, lse), (mixed, summed) in zip(pairs, alone[place:], strict=True):
                    assert distance(h, mixed) <= 1e-12
                    assert distance(lse, summed) <= 1e-12


@EVERY_GROUPING
@torch.no_grad()
def test_a_slice_shares_reads_among_the_sites_of_a_group_that_it_holds(
    name: str, options: dict[str, Any], groups: list[list[int]]
) -> None:
    depth = groups[-1][-1]
    probe = small(name, options, depth)
    states = probe.states()
    for lo, hi in itertools.combinations(range(depth + 1), 2):
        part, state = probe.stack.slice(lo, hi), states[lo][: probe.stack.spec(lo).essential]
        waiting = [0] * (depth + 1)
        for group in shared(groups):
            held = [site for site in group if lo <= site < hi + (hi == depth)]
            for place, site in enumerate(held[1:], 1):
                waiting[site] = 2 * (len(held) - place)
        for mixer in part:
            state = mixer.step(state, probe.sublayers[mixer.site.index])
            after = mixer.site.index + 1
            assert len(state) - probe.stack.spec(after).essential == waiting[after], (lo, hi, after)


# Cuts


def read_all(probe: Probe, x: Tensor, lengths: Mapping[int, int]) -> list[Tensor]:
    """What every site reads in the model's own loop, with the derived tail before some sites cut to these lengths."""
    state, rows = probe.stack.begin(x), []
    for index, mixer in enumerate(probe.stack.all_mixers()):
        if index in lengths:
            state = state[: probe.stack.spec(index).essential + lengths[index]]
        h, carry = mixer.read(state)
        rows.append(h)
        if not mixer.site.is_out:
            state = mixer.write(state, carry, probe.sublayers[index](h))
    return rows


def read_plainly(probe: Probe, x: Tensor) -> list[Tensor]:
    """The same by the mechanism's definition: no fast path, no groups."""
    state, rows = probe.stack.begin(x), []
    for index, mixer in enumerate(probe.stack.all_mixers()):
        c = mixer.coeff(state)
        rows.append(mixer.combine(state, c))
        if not mixer.site.is_out:
            state = mixer.update(state, *mixer.value(state, c, probe.sublayers[index](rows[-1])))
    return rows


def gradients(probe: Probe, x: Tensor, rows: list[Tensor]) -> tuple[Tensor, ...]:
    loss = torch.stack([(row.sin() * (i + 1)).sum() for i, row in enumerate(rows)]).sum()
    return torch.autograd.grad(loss, [x, *probe.stack.parameters()])


def every_cut(probe: Probe) -> list[dict[int, int]]:
    """Each site with each length that a cut can leave of its derived tail, and all sites at once."""
    tails = {i: len(spec.shapes) - spec.essential for i in range(len(probe.stack) + 1) if (spec := probe.stack.spec(i))}
    single = [{site: length} for site, tail in tails.items() for length in range(tail + 1) if tail]
    assert single
    return [*single, *({site: max(0, tail - gone) for site, tail in tails.items()} for gone in (1, 2, 3, 99))]


@EVERY_CUT
def test_a_tail_cut_to_any_length_gives_the_same_reads_and_gradients(
    name: str, options: dict[str, Any], depth: int
) -> None:
    probe = small(name, options, depth)
    x = probe.x.clone().requires_grad_()
    plain = read_plainly(probe, x)
    plain_gradients = gradients(probe, x, plain)
    for lengths in every_cut(probe):
        rows = read_all(probe, x, lengths)
        for row, other in zip(rows, plain, strict=True):
            assert distance(row.detach(), other.detach()) <= 1e-12, lengths
        for mine, other in zip(gradients(probe, x, rows), plain_gradients, strict=True):
            assert distance(mine, other) <= 1e-12, lengths


@EVERY_CUT
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_tail_cut_to_any_length_gives_the_same_reads_without_gradients(
    name: str, options: dict[str, Any], depth: int, context: Callable[[], Any]
) -> None:
    probe = small(name, options, depth)
    with context():
        plain = read_plainly(probe, probe.x)
        for lengths in every_cut(probe):
            for row, other in zip(read_all(probe, probe.x, lengths), plain, strict=True):
                assert distance(row.detach(), other.detach()) <= 1e-12, lengths


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("name", "options"), [("attnres", {}), ("block_attnres", {"block_sublayers": 4})])
def test_every_backend_takes_a_tail_that_was_cut(name: str, options: dict[str, Any], backend: Any) -> None:
    probe = small(name, options, 10)
    x = probe.x.clone().requires_grad_()
    plain = read_plainly(probe, x)
    plain_gradients = gradients(probe, x, plain)
    with ops.using(backend):
        for lengths in every_cut(probe):
            rows = read_all(probe, x, lengths)
            for row, other in zip(rows, plain, strict=True):
                assert distance(row.detach(), other.detach()) <= 1e-12, lengths
            for mine, other in zip(gradients(probe, x, rows), plain_gradients, strict=True):
                assert distance(mine, other) <= 1e-12, lengths


@EVERY_GROUPING
@torch.no_grad()
def test_what_was_cut_is_made_again_once_for_the_sites_that_are_left(
    name: str, options: dict[str, Any], groups: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole pairs serve their readers, the first site without one makes the rest; half a pair may spoil the tail."""
    probe = small(name, options, groups[-1][-1])
    passes = [(probe.stack.spec(group[0]).essential, len(group)) for group in shared(groups)]
    for number, group in enumerate(shared(groups)):
        for place, site in enumerate(group[1:], 1):
            for length in range(2 * (len(group) - place) + 1):
                allowed = []
                for served in {length // 2, 0 if length % 2 else length // 2}:
                    left = len(group) - place - served
                    again = [(passes[number][0], left)] if left > 1 else []
                    allowed.append([*passes[: number + 1], *again, *passes[number + 1 :]])
                with counted(monkeypatch) as calls:
                    read_all(probe, probe.x, {site: length})
                assert calls in allowed, (site, length)


@pytest.mark.parametrize(("name", "options"), [("attnres", {}), ("block_attnres", {"block_sublayers": 4})])
def test_a_tail_that_is_whole_gives_the_same_bits(name: str, options: dict[str, Any]) -> None:
    probe = small(name, options, 13)
    whole = read_all(probe, probe.x, {})
    again = read_all(probe, probe.x, {i: len(probe.stack.spec(i).shapes) for i in range(14)})
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
