"""The native kernel among its surroundings: threads, priors, the edge of overflow, and the process that loads it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from depthmix import ops
from depthmix.ops.attend import native

needs_kernel = pytest.mark.skipif(native.library() is None, reason=native.why_not() or "no kernel")
BACKENDS = [pytest.param("native", marks=needs_kernel), "torch", "reference"]
THREADS = [1, 2, 3, 7]


def sample(tokens: int, dim: int, sources: int = 2, queries: int = 1, prior: bool = True) -> list[Tensor]:
    """Queries, sources, a prior's mixture and its log-sum-exp."""
    shapes = [(queries, dim), *[(tokens, dim)] * sources, *([(tokens, dim), (tokens,)] if prior else [])]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def results(backend: Any, leaves: list[Tensor], prior: bool = True) -> list[Tensor]:
    """Mixtures, log-sum-exps, and the gradients of all leaves; each output counts in a direction of its own."""
    with ops.using(backend):
        folded, *sources = leaves
        joined = (sources[-2], sources[-1]) if prior else None
        h, lse = ops.read_many(sources[:-2] if prior else sources, folded, joined)
        outputs = [*h, *lse]
        directions = [torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos() for out in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, directions)]


def assert_equal(found: list[Tensor], expected: list[Tensor], atol: float = 1e-11) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=atol)


# Threads


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel does not write is not a number."""
    monkeypatch.setattr(native, "empty_like", lambda t: torch.full_like(t, torch.nan))


@needs_kernel
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 15])
@pytest.mark.parametrize(("queries", "prior"), [(1, True), (1, False), (2, False)])
def test_any_number_of_threads_gives_the_same_results(
    queries: int, prior: bool, tokens: int, threads: int, poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "threads_for", lambda source, count: threads)
    leaves = sample(tokens, 19, queries=queries, prior=prior)
    found = results("native", leaves, prior)
    assert_equal(found, results("reference", leaves, prior))
    monkeypatch.setattr(native, "threads_for", lambda source, count: 1)
    alone = results("native", leaves, prior)
    for i, (a, b) in enumerate(zip(found, alone, strict=True)):
        if i == 2 * queries:  # the queries' gradient, which is a sum over threads
            assert torch.allclose(a, b, rtol=0, atol=1e-12)
        else:
            assert torch.equal(a, b)


@needs_kernel
def test_each_thread_sums_the_queries_gradient_over_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that added to one place would lose a sum now and then."""
    passed: list[Tensor] = []
    original = native.pointer

    def pointer(tensor: Tensor | None) -> Any:
        passed.extend([] if tensor is None else [tensor])
        return original(tensor)

    monkeypatch.setattr(native, "threads_for", lambda source, count: 3)
    monkeypatch.setattr(native, "pointer", pointer)
    leaves = sample(7, 5, prior=False)
    results("native", leaves, prior=False)
    (parts,) = [t for t in passed if t.shape == (3, 1, 5)]
    for part, tokens in zip(parts, (slice(0, 3), slice(3, 6), slice(6, 7)), strict=True):
        own = [leaf.detach().requires_grad_() for leaf in (leaves[0], *(v[tokens] for v in leaves[1:]))]
        with ops.using("reference"):
            h, lse = ops.read_many(own[1:], own[0])
        directions = [torch.arange(n, dtype=torch.float64).view(7, -1).cos()[tokens] for n in (35, 7)]
        (expected,) = torch.autograd.grad([h[0], lse[0]], own[:1], [directions[0], directions[1][:, 0]])
        assert torch.allclose(part, expected, rtol=0, atol=1e-12)


@pytest.fixture
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("threads", THREADS)
def test_a_read_takes_the_threads_of_torch_as_far_as_it_is_large_enough(
    threads: int, poisoned: None, own_threads: None
) -> None:
    leaves = sample(2003, 64)
    small, large = torch.empty(100, 64), leaves[1]
    torch.set_num_threads(threads)
    assert native.threads_for(small, 2) == 1
    assert native.threads_for(large, 2) == threads
    found = results("native", leaves)
    torch.set_num_threads(1)
    assert_equal(found, results("reference", leaves), 1e-10)


