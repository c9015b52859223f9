"""`ops.attend` and `ops.merge` against plain loops, and the small operations against their definitions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import depthmix as dm
from depthmix.ops.attend import reference
from depthmix.ops.backend import Backend
from tests.reference import attend as plain
from tests.reference.sinkhorn import sinkhorn as plain_sinkhorn

SHAPES = st.sampled_from([(), (1,), (5,), (2, 3), (0,), (2, 0, 3)])


def sample(
    lead: tuple[int, ...], sources: int, dim: int, queries: int | None, seed: int
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(*lead, dim, generator=generator, dtype=torch.float64) for _ in range(sources)]
    shape = (dim,) if queries is None else (queries, dim)
    query, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return values, query, weight


def as_tuple(h: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return h if isinstance(h, tuple) else (h,)


@settings(max_examples=80, deadline=None)
@given(
    lead=SHAPES,
    sources=st.integers(1, 6),
    dim=st.sampled_from([1, 2, 7, 15, 16]),
    queries=st.sampled_from([None, 1, 3]),
    shared_weight=st.sampled_from(["none", "shared", "own"]),
    normalize=st.booleans(),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    seed=st.integers(0, 10**6),
)
def test_attend_is_softmax_attention_over_the_sources(
    lead: tuple[int, ...],
    sources: int,
    dim: int,
    queries: int | None,
    shared_weight: str,
    normalize: bool,
    scale: float,
    seed: int,
) -> None:
    values, query, weight = sample(lead, sources, dim, queries, seed)
    weight = {"none": None, "shared": weight.reshape(-1, dim)[0], "own": weight}[shared_weight]
    ours = dm.ops.attend(values, query, weight, normalize=normalize, scale=scale)
    theirs = plain.attend(values, query, weight, normalize=normalize, scale=scale)
    assert isinstance(ours[0], tuple) is (queries is not None)
    for a, b in zip((*as_tuple(ours[0]), ours[1]), (*as_tuple(theirs[0]), theirs[1]), strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(lead=SHAPES, first=st.integers(1, 4), second=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_merging_two_sets_is_attending_over_their_union(
    lead: tuple[int, ...], first: int, second: int, seed: int
) -> None:
    values, query, weight = sample(lead, first + second, 8, None, seed)
    parts = [dm.ops.attend(part, query, weight) for part in (values[:first], values[first:])]
    merged = dm.ops.merge(*parts[0], *parts[1])
    for a, b, c in zip(merged, dm.ops.attend(values, query, weight), plain.merge(*parts[0], *parts[1]), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
        assert torch.allclose(a, c, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("queries", [None, 2])
def test_both_results_of_attend_are_differentiable(queries: int | None) -> None:
    values, query, weight = sample((2,), 3, 4, queries, 0)
    inputs = [t.requires_grad_() for t in (query, weight, *values)]

    def run(query: torch.Tensor, weight: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, lse = dm.ops.attend(values, query, weight)
        return (*as_tuple(h), lse)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_merge_is_differentiable_in_all_four() -> None:
    h1, h2 = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    lse1, lse2 = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(dm.ops.merge, (h1, lse1, h2, lse2))


@pytest.mark.parametrize("merge", [dm.ops.merge, reference.merge], ids=["ops", "reference"])
def test_merging_gives_each_side_the_weight_of_its_own_log_sum_exp(merge: Any) -> None:
    """Three parts to one: h and the gradients of all four, by hand."""
    h1, h2 = torch.tensor([[8.0, 0.0]], dtype=torch.float64), torch.tensor([[0.0, 4.0]], dtype=torch.float64)
    lse1, lse2 = torch.tensor([3.0], dtype=torch.float64).log(), torch.zeros(1, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (h1, lse1, h2, lse2)]
    h, lse = merge(*leaves)
    assert torch.allclose(h, torch.tensor([[6.0, 1.0]], dtype=torch.float64))
    assert torch.allclose(lse.exp(), torch.tensor([4.0], dtype=torch.float64))
    ones = torch.ones_like
    for out, expected in (
        (h, ([0.75, 0.75], [0.75], [0.25, 0.25], [-0.75])),  # of Σh: ±w1 w2 (8 − 4) for the log-sum-exps
        (lse, ([0.0, 0.0], [0.75], [0.0, 0.0], [0.25])),
    ):
        found = torch.autograd.grad(out, leaves, ones(out), retain_graph=True, materialize_grads=True)
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a.flatten(), torch.tensor(b, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    values, query, weight = sample((64,), 5, 32, None, 0)
    low = [v.to(dtype) for v in values]
    h, lse = dm.ops.attend(low, query.to(dtype), weight.to(dtype))
    exact, exact_lse = dm.ops.attend([v.double() for v in low], query.to(dtype).double(), weight.to(dtype).double())
    assert h.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.allclose(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
    spacing = torch.finfo(dtype).eps * 2 ** exact.abs().clamp(min=2**-14).log2().floor()
    assert ((h.double() - exact).abs() / spacing).max() <= 0.52  # half a unit in the last place


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e30])
def test_sources_of_any_size_have_finite_weights(size: float) -> None:
    values, query, weight = sample((4,), 3, 16, None, 0)
    low = [(v * size).float() for v in values]
    h, lse = dm.ops.attend(low, query.float(), weight.float(), eps=1e-12)
    wide = [v.double() for v in low]
    exact, exact_lse = dm.ops.attend(wide, query.float().double(), weight.float().double(), eps=1e-12)
    assert torch.isfinite(h).all()
    assert torch.allclose(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
    assert torch.allclose(h.double() / size, exact / size, rtol=1e-4, atol=1e-4)


def test_zeros_and_huge_logits_stay_finite() -> None:
    zero, one = torch.zeros(3, 8), torch.ones(3, 8)
    h, lse = dm.ops.attend([zero, one], torch.full((8,), 1e4))
    assert torch.equal(h, one)
    assert torch.isfinite(lse).all()


@settings(max_examples=30, deadline=None)
@given(m=st.integers(1, 5), iterations=st.integers(1, 20), eps=st.sampled_from([0.0, 1e-6]), seed=st.integers(0, 999))
def test_sinkhorn_is_rows_then_columns_in_turn(m: int, iterations: int, eps: float, seed: int) -> None:
    logits = torch.randn(2, 3, m, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ours = dm.ops.sinkhorn(logits, iterations, eps)
    assert (ours - plain_sinkhorn(logits, iterations, eps)).abs().max() <= 1e-13
    if not eps:
        assert (ours.sum(-2) - 1).abs().max() <= 1e-13


def test_sinkhorn_survives_columns_that_underflow() -> None:
    logits = torch.tensor([[0.0, -110.0], [0.0, -110.0]], requires_grad=True)
    out = dm.ops.sinkhorn(logits, 20)
    out[0, 1].backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(logits.grad).all()
    assert torch.allclose(out, torch.full((2, 2), 0.5))


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_sinkhorn_keeps_its_input_alone_and_has_two_derivatives(eps: float) -> None:
    logits = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        dm.ops.sinkhorn(logits, 20, eps)
    assert len(kept) == 1
    assert torch.autograd.gradcheck(lambda x: dm.ops.sinkhorn(x, 5, eps), logits)
    assert torch.autograd.gradgradcheck(lambda x: dm.ops.sinkhorn(x, 5, eps), logits)


def test_the_feature_map_is_positive_wherever_it_can_be() -> None:
    x = torch.tensor([-80.0, -20.0, -10.0, 0.0, 3.0])
    assert (dm.ops.elu1(x) > 0).all()
    assert torch.allclose(
        dm.ops.elu1(x), torch.tensor([-80.0, -20.0, -10.0, 0.0, 3.0]).exp().clamp(max=1) + x.clamp(min=0)
    )


def test_merging_keeps_the_weight_of_a_side_that_hardly_counts() -> None:
    h1, h2 = torch.zeros(1, 2), torch.ones(1, 2)
    h, _ = dm.ops.merge(h1, torch.tensor([20.0]), h2, torch.tensor([0.0]))
    assert torch.allclose(h, torch.full((1, 2), 2.0611536e-09), rtol=1e-5)


def test_the_delta_rule_overwrites_what_a_unit_key_holds() -> None:
    rows = torch.randn(2, 3, 5, dtype=torch.float64)
    key = torch.nn.functional.normalize(torch.randn(2, 5, dtype=torch.float64), dim=-1)
    target, beta = torch.randn(2, 3, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    after = dm.ops.delta_rule(rows, key, key, beta, target)
    assert torch.allclose((after * key[:, None]).sum(-1), target)
    assert torch.allclose(dm.ops.delta_rule(rows, key, key, 0 * beta, target), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_keeps_its_inputs_and_numbers_per_token(dtype: torch.dtype) -> None:
    h1, h2 = (torch.randn(64, 256, dtype=dtype, requires_grad=True) for _ in range(2))
    lse1, lse2 = (torch.randn(64, requires_grad=True) for _ in range(2))
    held = {t.untyped_storage().data_ptr() for t in (h1, h2)}
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dm.ops.merge(h1, lse1, h2, lse2)
    assert sum(kept) <= 64 * 4 * 8


def test_freed_memory_stays_with_a_process_that_wants_it() -> None:
    """Fresh pages are counted by the system: eight rounds would ask for 131,072."""
    code = """
import resource, torch
from depthmix import ops
kept = ops.keep_freed_memory()
def round():
    parts = [torch.ones(1 << 22) for _ in range(4)]
    del parts
round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    round()
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept, faults = map(int, done.stdout.split())
    if not kept:
        pytest.skip("this C library has no such setting")
    assert faults < 131_072 / 3


def test_the_page_of_operations_names_every_function_and_only_files_that_exist() -> None:
    root = Path(__file__).parents[2]
    page = re.sub(r"```.*?```", "", (root / "docs" / "ops.md").read_text(), flags=re.S)
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", page))))
    assert set(dm.ops.__all__) <= words
    files = re.findall(r"`((?:\w+/)*\w+\.py|attend/native/)`", page)
    assert len(set(files)) > 10
    assert [name for name in files if not (root / "src/depthmix/ops" / name).exists()] == []
    backends = set(get_args(Backend)) - {"auto"}
    assert backends <= set(re.findall(r"^\| `(\w+)` \|", page, re.M))
