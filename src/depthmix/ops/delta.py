"""The delta rule along the channels, with a key computed from the output that is written.

Axes: ... any leading shape, M row, D channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from depthmix.ops import reference
from depthmix.ops.backend import plain_wanted
from depthmix.ops.reference import KeyNorm, full_precision, wide
from depthmix.ops.streams import common_accumulator, differentiable_gradients, dots, inverse_rms, like


def normed_delta(rows: Tensor, y: Tensor, beta: Tensor, target: Tensor, *, eps: float, norm: KeyNorm = "l2") -> Tensor:
    """`delta_rule` with k = `unit_key(y)`, erasing and writing: rows[j] ← rows[j] + β (target[j] − ⟨rows[j], k⟩) k."""
    if plain_wanted():
        return plain_normed_delta(rows, y, beta, target, eps, norm)
    out: Tensor = NormedDelta.apply(rows, y, beta, target, eps, norm)
    return out


def plain_normed_delta(rows: Tensor, y: Tensor, beta: Tensor, target: Tensor, eps: float, norm: KeyNorm) -> Tensor:
    key = reference.unit_key(y, eps, norm)
    return reference.delta_rule(rows, key, key, beta, target)


def key_scale(y: Tensor, eps: float, norm: KeyNorm) -> Tensor:
    """The factor κ [..., 1] for which κ y is `unit_key(y)`; in one pass where no square overflows or underflows."""
    if norm != "l2":
        return inverse_rms(y, reference.mean_square_eps(y, eps, norm)) * y.shape[-1] ** -0.5
    if y.device.type == "cpu" and type(y) in (Tensor, torch.nn.Parameter):  # a check on a GPU would synchronise
        length = torch.linalg.vector_norm(wide(y), dim=-1, keepdim=True)
        if bool(((length > 1e-15) & length.isfinite()).all()):
            return length.add_(eps).reciprocal_()
    return reference.inverse_norm(y, eps)


class NormedDelta(torch.autograd.Function):
    """Saves rows, y, β, target, the factor κ (the key is κ y) and the values that the key recalls."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, y: Tensor, beta: Tensor, target: Tensor, eps: float, norm: KeyNorm) -> Tensor:
        dtype = common_accumulator(rows, y, beta, target)
        held = rows.to(dtype)
        kappa = key_scale(y, eps, norm).to(dtype)  # [..., 1]
        key = y.to(dtype) * kappa
        with full_precision(rows.device):
            recalled = dots(held, key)  # [..., M]
        ctx.save_for_backward(rows, y, beta, target, kappa, recalled)
        ctx.options = (eps, norm)
        change = beta * (target - recalled)
        return torch.addcmul(held, change.unsqueeze(-1), key.unsqueeze(-2)).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, y, beta, target, kappa, recalled = ctx.saved_tensors
        eps, norm = ctx.options
        if torch.is_grad_enabled():
            plain = lambda rows, y, beta, target: plain_normed_delta(rows, y, beta, target, eps, norm)  # noqa: E731
            return (*differentiable_gradients(plain, (rows, y, beta, target), grad), None, None)
        dtype = common_accumulator(rows, y, beta, target)
        g, key = grad.to(dtype), y.to(dtype) * kappa
        with full_precision(rows.device):
            grad_along_key = dots(g, key)  # [..., M]
            of_target, missing = beta * grad_along_key, target - recalled
            of_rows = torch.addcmul(g, -of_target.unsqueeze(-1), key.unsqueeze(-2))
            of_y = ((beta * missing).unsqueeze(-2) @ g).squeeze(-2)  # first of the key, …
            of_y -= (of_target.unsqueeze(-2) @ rows.to(dtype)).squeeze(-2)
        pull = (of_target * (missing - recalled)).sum(-1, keepdim=True)
        if norm == "l2":  # ∂k/∂y = κ (I − k kᵀ/|k|), |k| = 1 − κ eps; for the other two it is κ (I − k kᵀ)
            length = 1 - kappa * eps
            pull = torch.where(length > 0, pull / length, 0)  # y = 0: I/eps
        of_y.addcmul_(key, -pull).mul_(kappa)  # … then through its norm
        of_beta = (grad_along_key * missing).sum(-1, keepdim=True)
        return like(of_rows, rows), like(of_y, y), like(of_beta, beta), like(of_target, target), None, None
