"""Attention over depth in plain torch: the ground truth that the backends in this folder are tested against.

Axes: ... any leading shape (batch, token), D channel, S source, Q query, H head.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from depthmix.ops.attend.options import DEFAULT, ReadOptions
from depthmix.ops.reference import linear, rms_norm, rms_parts, weighted_sum, wide

Reads = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # Q mixtures [..., D] and their Q log-sum-exps [...]


def attend(
    sources: Sequence[Tensor],
    folded: Tensor,
    prior: tuple[Tensor, Tensor] | None = None,
    options: ReadOptions = DEFAULT,
) -> Reads:
    """Softmax attention of folded queries [Q, D] over sources [..., D]: Q mixtures and their log-sum-exps [...].

    A prior, for one query, is the result (h, lse) of attending over other sources: it joins as one more source.
    """
    keys = [key_of(v, None, options.normalize, options.eps) for v in sources]
    return join(sources, options.scale * torch.stack([linear(k, folded) for k in keys], -1), prior)


def fold(query: Tensor, key_weight: Tensor | None) -> Tensor:
    """The queries [Q, D] multiplied by the key weight: only their product enters a logit."""
    folded = wide(query) if key_weight is None else wide(query) * wide(key_weight)
    return folded.reshape(-1, query.shape[-1])


def key_of(v: Tensor, key_weight: Tensor | None, normalize: bool, eps: float) -> Tensor:
    key = rms_norm(v, eps) if normalize else wide(v)
    return key if key_weight is None else key * key_weight


def scores(keys: Sequence[Tensor], query: Tensor) -> Tensor:
    """Logits [..., H, S] of keys [..., D], split into heads, under queries [..., H, D/H]."""
    heads = query.shape[-2]
    return torch.stack([(k.unflatten(-1, (heads, -1)) * query).sum(-1) for k in keys], -1)


def normed_scores(sources: Sequence[Tensor], query: Tensor, normalize: bool, eps: float) -> Tensor:
    """`scores` of norm(v) without materialising it: 1/rms of a source multiplies its logit."""
    if not normalize:
        return scores([wide(v) for v in sources], query)
    parts = [rms_parts(v, eps) for v in sources]
    rstd = torch.stack([r for _, r, _ in parts], -1)  # [..., 1, S]
    return scores([u for u, _, _ in parts], query) * rstd


def join(sources: Sequence[Tensor], logits: Tensor, prior: tuple[Tensor, Tensor] | None) -> Reads:
    """Mixtures and log-sum-exps for logits [..., Q, S], with the prior as one more source."""
    if prior is not None:
        sources, logits = [*sources, prior[0]], torch.cat([logits, prior[1][..., None, None]], -1)
    lse = logits.logsumexp(-1)  # [..., Q]
    weights = logits.softmax(-1)  # not exp(logits − lse), whose error grows with the logits
    mixed = tuple(weighted_mixture(sources, weights[..., q : q + 1, :]) for q in range(logits.shape[-2]))
    return mixed, lse.unbind(-1)


def weighted_mixture(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Σ_s weights[..., h, s] sources[s], each head h weighting its own group of channels."""
    heads = weights.shape[-2]
    parts = (wide(v).unflatten(-1, (heads, -1)) * weights[..., s, None] for s, v in enumerate(sources))
    total = functools.reduce(operator.add, parts)
    return total.flatten(-2).to(sources[0].dtype)


def merge(h1: Tensor, lse1: Tensor, h2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Online softmax: attention over two disjoint sets of sources, from the results over each set."""
    gap = (lse1 - lse2).unsqueeze(-1)
    return weighted_sum([h1, h2], [torch.sigmoid(gap), torch.sigmoid(-gap)]), torch.logaddexp(lse1, lse2)
