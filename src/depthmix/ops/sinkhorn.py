"""Sinkhorn's iteration with a backward pass that recomputes it instead of saving its graph.

Axes: ... any leading shape, M stream, N all tokens. N is the last axis, so that operations vectorise along it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from depthmix.ops import reference
from depthmix.ops.backend import plain_wanted
from depthmix.ops.reference import wide
from depthmix.ops.streams import differentiable_gradients


def sinkhorn(logits: Tensor, iterations: int, eps: float = 0.0) -> Tensor:
    """[..., M, M] made doubly stochastic: rows and columns in turn, columns last; see `reference.sinkhorn`."""
    if plain_wanted():
        return reference.sinkhorn(logits, iterations, eps)
    out: Tensor = Sinkhorn.apply(logits, iterations, eps)
    return out


class Sinkhorn(torch.autograd.Function):
    """Saves only the logits: M² numbers per token instead of 2·iterations·M²."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.options = (iterations, eps)
        for _, matrix in half_steps(tokens_last(wide(logits)), iterations, eps):
            last = matrix
        return tokens_first(last, logits.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (logits,) = ctx.saved_tensors
        iterations, eps = ctx.options
        if torch.is_grad_enabled():
            return (
                *differentiable_gradients(lambda x: reference.sinkhorn(x, iterations, eps), (logits,), grad),
                None,
                None,
            )
        (_, rows), *steps = half_steps(tokens_last(wide(logits)), iterations, eps)
        scaled_grad = tokens_last(grad).mul(steps[-1][1])  # the gradient of a matrix, times the matrix
        for axis, matrix in reversed(steps):  # dividing by a sum has the gradient of a log-softmax
            scaled_grad.addcmul_(matrix, scaled_grad.sum(axis, keepdim=True), value=-1)
        if eps:
            scaled_grad.mul_(rows / (rows + eps))
        scaled_grad.addcmul_(rows, scaled_grad.sum(1, keepdim=True), value=-1)
        return tokens_first(scaled_grad, logits.shape).to(logits.dtype), None, None


def half_steps(logits: Tensor, iterations: int, eps: float) -> Iterator[tuple[int, Tensor]]:
    """The softmax of the rows, then the matrix [M, M, N] after each half-step, each with the axis that was summed."""
    log = torch.log_softmax(logits, 1)
    yield 1, (matrix := log.exp())
    if eps:
        matrix = matrix + eps
        for step in range(1, 2 * iterations):
            axis = (step + 1) % 2
            yield axis, (matrix := matrix / (matrix.sum(axis, keepdim=True) + eps))
        return
    log = log - log.logsumexp(0, keepdim=True)  # a whole column may underflow
    yield 0, (matrix := log.exp())
    for step in range(2, 2 * iterations):  # sums now lie between 1/M² and M: no need to subtract the maximum
        axis = (step + 1) % 2
        log = log - matrix.sum(axis, keepdim=True).log_()
        yield axis, (matrix := log.exp())


def tokens_last(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:]).permute(1, 2, 0).contiguous()


def tokens_first(x: Tensor, shape: torch.Size) -> Tensor:
    return x.permute(2, 0, 1).contiguous().view(shape)
