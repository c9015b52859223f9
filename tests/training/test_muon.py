"""Muon: against its equations by singular values, and against torch's own, which rounds to bfloat16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from depthmix.training.muon import Muon, orthogonal


def orthogonal_by_singular_values(matrix: Tensor) -> Tensor:
    """The quintic a·s + b·s³ + c·s⁵, five times, on each singular value of the matrix over its norm."""
    u, s, vh = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 99))
def test_products_do_what_the_polynomial_does_to_singular_values(rows: int, columns: int, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert orthogonal(matrix) == pytest.approx(orthogonal_by_singular_values(matrix), abs=1e-10)


def run_steps(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    draws = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draws, dtype=torch.float64).to(parameter.dtype)
        optimizer.step()


def start(dtype: torch.dtype) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=draws, dtype=dtype)) for s in ((8, 8), (12, 5), (5, 12))]


def test_three_steps_follow_the_equations() -> None:
    parameters = start(torch.float64)
    expected = [p.detach().clone() for p in parameters]
    run_steps(parameters, Muon(parameters, lr=0.1, momentum=0.9, weight_decay=0.2), 3)
    draws = torch.Generator().manual_seed(7)
    buffers = [torch.zeros_like(w) for w in expected]
    for _ in range(3):
        for k, weight in enumerate(expected):
            grad = torch.randn(weight.shape, generator=draws, dtype=torch.float64)
            buffers[k] = 0.9 * buffers[k] + 0.1 * grad
            direction = orthogonal_by_singular_values(0.1 * grad + 0.9 * buffers[k])
            expected[k] = (1 - 0.1 * 0.2) * weight - 0.1 * 0.2 * max(weight.shape) ** 0.5 * direction
    for parameter, weight in zip(parameters, expected, strict=True):
        assert parameter.detach() == pytest.approx(weight, abs=1e-10)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_steps_agree_with_torchs_own_up_to_its_rounding() -> None:
    ours, theirs = start(torch.float32), start(torch.float32)
    run_steps(ours, Muon(ours, lr=0.02, momentum=0.95, weight_decay=0.1), 10)
    other = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    run_steps(theirs, other, 10)
    for mine, torchs in zip(ours, theirs, strict=True):
        assert (mine - torchs).norm() < 0.01 * (torchs - 0).norm()
        assert (mine - torchs).norm() > 0, "torch's own no longer rounds: take it"


def test_a_gradient_of_zeros_moves_nothing_but_by_decay_and_vectors_are_refused() -> None:
    matrix = nn.Parameter(torch.ones(3, 4))
    matrix.grad = torch.zeros(3, 4)
    Muon([matrix], lr=0.5, weight_decay=0.0).step()
    assert torch.equal(matrix, torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"shape \[3\]; expected a matrix"):
        Muon([nn.Parameter(torch.ones(3))], lr=0.5)
