"""Operations in plain torch: the ground truth for the faster forms, and the precision that all forms use.

The plain form of attention over depth is in attend/reference.py.

Axes: ... any leading shape (batch, token), D channel, M stream.

Weights, norms and sums are computed in at least float32 (float64 stays float64);
the result is rounded once, to the stream's dtype.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

KeyNorm = Literal["l2", "l2_squared", "rms"]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a stream of this dtype is accumulated."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 if it is that already: coefficients are computed in no less."""
    return x.to(accumulator(x.dtype))


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off, so that the products that determine weights stay in float32."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight @ x + bias in the accumulator's dtype."""
    x = wide(x)
    with full_precision(x.device):
        return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms_parts(v: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """u, r and size with u = v / size and v / sqrt(mean(v²) + eps) = r u, in the accumulator's dtype.

    size [..., 1] is a power of two near the largest entry, at least 1: no square overflows (1e20 squared is beyond
    float32), no factor of the gradient underflows, and u and r lose no precision.
    """
    v = wide(v)
    if not v.shape[-1]:
        return v, (one := v.new_ones((*v.shape[:-1], 1))), one
    top = v.detach().abs().amax(-1, keepdim=True).clamp(1.0, torch.finfo(v.dtype).max / 4)
    size = top.log2().floor().exp2()
    u = v / size
    return u, torch.rsqrt(u.square().mean(-1, keepdim=True) + eps / size.square()), size


def inverse_rms(v: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(v²) + eps) as [..., 1], in the accumulator's dtype; where autograd is needed, use `rms_parts`."""
    _, r, size = rms_parts(v, eps)
    return r / size


def rms_norm(v: Tensor, eps: float) -> Tensor:
    """v / sqrt(mean(v²) + eps) in the accumulator's dtype, without a weight."""
    u, r, _ = rms_parts(v, eps)
    return u * r


def inverse_norm(v: Tensor, eps: float) -> Tensor:
    """1 / (‖v‖ + eps) as [..., 1], in the accumulator's dtype.

    Vectors are divided by their largest entry first, so that no square overflows or underflows. At v = 0, where the
    norm is not differentiable, its derivative is taken as 0.
    """
    v = wide(v)
    size = v.detach().abs().amax(-1, keepdim=True).clamp(min=1e-20) if v.shape[-1] else v.new_ones(())
    square = (v / size).square().sum(-1, keepdim=True)
    zero = square == 0
    return 1 / (square.masked_fill(zero, 1).sqrt().masked_fill(zero, 0) + eps / size) / size


def unit_key(y: Tensor, eps: float, norm: KeyNorm) -> Tensor:
    """y divided by its length, in the accumulator's dtype.

    The length is ‖y‖ + eps ("l2"), √(‖y‖² + eps²) ("l2_squared") or √(‖y‖² + D·eps) ("rms").
    """
    if norm == "l2":
        return wide(y) * inverse_norm(y, eps)
    return rms_norm(y, mean_square_eps(y, eps, norm)) * y.shape[-1] ** -0.5


def mean_square_eps(y: Tensor, eps: float, norm: KeyNorm) -> float:
    """The term that is added to the mean square of y under the root."""
    return eps**2 / y.shape[-1] if norm == "l2_squared" else eps


def elu1(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1, the positive feature map of linear attention."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())  # elu(x) + 1 itself rounds to 0 below -17 in float32


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Tensor:
    """Σ weights[i] ⊙ tensors[i] with weights that broadcast over channels; None means 1."""
    parts = (wide(x) if w is None else wide(x) * w for x, w in zip(tensors, weights, strict=True))
    total = functools.reduce(operator.add, parts)
    return total.to(tensors[0].dtype)


def sinkhorn(logits: Tensor, iterations: int, eps: float = 0.0) -> Tensor:
    """[..., M, M] made doubly stochastic: softmax of rows, columns, then rows and columns in turn, columns last."""
    if eps == 0:  # in logarithms: a column that underflows would be divided by zero
        log = torch.log_softmax(wide(logits), -1)
        log = log - log.logsumexp(-2, keepdim=True)
        for _ in range(iterations - 1):
            log = log - log.logsumexp(-1, keepdim=True)
            log = log - log.logsumexp(-2, keepdim=True)
        return log.exp()
    matrix = torch.softmax(wide(logits), -1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def read_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """Σ_m weights[..., m] streams[..., m, :]."""
    return (wide(streams) * weights.unsqueeze(-1)).sum(-2).to(streams.dtype)


def write_streams(streams: Tensor, transition: Tensor | None, gain: Tensor, y: Tensor) -> Tensor:
    """streams[i] ← Σ_j transition[..., i, j] streams[j] + gain[..., i] y.

    A transition with one axis fewer is diagonal; None is the identity.
    """
    kept = wide(streams)
    if transition is not None and transition.dim() == gain.dim():
        kept = transition.unsqueeze(-1) * kept
    elif transition is not None:
        with full_precision(streams.device):
            kept = transition.to(kept.dtype) @ kept
    return (kept + gain.unsqueeze(-1) * y.unsqueeze(-2)).to(streams.dtype)


def delta_rule(rows: Tensor, erase: Tensor, write: Tensor, beta: Tensor, target: Tensor) -> Tensor:
    """rows[j] ← rows[j] + β (target[j] write − ⟨rows[j], erase⟩ erase): the delta rule along the channels.

    The key is used twice, to erase and to write; these are two arguments so that the rule is linear in each of
    (rows, write). rows [..., M, D], erase and write [..., D], beta [..., 1], target [..., M].
    """
    held = wide(rows)
    recalled = (held * erase.unsqueeze(-2)).sum(-1)  # [..., M]
    change = target.unsqueeze(-1) * write.unsqueeze(-2) - recalled.unsqueeze(-1) * erase.unsqueeze(-2)
    return (held + beta.unsqueeze(-1) * change).to(rows.dtype)
