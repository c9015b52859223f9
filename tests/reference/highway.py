"""Highway networks: a gated moving average over depth.

Axes: ... leading shape (tokens), D width, K gates per token (1 scalar, D channel), L sublayers;
rows l = 1 … L+1 and sources i = 0 … L.

    norm(v) = v / sqrt(mean(v²) + eps)
    h_1 = v_0
    g_l = σ(W_l norm(h_l) + b_l)
    h_{l+1} = (1 − g_l) ⊙ h_l + g_l ⊙ v_l,    v_l = f_l(h_l)

    M_{i→l} = g_i ∏_{j=i+1}^{l−1} (1 − g_j)    for i < l, with g_0 = 1

With gate="channel" M has a channel axis. The option bias is the start of b_l only: the values
themselves are in params.
"""

import torch


def _norm(v: torch.Tensor, eps: float) -> torch.Tensor:
    return v / torch.sqrt((v * v).mean(dim=-1, keepdim=True) + eps)


def _run(
    x: torch.Tensor, sublayers: list, params: dict[str, torch.Tensor], gate: str, eps: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """[h_1, ..., h_{L+1}] and [g_0, ..., g_L], each g shaped [..., K]."""
    D = x.shape[-1]
    if gate not in ("scalar", "channel"):
        raise ValueError(f"gate {gate!r}")
    K = 1 if gate == "scalar" else D
    h = x  # h_1 = v_0
    hs = [h]
    gs = [x.new_ones(*x.shape[:-1], K)]  # g_0 = 1
    for ell, f in enumerate(sublayers, start=1):
        W = params[f"mixers.{ell - 1}.weight"].reshape(K, D)
        b = params[f"mixers.{ell - 1}.bias"].reshape(K)
        u = _norm(h, eps)  # norm(h_l)
        gates = []
        for c in range(K):
            gates.append(torch.sigmoid((W[c] * u).sum(dim=-1) + b[c]))  # σ(W_l norm(h_l) + b_l), entry c
        g = torch.stack(gates, dim=-1)  # g_l
        v = f(h)  # v_l = f_l(h_l)
        h = (1 - g) * h + g * v  # h_{l+1} = (1 − g_l) ⊙ h_l + g_l ⊙ v_l
        hs.append(h)
        gs.append(g)
    return hs, gs


def inputs(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    gate: str = "scalar",
    bias: float = -2.0,
    eps: float = 1e-6,
) -> list[torch.Tensor]:
    """[h_1, ..., h_{L+1}], each shaped like x."""
    hs, _ = _run(x, sublayers, params, gate, eps)
    return hs


def matrix(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    gate: str = "scalar",
    bias: float = -2.0,
    eps: float = 1e-6,
) -> torch.Tensor:
    """M as [..., L+1, L+1] (scalar) or [..., D, L+1, L+1] (channel)."""
    L = len(sublayers)
    _, gs = _run(x, sublayers, params, gate, eps)
    if gate == "scalar":
        gs = [g.squeeze(-1) for g in gs]
    rows = []
    for ell in range(1, L + 2):
        row = []
        for i in range(L + 1):
            if i >= ell:
                row.append(torch.zeros_like(gs[0]))
                continue
            weight = gs[i]  # g_i
            for j in range(i + 1, ell):
                weight = weight * (1 - gs[j])  # ∏_{j=i+1}^{l−1} (1 − g_j)
            row.append(weight)  # M_{i→l}
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=-2)
