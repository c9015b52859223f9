"""Hyper-Connections, static and dynamic.

Axes: ... leading shape (tokens), D width, m streams, L sublayers; rows l = 1 … L+1 and sources i = 0 … L.

    norm(v) = v / sqrt(mean(v²) + eps)
    H = m copies of v_0
    h_1 = H[0] = v_0,    h_l = Σ_j A_m[j] H[j]    for 2 ≤ l ≤ L
    H[i] ← Σ_j A_r[j, i] H[j] + B[i] v_l,    v_l = f_l(h_l)
    h_{L+1} = Σ_j r[j] H[j]

Static coefficients: A_m = alpha_m, A_r = alpha_r, B = beta. Dynamic ones, from the H that sublayer l finds,
with G[j] = norm_weight ⊙ norm(H[j]) (and without the tanh where tanh=False):

    A_m[j]    = alpha_m[j]    + s_a · tanh(G[j] · w_m)
    A_r[j, i] = alpha_r[j, i] + s_a · tanh(G[j] · w_r[:, i])
    B[j]      = beta[j]       + s_b · tanh(G[j] · w_b)

transition="identity": A_r = I. Readout r: 1/m (mean), 1 (sum), a parameter (learned).

    M_{i→l} = A_m,lᵀ A_r,l−1ᵀ … A_r,i+1ᵀ B_i,    B_0 = ones, r in the place of A_m,L+1,    M_{0→1} = 1

Without sublayers the head's row is row 1: h_1 = v_0.
"""

import torch


def _norm(v: torch.Tensor, eps: float) -> torch.Tensor:
    return v / torch.sqrt((v * v).mean(dim=-1, keepdim=True) + eps)


