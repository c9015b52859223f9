"""The grouped product against one product a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix import ops


def grouped(dims: tuple[int, ...] = (0, 3, 0, 4, 1, 0)) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(sum(dims), 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(dims), 3, 4, dtype=torch.float64, requires_grad=True)
    return x, weight, torch.tensor(dims).cumsum(0)


@pytest.mark.parametrize("dims", [(0, 3, 0, 4, 1, 0), (5,), (0, 0), (1, 1, 1)], ids=str)
def test_the_grouped_product_is_one_product_a_row(dims: tuple[int, ...]) -> None:
    x, weight, ends = grouped(dims)
    ours, plain = (f(x, weight, ends) for f in (ops.grouped_linear, ops.plain_grouped_linear))
    assert torch.allclose(ours, plain, rtol=0, atol=1e-13)
    direction = torch.randn_like(ours)
    for a, b in zip(
        *(torch.autograd.grad((y * direction).sum(), (x, weight)) for y in (ours, plain)),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-13)


def test_the_grouped_product_has_first_and_second_derivatives() -> None:
    x, weight, ends = grouped()
    assert torch.autograd.gradcheck(lambda x, w: ops.grouped_linear(x, w, ends), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: ops.grouped_linear(x, w, ends), (x, weight))


def test_the_grouped_product_is_a_sound_operator() -> None:
    x, weight, ends = grouped()
    torch.library.opcheck(torch.ops.depthmix.grouped_linear.default, (x, weight, ends))
    y = torch.randn(len(x), 3, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.depthmix.grouped_outer.default, (y, x, ends))


def test_the_grouped_product_has_a_shape_and_gradients_on_the_meta_device() -> None:
    x, weight, ends = (t.detach().to("meta") for t in grouped())
    out = ops.grouped_linear(x.requires_grad_(), weight.requires_grad_(), ends)
    assert (out.is_meta, out.shape) == (True, (len(x), weight.shape[1]))
    assert [g.shape for g in torch.autograd.grad(out.sum(), (x, weight))] == [x.shape, weight.shape]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, e: (x[:, :2], w, e), r"x has shape \[8, 2\]"),
        (lambda x, w, e: (x, w, e[:2]), r"ends is torch.int64 of shape \[2\]"),
        (lambda x, w, e: (x, w, e - 1), "expected non-decreasing numbers from 0 to 8"),
        (lambda x, w, e: (x, w, e.flip(0)), "expected non-decreasing numbers from 0 to 8"),
        (lambda x, w, e: (x, w, e[[1, 0, 2, 3, 4, 5]]), r"ends=\[3, 0, 3, 7, 8, 8\]"),
        (lambda x, w, e: (x, w, e[[0, 3, 2, 1, 4, 5]]), r"ends=\[0, 7, 3, 3, 8, 8\]"),
        (lambda x, w, e: (x, w, e.new_tensor([-2, 3, 3, 7, 8, 8])), r"ends=\[-2, 3, 3, 7, 8, 8\]"),
        (lambda x, w, e: (x, w, e.new_tensor([0, 3, 3, 9, 8, 8])), r"ends=\[0, 3, 3, 9, 8, 8\]"),
        (lambda x, w, e: (x.float(), w, e), "expected the same dtype"),
    ],
)
def test_a_wrong_group_is_refused(change: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ops.grouped_linear(*change(*grouped()))
