"""fast-attnres 1.0.0 (it imports as `attnres`): the readable reference and the CPU path of its public function."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from attnres import LearnedQuery, attnres, reference_attnres
from torch import Tensor

import depthmix as dm
from tests.conformance.networks import attention, attnres_reads, difference, network, random_stack, reads

PEER = "fast-attnres"
SIZES = [((), 2, 2), ((1, 1), 4, 1), ((2, 3), 16, 7), ((5,), 33, 12), ((1, 2, 3), 8, 20)]  # leading shape, D, L
OPTIONS = [{}, {"eps": 2**-23}, {"eps": 1e-2, "scale": 0.5}, {"scale": -2.0}]


def reference64(query: Tensor, key_weight: Tensor, sources: list[Tensor], **options: float) -> Tensor:
    """It has no key weight: γ goes into the query."""
    options = {"eps": 1e-6, **options}
    return reference_attnres(torch.stack(sources), query * key_weight, compute_dtype=torch.float64, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("leading", "dim", "count"), SIZES)
def test_attend_is_the_reference(leading: Any, dim: int, count: int, options: Any, agree: Any) -> None:
    query, key_weight, sources = attention(leading, dim, count)
    ours, _ = dm.ops.attend(sources, query, key_weight, **options)
    theirs = reference64(query, key_weight, sources, **options)
    if count > 1:
        leaves = [query, key_weight, *sources]
    else:
        leaves = sources  # one source has weight 1: the query's gradient is 0 but for rounding
    agree("ops.attend", [ours], [theirs], leaves)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("leading", "dim", "depth"), SIZES)
def test_every_read_of_attnres_is_the_reference(leading: Any, dim: int, depth: int, options: Any, agree: Any) -> None:
    net, stack = network(leading, dim, depth), random_stack("attnres", dim=dim, depth=depth, **options)
    theirs = attnres_reads(stack, net, lambda w, g, sources: reference64(w, g, sources, **options))
    agree("attnres, all reads", reads(stack, net), theirs, [*stack.parameters(), *net.leaves])


@pytest.mark.parametrize("block", [1, 2, 3, 5, 12])
@pytest.mark.parametrize(("leading", "dim", "depth"), [((2, 3), 16, 12), ((5,), 33, 13)])
def test_every_read_of_block_attnres_is_the_reference(
    leading: Any, dim: int, depth: int, block: int, agree: Any
) -> None:
    net = network(leading, dim, depth)
    stack = random_stack("block_attnres", dim=dim, depth=depth, block_sublayers=block)
    theirs = attnres_reads(stack, net, reference64, block)
    agree("block_attnres, all reads", reads(stack, net), theirs, [*stack.parameters(), *net.leaves])


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "list"])
def test_public_function_as_shipped_in_float32(packed: bool, agree: Any) -> None:
    net, stack = (
        network((2, 3), 16, 12, torch.float32),
        random_stack("attnres", dim=16, depth=12, dtype=torch.float32),
    )

    def read(query: Tensor, key_weight: Tensor, sources: list[Tensor]) -> Tensor:
        return attnres(torch.stack(sources) if packed else sources, query * key_weight, eps=1e-6)

    theirs = attnres_reads(stack, net, read)
    agree("attnres in float32, as shipped", reads(stack, net), theirs, [*stack.parameters(), *net.leaves], 5e-6)


@pytest.mark.parametrize(("size", "expected"), [(1.0, 5.8e-7), (1e-2, 5.8e-3), (1e-3, 0.37)])
def test_difference_the_default_eps_is_two_to_the_minus_23_and_depthmix_has_1e_6(
    size: float, expected: float, pin: Any
) -> None:
    assert inspect.signature(reference_attnres).parameters["eps"].default == 2**-23
    query, key_weight, sources = attention((2, 5), 16, 6)
    sources = [size * v for v in sources]
    theirs = reference_attnres(torch.stack(sources), query * key_weight, compute_dtype=torch.float64)
    ours, _ = dm.ops.attend(sources, query, key_weight)
    same, _ = dm.ops.attend(sources, query, key_weight, eps=2**-23)
    assert difference([same], [theirs]) < 1e-12  # nothing but eps is behind it
    pin(f"default eps, sources times {size:g}", difference([ours], [theirs]), expected)


def test_difference_there_is_no_key_weight_and_leaving_it_out_of_the_query_changes_the_read(pin: Any) -> None:
    assert "key_weight" not in inspect.signature(attnres).parameters
    query, key_weight, sources = attention((2, 5), 16, 6)
    theirs = reference_attnres(torch.stack(sources), query, eps=1e-6, compute_dtype=torch.float64)
    assert difference([dm.ops.attend(sources, query)[0]], [theirs]) < 1e-12
    pin("γ left out of the query", difference([dm.ops.attend(sources, query, key_weight)[0]], [theirs]), 0.69)


def test_difference_a_query_shorter_than_the_sources_reads_their_last_channels_and_depthmix_refuses_it() -> None:
    query, _, sources = attention((2, 5), 16, 6)
    short = query[-4:]
    theirs = reference_attnres(torch.stack(sources), short, eps=1e-6, compute_dtype=torch.float64)
    tails = [v[..., -4:] for v in sources]
    logits = torch.stack([dm.ops.attend([v], short)[1] for v in tails])  # over one source it is the logit
    torch.testing.assert_close(
        theirs, (logits.softmax(0).unsqueeze(-1) * torch.stack(sources)).sum(0), rtol=0, atol=1e-12
    )
    with pytest.raises(ValueError, match="query has shape"):
        dm.ops.attend(sources, short)


def test_difference_learned_queries_start_at_random_and_those_of_the_paper_and_of_depthmix_at_zero(pin: Any) -> None:
    torch.manual_seed(0)
    pin("start of the query: standard deviation", LearnedQuery(8192).query.std().item(), 0.02)
    stack = dm.DepthStack("attnres", dim=8, depth=4)
    assert all(not mixer.query.any() for mixer in stack.all_mixers()[1:])


def test_difference_the_public_function_refuses_float64_and_depthmix_takes_it() -> None:
    query, key_weight, sources = attention((2, 5), 16, 6)
    with pytest.raises(TypeError, match="FP32"):
        attnres(torch.stack(sources), query)
    assert dm.ops.attend(sources, query, key_weight)[0].dtype == torch.float64