# A prior


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outputs", ["mixture", "log-sum-exp", "both"])
def test_a_read_with_a_prior_has_the_gradient_of_its_log_sum_exp(outputs: str, backend: Any) -> None:
    folded, *sources, h, lse = (leaf.detach() for leaf in sample(3, 5))
    keep = {"mixture": slice(0, 1), "log-sum-exp": slice(1, 2), "both": slice(0, 2)}[outputs]

    def read(lse: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        with ops.using(backend):
            (mixed,), (joined,) = ops.read_many(sources, folded, (h, lse))
        return (mixed, joined)[keep]

    assert torch.autograd.gradcheck(read, (lse.requires_grad_(), h.requires_grad_()))


# Gradients that come in


class Subclass(Tensor):
    pass


INCOMING = {
    "transposed": lambda g: g.T.contiguous().T,
    "of a subclass": lambda g: g.as_subclass(Subclass),
    "of a collective": lambda g: AsyncCollectiveTensor(g),
}


@needs_kernel
@pytest.mark.parametrize("kind", INCOMING)
def test_the_backend_of_the_forward_pass_serves_the_backward_pass_whatever_comes_in(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded, *sources = leaves = sample(3, 5, prior=False)
    calls, backward = [], native.backward
    monkeypatch.setattr(native, "backward", lambda *args: calls.append(args) or backward(*args))
    with ops.using("native"):
        (h,), _ = ops.read_many(sources, folded)
    gradient = torch.randn(h.shape, dtype=h.dtype)
    with ops.using("torch"):  # too late: the choice was made
        plain = torch.autograd.grad(h, leaves, gradient, retain_graph=True)
        found = torch.autograd.grad(h, leaves, INCOMING[kind](gradient))
    assert len(calls) == 2
    for a, b in zip(found, plain, strict=True):
        assert type(a) is Tensor
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_queries_of_any_dtype_are_cast_to_that_of_the_logits(dtype: torch.dtype, backend: Any) -> None:
    folded, *sources = (leaf.detach().to(dtype) for leaf in sample(3, 5, prior=False))
    with ops.using(backend):
        one, (_, (lse,)) = ops.read_one(sources, folded.bfloat16()), ops.read_many(sources, folded.bfloat16())
        assert torch.equal(one, ops.read_one(sources, folded.bfloat16().to(dtype)))
    assert one.dtype == lse.dtype == dtype


# The edge of overflow


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.2, 0.3, 0.9, 1.1, 4.0])
def test_a_row_is_normalised_on_both_sides_of_the_largest_square(share: float, dtype: torch.dtype) -> None:
    """The sum of squares is `share` of the largest number; the row's 1/rms is known."""
    dim = 32
    entry = (share**0.5) * (torch.finfo(dtype).max ** 0.5) / dim**0.5
    source, query = torch.full((1, dim), entry, dtype=dtype), torch.ones(1, dim, dtype=dtype)
    _, lse, rstd, _ = native.forward([source], query, None, None, ops.ReadOptions())
    assert abs(rstd.item() * entry - 1) <= 1e-6
    assert abs(lse.item() - dim) <= 1e-4


# The process


@needs_kernel
def test_denormal_numbers_survive_the_loading_of_the_kernel() -> None:
    """A library linked with -ffast-math has them flushed to zero in the whole process."""
    code = """
import torch
from depthmix import ops
with ops.using("native"):
    ops.attend([torch.randn(2, 8)] * 2, torch.randn(8))
print(*[torch.full((8,), 1e-40).mul(0.5).max().item(), torch.tensor(1e-310, dtype=torch.float64).mul(0.5).item()])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    single, double = map(float, done.stdout.split())
    assert abs(single - 5e-41) <= 1e-44
    assert double == 5e-311
