"""Multi-head latent attention without positions (arXiv 2405.04434 without its rotation), one token and head at a time.

Axes: B rows, T tokens, D model width, H heads, r channels of the latent, n channels of a key of its own head,
m channels of a key that all heads share, c channels of a value.

    a     = W_a x [r + m];      (l', z) = split(a);      l = w_norm l' / sqrt(mean l'^2 + eps)
    q_h   = rows h of W_q x [n + m]
    k_h   = [rows h of W_b l, the first n;  z]                    z is the same for every head, and not turned
    v_h   = rows h of W_b l, the last c                            W_b has n + c rows a head
    o_h   = sum_s softmax_s(<q_h, k_hs> / sqrt(n + m)) v_hs        over the tokens s that are visible
    out   = W_o [o_1 ... o_H]

x is already normalised. Token t sees token s if s <= t, both are valid and both are of one document. A token that is
not valid sees itself only, and no other token sees it.

Parameters: q_proj [H(n + m), D], kv_a [r + m, D], kv_norm [r], kv_b [H(n + c), r], o_proj [D, H c]; each name alone or
with ".weight". All widths follow from these shapes and H.
"""

import math

import torch

Params = dict[str, torch.Tensor]


def weight(params: Params, name: str) -> torch.Tensor:
    return params[name] if name in params else params[f"{name}.weight"]


def norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """One vector x."""
    return scale * x / torch.sqrt((x * x).mean() + eps)


def sees(b: int, t: int, s: int, documents: torch.Tensor | None, valid: torch.Tensor | None) -> bool:
    """Whether token t of row b reads token s."""
    if s > t:
        return False
    if valid is not None and not (valid[b, t] and valid[b, s]):
        return s == t
    return documents is None or bool(documents[b, t] == documents[b, s])


def project(
    x: torch.Tensor, params: Params, heads: int, eps: float
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """q, k and v of one token x [D], each a list over heads."""
    latent_norm, kv_b, o_proj = (weight(params, name) for name in ("kv_norm", "kv_b", "o_proj"))
    r, c = latent_norm.shape[0], o_proj.shape[1] // heads
    n = kv_b.shape[0] // heads - c
    a = weight(params, "kv_a") @ x
    latent, shared = norm(a[:r], latent_norm, eps), a[r:]
    q_all, kv_all = weight(params, "q_proj") @ x, kv_b @ latent
    m = shared.shape[0]
    q, k, v = [], [], []
    for h in range(heads):
        q.append(q_all[h * (n + m) : (h + 1) * (n + m)])
        own = kv_all[h * (n + c) : (h + 1) * (n + c)]
        k.append(torch.cat([own[:n], shared]))
        v.append(own[n:])
    return q, k, v


def sublayer(
    x: torch.Tensor,
    params: Params,
    *,
    heads: int,
    eps: float = 1e-6,
    documents: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output [B, T, D] of x [B, T, D]. Documents and valid are [B, T]; eps is that of kv_norm."""
    B, T, _ = x.shape
    rows = []
    for b in range(B):
        tokens = [project(x[b, t], params, heads, eps) for t in range(T)]
        for t in range(T):
            visible = [s for s in range(T) if sees(b, t, s, documents, valid)]
            o = []
            for h in range(heads):
                q = tokens[t][0][h]
                logits = [torch.dot(q, tokens[s][1][h]) / math.sqrt(len(q)) for s in visible]
                p = torch.softmax(torch.stack(logits), dim=0)
                o.append(sum(p[i] * tokens[s][2][h] for i, s in enumerate(visible)))
            rows.append(weight(params, "o_proj") @ torch.cat(o))
    return torch.stack(rows).reshape(x.shape) if rows else x
