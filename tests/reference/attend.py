"""Softmax attention over a list of sources, one query and one source at a time.

Axes: n sources [..., D] with any leading shape, Q queries, D channels; every operation acts on the last axis alone.

    norm(v) = v / sqrt(mean(v^2) + eps)                 normalize=False: v
    s_i     = scale <query, key_weight * norm(v_i)>
    lse     = log sum_i exp(s_i)
    h       = sum_i exp(s_i - lse) v_i

Over the union of two disjoint sets of sources, sum exp(s) is the sum of both, and so is sum exp(s) v:

    lse = log(exp(lse_1) + exp(lse_2))
    h   = exp(lse_1 - lse) h_1 + exp(lse_2 - lse) h_2
"""

import torch


def _attend_one(sources, query, key_weight, normalize, eps, scale):
    """One query [D], one key weight [D] or None: h [..., D], lse [...]."""
    logits = []
    for v in sources:
        k = v
        if normalize:
            k = v / torch.sqrt((v * v).mean(dim=-1, keepdim=True) + eps)  # norm(v_i)
        if key_weight is not None:
            k = key_weight * k
        logits.append(scale * (query * k).sum(dim=-1))  # s_i
    lse = torch.logsumexp(torch.stack(logits), dim=0)
    h = sum(torch.exp(s - lse).unsqueeze(-1) * v for s, v in zip(logits, sources, strict=True))
    return h, lse


def attend(
    sources: list[torch.Tensor],
    query: torch.Tensor,
    key_weight: torch.Tensor | None = None,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float = 1.0,
) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], torch.Tensor]:
    """(h, lse): h [..., D] and lse [...] for a query [D]; Q tensors [..., D] and lse [..., Q] for queries [Q, D]."""
    if not sources:
        raise ValueError("no sources")
    D = sources[0].shape[-1]
    if query.ndim not in (1, 2) or query.shape[-1] != D:
        raise ValueError("query must be [D] or [Q, D]")
    if key_weight is not None and tuple(key_weight.shape) not in ((D,), tuple(query.shape)):
        raise ValueError("key_weight must be [D] or shaped like the queries")
    if query.ndim == 1:
        return _attend_one(sources, query, key_weight, normalize, eps, scale)
    hs, lses = [], []
    for q in range(query.shape[0]):
        gamma = key_weight[q] if key_weight is not None and key_weight.ndim == 2 else key_weight
        h, lse = _attend_one(sources, query[q], gamma, normalize, eps, scale)
        hs.append(h)
        lses.append(lse)
    return tuple(hs), torch.stack(lses, dim=-1) if lses else sources[0].new_zeros((*sources[0].shape[:-1], 0))


def merge(
    h1: torch.Tensor | tuple[torch.Tensor, ...],
    lse1: torch.Tensor,
    h2: torch.Tensor | tuple[torch.Tensor, ...],
    lse2: torch.Tensor,
) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], torch.Tensor]:
    """(h, lse) over the union of two disjoint sets of sources, from (h, lse) of each; in both forms of attend."""
    lse = torch.logaddexp(lse1, lse2)  # log(exp(lse_1) + exp(lse_2))
    a1, a2 = torch.exp(lse1 - lse), torch.exp(lse2 - lse)
    if isinstance(h1, torch.Tensor):
        return a1.unsqueeze(-1) * h1 + a2.unsqueeze(-1) * h2, lse
    pairs = enumerate(zip(h1, h2, strict=True))
    return tuple(a1[..., q, None] * h1_q + a2[..., q, None] * h2_q for q, (h1_q, h2_q) in pairs), lse
