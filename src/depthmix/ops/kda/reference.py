"""Kimi Delta Attention as its recurrence, token by token: the ground truth, and the form for few tokens.

Axes: B batch, H head, T token, K channel of a key, V channel of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthmix.ops.reference import full_precision


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, H, T, V] and the state after the last token [B, H, K, V]; all tensors of one dtype.

    For every token: S ← Diag(e^g) S;  δ = β (v − Sᵀk);  S ← S + k δᵀ;  o = K^(−1/2) Sᵀq.
    """
    S = q.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]) if state is None else state
    decay, keys = g.exp().unsqueeze(-1), k.unsqueeze(-1)  # [B, H, T, K, 1]
    if documents is not None:
        decay = decay * continues(documents)[:, None, :, None, None]
    out = []
    with full_precision(q.device):
        for t in range(q.shape[2]):
            S = S * decay[:, :, t]
            change = beta[:, :, t, None] * (v[:, :, t] - (k[:, :, t, None] @ S).squeeze(-2))
            S = S + keys[:, :, t] * change.unsqueeze(-2)
            out.append((q[:, :, t, None] @ S).squeeze(-2))
    return torch.stack(out, 2) * k.shape[3] ** -0.5, S


def continues(documents: Tensor) -> Tensor:
    """[B, T], whether a token belongs to the document of the token before it; the first one belongs to the state's."""
    return torch.cat([torch.ones_like(documents[:, :1], dtype=torch.bool), documents[:, 1:] == documents[:, :-1]], 1)
