"""Sinkhorn's iteration with a backward pass that runs it again instead of keeping its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from depthmix.ops import reference
from depthmix.ops.backend import chosen, traced_by_torch


def sinkhorn(logits: Tensor, iterations: int, eps: float = 0.0) -> Tensor:
    """[..., M, M] made doubly stochastic: rows and columns in turn, columns last; see `reference.sinkhorn`."""
    if traced_by_torch() or chosen() == "reference":
        return reference.sinkhorn(logits, iterations, eps)
    out: Tensor = Sinkhorn.apply(logits, iterations, eps)
    return out


class Sinkhorn(torch.autograd.Function):
    """Keeps the logits alone: M² numbers a token, not 2·iterations times as many."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.options = (iterations, eps)
        return reference.sinkhorn(logits, iterations, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (logits,) = ctx.saved_tensors
        again = torch.is_grad_enabled()  # a graph of this very pass is wanted: stay on the real logits
        with torch.enable_grad():
            leaf = logits if again else logits.detach().requires_grad_()
            out = reference.sinkhorn(leaf, *ctx.options)
            (found,) = torch.autograd.grad(out, leaf, grad, create_graph=again)
        return found, None, None
