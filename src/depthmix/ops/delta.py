"""The delta rule along the channels, with a key made of what is written.

Axes: ... any leading shape, M row, D channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from depthmix.ops import reference
from depthmix.ops.reference import full_precision
from depthmix.ops.streams import dots, inverse_rms, like, plain_wanted, replayed, together


def normed_delta(rows: Tensor, y: Tensor, beta: Tensor, target: Tensor, *, eps: float) -> Tensor:
    """`delta_rule` with the key norm(y)/√D, erasing and writing: rows[j] ← rows[j] + β (target[j] − ⟨rows[j], k⟩) k."""
    if plain_wanted():
        return plain_normed_delta(rows, y, beta, target, eps)
    out: Tensor = NormedDelta.apply(rows, y, beta, target, eps)
    return out


def plain_normed_delta(rows: Tensor, y: Tensor, beta: Tensor, target: Tensor, eps: float) -> Tensor:
    key = reference.rms_norm(y, eps) * y.shape[-1] ** -0.5
    return reference.delta_rule(rows, key, key, beta, target)


class NormedDelta(torch.autograd.Function):
    """Keeps rows, y, β, target and two sets of numbers: κ, with which the key is κ y, and what the key recalls."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, y: Tensor, beta: Tensor, target: Tensor, eps: float) -> Tensor:
        dtype = together(rows, y, beta, target)
        held = rows.to(dtype)
        kappa = inverse_rms(y, eps).to(dtype) * y.shape[-1] ** -0.5  # [..., 1]
        key = y.to(dtype) * kappa
        with full_precision(rows.device):
            recalled = dots(held, key)  # [..., M]
        ctx.save_for_backward(rows, y, beta, target, kappa, recalled)
        ctx.eps = eps
        change = beta * (target - recalled)
        return torch.addcmul(held, change.unsqueeze(-1), key.unsqueeze(-2)).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, y, beta, target, kappa, recalled = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = lambda rows, y, beta, target: plain_normed_delta(rows, y, beta, target, ctx.eps)  # noqa: E731
            return (*replayed(plain, (rows, y, beta, target), grad), None)
        dtype = together(rows, y, beta, target)
        g, key = grad.to(dtype), y.to(dtype) * kappa
        with full_precision(rows.device):
            felt = dots(g, key)  # [..., M]
            of_target, missing = beta * felt, target - recalled
            of_rows = torch.addcmul(g, -of_target.unsqueeze(-1), key.unsqueeze(-2))
            of_y = ((beta * missing).unsqueeze(-2) @ g).squeeze(-2)  # first of the key, …
            of_y -= (of_target.unsqueeze(-2) @ rows.to(dtype)).squeeze(-2)
        pull = (of_target * (missing - recalled)).sum(-1, keepdim=True)
        of_y.addcmul_(key, -pull).mul_(kappa)  # … then through its norm
        of_beta = (felt * missing).sum(-1, keepdim=True)
        return like(of_rows, rows), like(of_y, y), like(of_beta, beta), like(of_target, target), None
