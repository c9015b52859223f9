"""A separate linear map for each group of rows: the matrix product of a mixture of experts.

Both products are custom operators, so that a compiler does not trace into them: the number of rows per group is known
only at run time. Each is the other's derivative, so derivatives of any order exist.

Axes: N row, E group (expert), D channel in, F channel out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.amp import is_autocast_available  # not on the meta device


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows ends[e−1] … ends[e] − 1 of x [N, D] times weight[e] [F, D] transposed: [N, F].

    Under autocast it computes in autocast's dtype, as `torch.nn.functional.linear` does.

    Args:
        x: [N, D], with the rows of each group contiguous.
        weight: [E, F, D].
        ends: [E] integers, for each group the index after its last row; the last one is N. Groups may be empty.
    """
    check(x, weight, ends)
    device = x.device.type
    if is_autocast_available(device) and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x, weight = (t.to(torch.get_autocast_dtype(device)) for t in (x, weight))
    if x.dtype != weight.dtype:
        raise ValueError(
            f"x is {x.dtype}, weight is {weight.dtype}; expected the same dtype: convert one of them before the call"
        )
    return linear_op(x, weight, ends)


def plain_grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same, with the weight gathered for every row."""
    group = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
    return (weight[group] @ x[:, :, None])[:, :, 0]


@torch.library.custom_op("depthmix::grouped_linear", mutates_args=())
def linear_op(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    for e, rows in groups(ends, x.shape[0]):
        torch.mm(x[rows], weight[e].T, out=out[rows])
    return out


@torch.library.custom_op("depthmix::grouped_outer", mutates_args=())
def outer_op(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Σ over the rows of each group of y [N, F] times x [N, D]: [E, F, D]."""
    out = x.new_zeros(ends.shape[0], y.shape[1], x.shape[1])
    for e, rows in groups(ends, x.shape[0]):
        torch.mm(y[rows].T, x[rows], out=out[e])
    return out


def groups(ends: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """The non-empty groups. They must cover all rows, or part of the result would stay uninitialised."""
    bounds = [0, *ends.tolist()]
    if bounds[-1] != rows or bounds != sorted(bounds):
        raise ValueError(f"ends={bounds[1:]}; expected non-decreasing numbers from 0 to {rows}, the number of rows")
    for e, (lo, hi) in enumerate(pairwise(bounds)):
        if hi > lo:
            yield e, slice(lo, hi)


def check(x: Tensor, weight: Tensor, ends: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x has shape {list(x.shape)}, weight {list(weight.shape)}; expected [rows, D] and [groups, F, D]"
        )
    if ends.shape != weight.shape[:1] or ends.is_floating_point():
        raise ValueError(
            f"ends is {ends.dtype} of shape {list(ends.shape)}; expected integers [{weight.shape[0]}], one per group"
        )


@linear_op.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@outer_op.register_fake
def _(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], y.shape[1], x.shape[1])


def save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    of_x, of_weight, _ = ctx.needs_input_grad
    return (
        linear_op(grad, weight.transpose(1, 2), ends) if of_x else None,
        outer_op(grad, x, ends) if of_weight else None,
        None,
    )


def outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    y, x, ends = ctx.saved_tensors
    of_y, of_x, _ = ctx.needs_input_grad
    return (
        linear_op(x, grad, ends) if of_y else None,
        linear_op(y, grad.transpose(1, 2), ends) if of_x else None,
        None,
    )


linear_op.register_autograd(linear_backward, setup_context=save_inputs)
outer_op.register_autograd(outer_backward, setup_context=save_inputs)
