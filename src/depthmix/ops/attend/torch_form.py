"""Forward and backward of attention over depth in closed form, in torch operations, for any device and dtype.

The interface is that of `native`: see its attend.cpp for the formulas. The only tensors of width D saved for the
backward pass are the sources; everything else is recomputed.

Axes: ... any leading shape, D channel, S source, Q query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthmix.ops.attend.options import ReadOptions
from depthmix.ops.attend.reference import weighted_mixture
from depthmix.ops.reference import full_precision, inverse_rms, linear, weighted_sum, wide


def forward(
    sources: Sequence[Tensor],
    folded: Tensor,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    options: ReadOptions,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """h (one per query), lse [Q, ...], 1/rms [..., S], weights [..., Q, S]."""
    if options.normalize:
        rstd = torch.cat([inverse_rms(v, options.eps) for v in sources], -1)
    else:
        rstd = folded.new_ones((*sources[0].shape[:-1], len(sources)))
    products = torch.stack([linear(v, folded) for v in sources], -1)  # [..., Q, S]
    logits = options.scale * (products * rstd.unsqueeze(-2))
    if prior_lse is not None:
        logits = torch.cat([logits, prior_lse[..., None, None]], -1)
    lse, weights = logits.logsumexp(-1), logits.softmax(-1)  # [..., Q], [..., Q, S or S + 1]
    of_prior, weights = weights[..., 0, len(sources) :], weights[..., : len(sources)]
    h = [weighted_mixture(sources, weights[..., q : q + 1, :]) for q in range(folded.shape[0])]
    if prior is not None:
        h = [weighted_sum([prior, h[0]], [of_prior, None])]
    return h, lse.movedim(-1, 0).contiguous(), rstd, weights


def backward(
    sources: Sequence[Tensor],
    folded: Tensor,
    h: Tensor | None,
    prior_lse: Tensor | None,
    rstd: Tensor,
    weights: Tensor,
    lse: Tensor,
    grad_h: Sequence[Tensor | None],
    grad_lse: Sequence[Tensor | None],
    options: ReadOptions,
) -> tuple[list[Tensor], Tensor, Tensor | None, Tensor | None]:
    """Gradients of the sources, of the folded queries, of the prior's mixture and of its log-sum-exp."""
    nothing = folded.new_zeros(sources[0].shape[:-1])
    slopes, grad_prior, grad_prior_lse = [], None, None
    for q, (g, from_lse) in enumerate(zip(grad_h, grad_lse, strict=True)):
        a = weights[..., q, :]  # [..., S]
        u = torch.zeros_like(a) if g is None else torch.stack([dot(g, v) for v in sources], -1)
        used = (a * u).sum(-1)
        from_lse = nothing if from_lse is None else from_lse
        grad_dot_h = used if h is None else nothing if g is None else dot(g, h)
        slopes.append(a * (u - grad_dot_h.unsqueeze(-1) + from_lse.unsqueeze(-1)))
        if prior_lse is not None:
            of_prior = (prior_lse - lse[q]).exp()
            grad_prior_lse = grad_dot_h - used - of_prior * grad_dot_h + of_prior * from_lse
            if g is not None:
                grad_prior = weighted_sum([g], [of_prior.unsqueeze(-1)])
    slope = options.scale * torch.stack(slopes, -2)  # [..., Q, S]: of r_s <v_s, c_q>
    given = [(q, g) for q, g in enumerate(grad_h) if g is not None]
    grads, grad_folded = [], torch.zeros_like(folded)
    with full_precision(folded.device):
        for s, v in enumerate(sources):
            one, r, unit = slope[..., s], rstd[..., s, None], wide(v)  # [..., Q], [..., 1], [..., D]
            grad = (one * r) @ folded
            if options.normalize:
                unit = unit * r  # before multiplying by r again: r² of a long source underflows
                pull = (one * r * linear(v, folded)).sum(-1, keepdim=True) * (r / -v.shape[-1])
                grad = torch.addcmul(grad, pull, unit)
            for q, g in given:
                grad = torch.addcmul(grad, weights[..., q, s].unsqueeze(-1), wide(g))
            grads.append(grad.to(v.dtype))
            grad_folded += one.reshape(-1, one.shape[-1]).T @ unit.reshape(-1, v.shape[-1])
    return grads, grad_folded, grad_prior, grad_prior_lse


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (wide(a) * wide(b)).sum(-1)
