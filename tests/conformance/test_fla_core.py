"""fla-core: `naive_attnres`, the reference beside the kernels of flash-linear-attention.

The schedule of blocks is in the package's models, which need Triton; it is written out in `attnres_reads`. So does the
kernel `fused_attnres`, which serves single reads on a GPU: here its signature is read, and the stand-in that takes its
place in tests of depthmix is compared with `naive_attnres`, fla-core's own reference for it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from tests import fla_stand_in
from tests.conformance.networks import (
    attention,
    attnres_reads,
    difference,
    float_as_double,
    network,
    random_stack,
    reads,
)

PEER = "fla-core"
SIZES = [((), 2, 2), ((1, 1), 4, 1), ((2, 3), 16, 7), ((5,), 33, 12), ((1, 2, 3), 8, 20)]  # leading shape, D, L
OPTIONS = [{}, {"eps": 1e-5}, {"eps": 1e-2, "scale": 0.5}, {"scale": -2.0}]


def file_of(name: str) -> Path:
    return Path(str(importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/attnres/{name}")))


def load_naive() -> Any:
    """One file, by its place: `fla.ops` imports every kernel and with them Triton, which a CPU does not have."""
    spec = importlib.util.spec_from_file_location("_fla_naive_attnres", file_of("naive.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_attnres


naive_attnres = load_naive()


def naive64(query: Tensor, key_weight: Tensor, sources: list[Tensor], eps: float = 1e-6, scale: float = 1.0) -> Any:
    with float_as_double():
        return naive_attnres(query, sources, key_weight, rms_eps=eps, scale=scale, return_weights=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("leading", "dim", "count"), SIZES)
def test_attend_is_naive_attnres(leading: Any, dim: int, count: int, options: Any, agree: Any) -> None:
    query, key_weight, sources = attention(leading, dim, count)
    ours, _ = dm.ops.attend(sources, query, key_weight, **options)
    theirs, _ = naive64(query, key_weight, sources, **options)
    if count > 1:
        leaves = [query, key_weight, *sources]
    else:
        leaves = sources  # one source has weight 1: the query's gradient is 0 but for rounding
    agree("ops.attend", [ours], [theirs], leaves)


@pytest.mark.parametrize(("leading", "dim", "count"), SIZES)
def test_the_log_sum_exp_of_attend_gives_the_weights_of_naive_attnres(
    leading: Any, dim: int, count: int, agree: Any
) -> None:
    query, key_weight, sources = attention(leading, dim, count)
    _, lse = dm.ops.attend(sources, query, key_weight)
    logits = [dm.ops.attend([v], query, key_weight)[1] for v in sources]  # over one source it is the logit
    _, weights = naive64(query, key_weight, sources)
    agree("log-sum-exp of ops.attend", [torch.stack([(s - lse).exp() for s in logits])], [weights])


def test_many_queries_at_once_are_as_many_calls_of_naive_attnres(agree: Any) -> None:
    _, _, sources = attention((2, 3), 16, 6)
    queries, key_weights = torch.randn(5, 16, dtype=torch.float64), torch.rand(5, 16, dtype=torch.float64)
    queries, key_weights = queries.requires_grad_(), key_weights.requires_grad_()
    ours, _ = dm.ops.attend(sources, queries, key_weights)
    theirs = [naive64(w, g, sources)[0] for w, g in zip(queries, key_weights, strict=True)]
    agree("ops.attend, 5 queries", list(ours), theirs, [queries, key_weights, *sources])


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_merged_halves_are_naive_attnres_over_the_whole(cut: int, agree: Any) -> None:
    query, key_weight, sources = attention((2, 3), 16, 6)
    halves = [dm.ops.attend(part, query, key_weight) for part in (sources[:cut], sources[cut:])]
    ours, _ = dm.ops.merge(*halves[0], *halves[1])
    agree("ops.merge", [ours], [naive64(query, key_weight, sources)[0]], [query, key_weight, *sources])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("leading", "dim", "depth"), SIZES)
def test_every_read_of_attnres_is_naive_attnres(leading: Any, dim: int, depth: int, options: Any, agree: Any) -> None:
    net, stack = network(leading, dim, depth), random_stack("attnres", dim=dim, depth=depth, **options)
    theirs = attnres_reads(stack, net, lambda w, g, sources: naive64(w, g, sources, **options)[0])
    agree("attnres, all reads", reads(stack, net), theirs, [*stack.parameters(), *net.leaves])


@pytest.mark.parametrize("block", [1, 2, 3, 5, 12])
@pytest.mark.parametrize(("leading", "dim", "depth"), [((2, 3), 16, 12), ((5,), 33, 13)])
def test_every_read_of_block_attnres_is_naive_attnres(
    leading: Any, dim: int, depth: int, block: int, agree: Any
) -> None:
    net = network(leading, dim, depth)
    stack = random_stack("block_attnres", dim=dim, depth=depth, block_sublayers=block)
    theirs = attnres_reads(stack, net, lambda w, g, sources: naive64(w, g, sources)[0], block)
    agree("block_attnres, all reads", reads(stack, net), theirs, [*stack.parameters(), *net.leaves])


@pytest.mark.parametrize("block", [1, 3])
def test_traced_mixing_matrix_holds_the_weights_of_naive_attnres(block: int, agree: Any) -> None:
    depth, net = 8, network((2, 3), 16, 8)
    stack = random_stack("block_attnres", dim=16, depth=depth, block_sublayers=block)
    found = [torch.ones(1, 2, 3, dtype=torch.float64)]  # row 0 reads the embedding

    def read(query: Tensor, key_weight: Tensor, sources: list[Tensor]) -> Tensor:
        h, weights = naive64(query, key_weight, sources)
        found.append(weights)
        return h

    attnres_reads(stack, net, read, block)
    theirs = torch.zeros(2, 3, depth + 1, depth + 1, dtype=torch.float64)
    for row, weights in enumerate(found):
        for i in range(row + 1):
            theirs[..., row, i] = weights[-(-i // block)]  # v_0 is source 0, then one source a block
    agree("M of a trace", [dm.trace(stack, net.x, net.sublayers).M], [theirs])


def test_fused_prenorm_of_naive_attnres_is_the_norm_that_depthmix_leaves_to_the_reader(agree: Any) -> None:
    query, key_weight, sources = attention((2, 3), 16, 6)
    weight = torch.rand(16, dtype=torch.float64, requires_grad=True)
    with float_as_double():
        theirs = naive_attnres(query, sources, key_weight, output_rms_weight=weight)
    ours = dm.ops.rms_norm(dm.ops.attend(sources, query, key_weight)[0], 1e-6) * weight
    agree("reader's norm", [ours], [theirs], [query, key_weight, weight, *sources])


def test_as_shipped_in_float32(agree: Any) -> None:
    net, stack = (
        network((2, 3), 16, 12, torch.float32),
        random_stack("attnres", dim=16, depth=12, dtype=torch.float32),
    )
    theirs = attnres_reads(stack, net, lambda w, g, sources: naive_attnres(w, sources, g))
    agree("attnres in float32, as shipped", reads(stack, net), theirs, [*stack.parameters(), *net.leaves], 5e-6)


def test_as_shipped_in_bfloat16_both_compute_in_float32_and_round_once() -> None:
    query, key_weight, sources = attention((64, 8), 64, 9)
    sources = [v.detach().bfloat16() for v in sources]
    query, key_weight = query.detach().float(), key_weight.detach().float()
    ours, theirs = dm.ops.attend(sources, query, key_weight)[0], naive_attnres(query, sources, key_weight)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    exact, _ = dm.ops.attend([v.double() for v in sources], query.double(), key_weight.double())
    # Sums in another order may fall on the other side of a tie; more than a few in 10,000 would be a second rounding.
    assert (ours != exact.bfloat16()).double().mean() < 5e-4
    assert (theirs != exact.bfloat16()).double().mean() < 5e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_stand_in_of_the_fused_kernel_is_naive_attnres(options: Any, dtype: torch.dtype, agree: Any) -> None:
    query, key_weight, sources = attention((2, 3), 16, 6)
    leaves = [t.detach().to(dtype).requires_grad_() for t in (query, key_weight, *sources)]
    named = {"eps": "rms_eps", "scale": "scale"}
    given = {named[key]: value for key, value in options.items()}
    found = [
        function(leaves[0], leaves[2:], leaves[1], return_weights=True, **given)
        for function in (fla_stand_in.fused_attnres, naive_attnres)
    ]
    assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]]
    tolerance = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    what = f"stand-in of the kernel in {str(dtype)[6:]}, as shipped"
    agree(what, [found[0][0]], [found[1][0]], leaves, tolerance)
    agree(f"{what}: weights", [found[0][1]], [found[1][1]], tolerance=5e-6)


def test_the_stand_in_has_the_signature_of_the_fused_kernel() -> None:
    def signature(source: str) -> tuple[list[str], list[str]]:
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        (arguments,) = (node.args for node in functions if node.name == "fused_attnres")
        assert not arguments.posonlyargs
        return [a.arg for a in arguments.args], [ast.unparse(d) for d in arguments.defaults]

    theirs, ours = signature(file_of("fused.py").read_text()), signature(inspect.getsource(fla_stand_in))
    assert ours == theirs


def test_defaults_are_the_same() -> None:
    ours, theirs = inspect.signature(dm.ops.attend).parameters, inspect.signature(naive_attnres).parameters
    assert theirs["rms_eps"].default == ours["eps"].default == dm.DepthStack("attnres", dim=2, depth=2).config.eps
    assert theirs["scale"].default == ours["scale"].default == 1


def test_difference_naive_attnres_rounds_float64_to_float32_and_depthmix_does_not(note: Any) -> None:
    query, key_weight, sources = attention((2, 3), 16, 6)
    theirs, weights = naive_attnres(query, sources, key_weight, return_weights=True)
    assert theirs.dtype == torch.float64
    assert weights.dtype == torch.float32
    lost = difference([dm.ops.attend(sources, query, key_weight)[0]], [theirs])
    note("differs", "float64 input is computed in float32", lost)
    assert 1e-9 < lost < 1e-6


def test_difference_naive_attnres_needs_a_key_weight_and_contiguous_sources_and_depthmix_does_not() -> None:
    query, _, sources = attention((2, 3), 16, 6)
    with pytest.raises(AttributeError):
        naive_attnres(query, sources, None)
    turned = [v.transpose(0, 1) for v in sources]
    with pytest.raises(RuntimeError, match="view"):
        naive_attnres(query, turned, torch.ones_like(query))
    ours, _ = dm.ops.attend(turned, query)
    torch.testing.assert_close(ours.transpose(0, 1), dm.ops.attend(sources, query)[0], rtol=0, atol=1e-12)