def _coefficients(
    H: list[torch.Tensor],
    ell: int,
    params: dict[str, torch.Tensor],
    dynamic: bool,
    transition: str,
    tanh: bool,
    eps: float,
) -> tuple[list[torch.Tensor] | None, list[list[torch.Tensor]], list[torch.Tensor]]:
    """A_m[j] (None for l = 1), A_r[j][i] and B[j] of sublayer l, every entry shaped [...]."""
    m, D, lead = len(H), H[0].shape[-1], H[0].shape[:-1]
    reads = ell >= 2
    full = transition == "full"

    def param(name: str, *shape: int) -> torch.Tensor:
        return params[f"mixers.{ell - 1}.{name}"].reshape(shape)

    A_m = None
    if reads:
        alpha_m = param("alpha_m", m)
        A_m = [alpha_m[j].expand(lead) for j in range(m)]
    if full:
        alpha_r = param("alpha_r", m, m)
        A_r = [[alpha_r[j, i].expand(lead) for i in range(m)] for j in range(m)]
    else:
        A_r = [[H[0].new_ones(lead) if i == j else H[0].new_zeros(lead) for i in range(m)] for j in range(m)]
    beta = param("beta", m)
    B = [beta[j].expand(lead) for j in range(m)]
    if not dynamic:
        return A_m, A_r, B

    def dot(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (a * w).sum(dim=-1)

    def squash(u: torch.Tensor) -> torch.Tensor:
        return torch.tanh(u) if tanh else u

    norm_weight = param("norm_weight", D)
    G = [norm_weight * _norm(H[j], eps) for j in range(m)]  # G[j] = norm_weight ⊙ norm(H[j])
    if reads:
        s_a, w_m = param("s_a"), param("w_m", D)
        A_m = [A_m[j] + s_a * squash(dot(G[j], w_m)) for j in range(m)]
    if full:
        s_a, w_r = param("s_a"), param("w_r", D, m)
        A_r = [[A_r[j][i] + s_a * squash(dot(G[j], w_r[:, i])) for i in range(m)] for j in range(m)]
    s_b, w_b = param("s_b"), param("w_b", D)
    B = [B[j] + s_b * squash(dot(G[j], w_b)) for j in range(m)]
    return A_m, A_r, B


def _readout(x: torch.Tensor, params: dict[str, torch.Tensor], m: int, readout: str) -> list[torch.Tensor]:
    """r[j], every entry shaped []."""
    if readout == "mean":
        return [x.new_ones(()) / m for _ in range(m)]
    if readout == "sum":
        return [x.new_ones(()) for _ in range(m)]
    if readout == "learned":
        r = params["out.readout"].reshape(m)
        return [r[j] for j in range(m)]
    raise ValueError(f"readout {readout!r}")


def _run(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    streams: int,
    dynamic: bool,
    transition: str,
    readout: str,
    tanh: bool,
    eps: float,
) -> tuple[list[torch.Tensor], list[tuple]]:
    """[h_1, ..., h_{L+1}] and the coefficients (A_m, A_r, B) of the sublayers 1 … L."""
    m = streams
    if transition not in ("full", "identity"):
        raise ValueError(f"transition {transition!r}")
    if not sublayers:
        return [x], []
    H = [x for _ in range(m)]  # m copies of v_0
    hs, coefficients = [], []
    for ell, f in enumerate(sublayers, start=1):
        A_m, A_r, B = _coefficients(H, ell, params, dynamic, transition, tanh, eps)
        if ell == 1:
            h = H[0]  # h_1 = H[0] = v_0
        else:
            h = torch.zeros_like(x)
            for j in range(m):
                h = h + A_m[j].unsqueeze(-1) * H[j]  # h_l = Σ_j A_m[j] H[j]
        v = f(h)  # v_l = f_l(h_l)
        H_new = []
        for i in range(m):
            H_i = B[i].unsqueeze(-1) * v
            for j in range(m):
                H_i = H_i + A_r[j][i].unsqueeze(-1) * H[j]  # H[i] ← Σ_j A_r[j, i] H[j] + B[i] v_l
            H_new.append(H_i)
        H = H_new
        hs.append(h)
        coefficients.append((A_m, A_r, B))
    r = _readout(x, params, m, readout)
    h = torch.zeros_like(x)
    for j in range(m):
        h = h + r[j] * H[j]  # h_{L+1} = Σ_j r[j] H[j]
    hs.append(h)
    return hs, coefficients


def inputs(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    streams: int = 4,
    dynamic: bool = True,
    transition: str = "full",
    readout: str = "mean",
    start: str = "hyper",
    output_scale: float | None = None,
    tanh: bool = True,
    eps: float = 1e-6,
) -> list[torch.Tensor]:
    """[h_1, ..., h_{L+1}], each shaped like x. (`start` and `output_scale` decide only where parameters start.)"""
    hs, _ = _run(x, sublayers, params, streams, dynamic, transition, readout, tanh, eps)
    return hs


def matrix(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    streams: int = 4,
    dynamic: bool = True,
    transition: str = "full",
    readout: str = "mean",
    start: str = "hyper",
    output_scale: float | None = None,
    tanh: bool = True,
    eps: float = 1e-6,
) -> torch.Tensor:
    """M as [..., L+1, L+1]. (`start` and `output_scale` decide only where parameters start.)"""
    L, m, lead = len(sublayers), streams, x.shape[:-1]
    _, coefficients = _run(x, sublayers, params, streams, dynamic, transition, readout, tanh, eps)

    # read[l] and write[i] are [..., m], T[k] is [..., m, m] with T[k][j, i] = A_r,k[j, i].
    read, T = {}, {}
    write = {0: x.new_ones(*lead, m)}  # B_0 = ones
    for ell, (A_m, A_r, B) in enumerate(coefficients, start=1):
        if ell >= 2:
            read[ell] = torch.stack(A_m, dim=-1)  # A_m,l
        T[ell] = torch.stack([torch.stack(A_r[j], dim=-1) for j in range(m)], dim=-2)  # A_r,l
        write[ell] = torch.stack(B, dim=-1)  # B_l
    if L >= 1:
        read[L + 1] = torch.stack(_readout(x, params, m, readout)).expand(*lead, m)  # r

    eye = torch.eye(m, dtype=x.dtype, device=x.device)
    rows = []
    for ell in range(1, L + 2):
        row = []
        for i in range(L + 1):
            if i >= ell:
                row.append(x.new_zeros(lead))
                continue
            if ell == 1:
                row.append(x.new_ones(lead))  # M_{0→1} = 1
                continue
            P = eye
            for k in range(ell - 1, i, -1):
                P = P @ T[k].transpose(-1, -2)  # A_r,l−1ᵀ … A_r,i+1ᵀ
            row.append((read[ell].unsqueeze(-2) @ P @ write[i].unsqueeze(-1)).squeeze(-1).squeeze(-1))  # A_m,lᵀ P B_i
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=-2)
