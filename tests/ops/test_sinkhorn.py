"""Sinkhorn's iteration, without eps and with it: exact, small in memory, finite for logits of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix import ops
from depthmix.ops import reference

every_eps = pytest.mark.parametrize("eps", [0.0, 1e-6])
TOKENS, M, ITERATIONS = 50, 4, 20


def logits(spread: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (spread * torch.randn(TOKENS, M, M, dtype=dtype)).requires_grad_()


def run(form: Callable[..., Tensor], x: Tensor, eps: float, iterations: int = ITERATIONS) -> tuple[Tensor, Tensor]:
    out = form(x, iterations, eps)
    (grad,) = torch.autograd.grad(out, x, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).sin())
    return out, grad


@every_eps
def test_sinkhorns_backward_builds_no_graph_of_its_iterations(eps: float) -> None:
    """Forward and backward pass together save the logits and nothing else."""
    x = logits()
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(ops.sinkhorn, x, eps)
    assert sum(kept) == TOKENS * M * M
    (source, *rest) = [node for node, _ in ops.sinkhorn(x, ITERATIONS, eps).grad_fn.next_functions if node]
    assert type(source).__name__ == "AccumulateGrad"
    assert not rest


@every_eps
@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
def test_sinkhorn_and_its_gradient_equal_the_plain_form(spread: float, eps: float) -> None:
    x = logits(spread)
    (out, grad), (plain, plain_grad) = (run(form, x, eps) for form in (ops.sinkhorn, reference.sinkhorn))
    assert (out - plain).abs().max() <= 1e-12
    assert (grad - plain_grad).abs().max() <= 1e-11


@every_eps
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_sinkhorn_has_two_derivatives(iterations: int, eps: float) -> None:
    x = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.sinkhorn(x, iterations, eps), x)
    assert torch.autograd.gradgradcheck(lambda x: ops.sinkhorn(x, iterations, eps), x)


COMPILED: list[Any] = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.full])]


@every_eps
@pytest.mark.parametrize("form", ["eager", "reference", *COMPILED])
def test_gradients_of_sinkhorn_are_finite_for_logits_of_any_size(form: str, eps: float) -> None:
    iterations = ITERATIONS if form in ("eager", "reference") else 5  # compilers take long over many
    call: Callable[..., Tensor] = reference.sinkhorn if form == "reference" else ops.sinkhorn
    if form not in ("eager", "reference"):
        torch._dynamo.reset()
        call = torch.compile(ops.sinkhorn, backend=form, fullgraph=True)
    for spread in (1.0, 1e2, 1e4, 1e30):
        x = logits(spread, torch.float32)
        with torch.no_grad():
            x[0] = spread * torch.tensor([0.0, -1.0, -1.0, -1.0])  # columns that underflow as a whole …
            x[1] = spread * torch.eye(M)  # … and rows that are one number
        out, grad = run(call, x, eps, iterations)
        truth, slope = run(reference.sinkhorn, x.detach().double().requires_grad_(), eps, iterations)
        assert out.isfinite().all()
        assert grad.isfinite().all()
        assert (out - truth).abs().max() <= 1e-5
        assert (grad - slope).abs().max() <= 1e-5
