"""Which reads share a pass over finished sources, and that the facts say what really runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import depthmix as dm
from depthmix import ops
from depthmix.analysis.invariants import make_probe
from depthmix.cli import main
from depthmix.mechanisms.attnres import two_phase_traffic
from depthmix.ops.attend import native, torch_form
from tests.mechanisms.test_two_phase import BACKENDS, compare, counted

FAMILY = ("attnres", "block_attnres", "delta_attnres")

# Count scaling


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"scale_by_count": True}, {"scale_by_count": True, "key_norm": False}], ids=str)
@pytest.mark.parametrize("name", ["attnres", "block_attnres"])
def test_count_scaling_in_two_phases_equals_the_direct_read(name: str, options: dict[str, Any], backend: Any) -> None:
    for depth in (1, 2, 5, 12):
        compare(make_probe(name, options, depth=depth), backend, 1e-12)  # gradients to 1e-11


@pytest.mark.parametrize("name", ["attnres", "block_attnres"])
def test_count_scaling_takes_the_same_two_phases(name: str) -> None:
    with counted(native, torch_form) as plain:
        make_probe(name, {}, depth=12).run()
    with counted(native, torch_form) as scaled:
        make_probe(name, {"scale_by_count": True}, depth=12).run()
    assert scaled == plain
    assert any(queries > 1 for _, _, queries in scaled)


# What the facts say


@pytest.mark.parametrize("name", FAMILY)
def test_facts_say_two_phases_exactly_where_reads_share_a_pass(name: str) -> None:
    variants = dm.mechanisms.registry.mechanism(name).variants
    for depth in (1, 2, 3, 5, 8):
        for options in (options for options in variants if max(1, *blocks_in(options)) <= depth):
            probe = make_probe(name, options, depth=depth)
            with counted(native, torch_form) as calls:
                probe.run()
            shared = any(queries > 1 for _, _, queries in calls)
            assert probe.stack.facts.two_phase is shared, (name, dict(options), depth)


def blocks_in(options: Any) -> list[int]:
    return [options.get(name, 1) for name in ("block_sublayers", "num_blocks", "group_sublayers")]


def traffic(name: str, depth: int, **options: Any) -> tuple[float, float]:
    with torch.device("meta"):
        facts = dm.DepthStack(name, dim=8, depth=depth, **options).facts
    return facts.reads / 8, facts.writes / 8


def in_groups(depth: int, group: int) -> tuple[float, float]:
    """Widths per sublayer of full AttnRes in two phases, site by site; the embedding is not counted."""
    reads = writes = 0
    for site in range(depth):
        first = site - site % group
        if site == first:
            for _ in range(first):  # phase 1 passes over every output below the group
                reads += 1  # its key
                reads += 1  # its value
        for _ in range(first, site):  # phase 2: the group's own outputs
            reads += 2
        writes += 2  # what phase 1 found for this site, and h
    return reads / depth, writes / depth


def test_the_papers_groups_of_16_at_128_sublayers_move_24_widths_and_show_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sum(in_groups(128, 16)) == 24
    assert two_phase_traffic(128, 16) == in_groups(128, 16)
    assert traffic("attnres", 128, group_sublayers=16) == in_groups(128, 16)
    assert main(["show", "attnres", "--depth", "128"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "the paper's 24·D at L = 128 is for `group_sublayers=16`" in page
    assert "groups of 11 sublayers" in page


@pytest.mark.parametrize("depth", [3, 4, 8, 24, 27, 54, 128])
def test_the_traffic_of_attnres_is_that_of_the_groups_it_reads_in(depth: int) -> None:
    group = round(depth**0.5)
    assert traffic("attnres", depth) == pytest.approx(in_groups(depth, group), rel=1e-12)
    with torch.device("meta"):
        assert f"groups of {group} sublayers" in dm.DepthStack("attnres", dim=8, depth=depth).facts.note


def test_a_group_size_that_nothing_is_read_in_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attnres: group_sublayers=0; expected at least 1"):
        dm.DepthStack("attnres", dim=8, depth=8, group_sublayers=0)
    with pytest.raises(ValueError, match=r"group_sublayers=2; expected mixing='softmax'.* no window"):
        dm.DepthStack("attnres", dim=8, depth=8, group_sublayers=2, window=3)


def test_a_group_larger_than_the_network_is_one_group() -> None:
    whole, larger = (dm.DepthStack("attnres", dim=8, depth=8, group_sublayers=size) for size in (8, 9))
    assert larger.facts == whole.facts
    assert [larger.spec(i) for i in range(9)] == [whole.spec(i) for i in range(9)]


def test_the_size_of_a_group_is_no_part_of_the_function() -> None:
    """Weights load into any grouping, from files that know no such option too, and compute the same to rounding."""
    plain, grouped = (make_probe("attnres", options, depth=12) for options in ({}, {"group_sublayers": 5}))
    assert "group_sublayers" not in plain.stack.record()
    grouped.stack.load_state_dict(plain.stack.state_dict())
    assert (grouped.stack(plain.x, plain.sublayers) - plain.run()).abs().max() <= 1e-12


@pytest.mark.parametrize("depth", [1, 2, 7, 24])
@pytest.mark.parametrize(
    ("name", "options", "passes"),
    [
        ("attnres", {"heads": 2}, 2),
        ("attnres", {"mixing": "sigmoid"}, 2),
        ("attnres", {"mixing": "static"}, 1),
        ("attnres", {"window": 3}, 2),
        ("attnres", {"query": "input", "scale_by_count": True}, 2),
        ("block_attnres", {"block_sublayers": 1}, 2),
        ("delta_attnres", {"heads": 2}, 2),
    ],
)
def test_the_traffic_of_direct_reads_is_that_of_all_their_sources(
    name: str, options: dict[str, Any], passes: int, depth: int
) -> None:
    reads = 0
    for site in range(depth):
        outputs = list(range(site))
        for _ in outputs[-options.get("window", depth) :]:
            reads += passes  # as a key and as a value, or as a value alone
    assert traffic(name, depth, **options) == pytest.approx((reads / depth, 1), rel=1e-12)


@pytest.mark.parametrize(("depth", "size"), [(24, 3), (54, 6), (26, 4), (128, 16)])
def test_the_traffic_of_blocks_in_two_phases_is_that_of_table_1(depth: int, size: int) -> None:
    """Its N/S lies halfway between the count without the embedding and with it, as key and as value."""
    reads, writes = traffic("block_attnres", depth, block_sublayers=size)
    without = sum(2 * n for n in range(len(range(0, depth, size))))
    with_embedding = sum(2 * (n + 1) for n in range(len(range(0, depth, size))))
    assert reads == pytest.approx((without + with_embedding) / 2 / depth + 3, rel=1e-12)
    assert writes == 2


def test_direct_reads_of_blocks_and_running_sums_are_counted_site_by_site() -> None:
    depth, size, reads, writes = 10, 4, 0, 0
    for site in range(depth):
        reads += 2 * (site // size + (site % size > 0))  # finished sums and the partial, as keys and as values
        writes += 1
        if site % size:  # p = p + v
            reads, writes = reads + 2, writes + 1
    found = traffic("block_attnres", depth, block_sublayers=size, mixing="sigmoid")
    assert found == pytest.approx((reads / depth, writes / depth), rel=1e-12)
    reads, writes = 0, 0
    for site in range(depth):
        reads, writes = reads + 2 * site, writes + 1
        if site:  # the sum below, the newest output and the mixture make the next sum and h
            reads, writes = reads + 3, writes + 1
    assert traffic("delta_attnres", depth) == pytest.approx((reads / depth, writes / depth), rel=1e-12)


# Whether sharing pays


class Moved(TorchDispatchMode):
    """Counts bytes that operations read and write, views aside; what is broadcast counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if not op.is_view and "empty" not in str(op) and "detach" not in str(op):
            self.bytes += sum(self.size(t) for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
        return out

    @staticmethod
    def size(t: Tensor) -> int:
        strides = zip(t.shape, t.stride(), strict=True)
        return int(torch.Size(n for n, stride in strides if stride).numel() * t.element_size())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sources", "readers"), [(9, 6), (2, 2), (2, 8), (9, 2)])
def test_in_torch_operations_two_phases_move_less_than_single_reads(
    sources: int, readers: int, dtype: torch.dtype
) -> None:
    """Why sharing pays on a GPU without fla-core too; single reads move 1.2 to 2 times as much."""

    def leaf() -> Tensor:
        return torch.randn(32, 256).to(dtype).requires_grad_()

    finished, partials = [leaf() for _ in range(sources)], [leaf() for _ in range(readers - 1)]
    queries = torch.randn(readers, 256, requires_grad=True)

    def single() -> list[Tensor]:
        recent = [[], *([p] for p in partials)]
        return [ops.read_one([*finished, *recent[q]], queries[q : q + 1]) for q in range(readers)]

    def two_phases() -> list[Tensor]:
        mixed, lse = ops.read_many(finished, queries)
        joined = [ops.read_many([p], queries[q : q + 1], (mixed[q], lse[q])) for q, p in enumerate(partials, 1)]
        return [mixed[0], *(h for (h,), _ in joined)]

    moved = {}
    for read in (single, two_phases):
        with ops.using("torch"), Moved() as forward:
            rows = read()
        with Moved() as backward:
            torch.autograd.grad(rows, [queries, *finished, *partials], [torch.ones_like(row) for row in rows])
        moved[read] = forward.bytes, backward.bytes
    for less, more in zip(moved[two_phases], moved[single], strict=True):
        assert 1.1 * less < more
    assert ops.sharing_pays(finished, queries[:1])
