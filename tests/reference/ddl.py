"""Deep Delta Learning: a matrix state over depth, written by the delta rule along each sublayer's output.

Axes: ... leading shape (tokens), D width, V values of the state, L sublayers;
rows l = 1 … L+1 (the last is the head), sources i = 0 … L (0 is the embedding), j = 0 … V−1.

    norm(v) = v / sqrt(mean(v²) + eps)
    X[j] = v_0    for every j                                 rows X[j] of length D
    h_l = Σ_j r_l[j] X[j]                                     r_l = 1/V with V = 1 and at l = 1
    c_l = norm(h_l)
    β_l = 2 σ(⟨w_l, c_l⟩ + b_l)                               one number per token
    p_l = W_l in_l (+ a_l with target_bias)                   in_l = c_l ("normed") or h_l ("read"); [V]
    val_l = p_l, or s σ(p_l) with target_bound = s
    y_l = f_l(h_l)
    k_l = y_l / (‖y_l‖ + key_eps)                             key_norm="l2"
        = y_l / sqrt(‖y_l‖² + key_eps²)                       key_norm="l2_squared"
        = y_l / sqrt(‖y_l‖² + D key_eps)                      key_norm="rms"
    X[j] ← X[j] + β_l (val_l[j] − ⟨X[j], k_l⟩) k_l

    A_l = I − β_l k_l k_lᵀ                                    [D, D]
    T_{i→l} = A_{l−1} … A_{i+1}    for i < l, with T_{l−1→l} = I
    contribution of 0 to row l:     (Σ_j r_l[j]) T_{0→l} v_0
    contribution of i ≥ 1 to row l: Σ_j r_l[j] T_{i→l} (β_i val_i[j] k_i)
    read-out matrix: k_lᵀ T_{i→l} k_i    for 1 ≤ i < l ≤ L

At y = 0 the derivatives of ‖y‖ count as 0, so k = 0 there and its derivative is I/key_eps with "l2".
The option beta is the start of b_l only: the values themselves are in params. Squares are taken as they are:
in float64 that is right for outputs of size 1e-150 to 1e150.
"""

import torch


def _norm(v: torch.Tensor, eps: float) -> torch.Tensor:
    return v / torch.sqrt((v * v).mean(dim=-1, keepdim=True) + eps)


def _key(y: torch.Tensor, key_norm: str, key_eps: float) -> torch.Tensor:
    """k of one token's output y [D]."""
    D = y.shape[-1]
    squares = (y * y).sum()  # ‖y‖²
    if key_norm == "l2":
        if squares == 0:
            return y / key_eps  # ‖y‖ and its derivatives are 0
        return y / (torch.sqrt(squares) + key_eps)
    if key_norm == "l2_squared":
        return y / torch.sqrt(squares + key_eps**2)
    if key_norm == "rms":
        return y / torch.sqrt(squares + D * key_eps)
    raise ValueError(f"key_norm {key_norm!r}")


def _join(tokens: list[torch.Tensor], x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """One tensor [..., *shape] of the tokens' tensors, with the leading shape of x."""
    if not tokens:
        return x.new_zeros(*x.shape[:-1], *shape)
    return torch.stack(tokens).reshape(*x.shape[:-1], *shape)


def _run(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    value_width: int,
    key_norm: str,
    key_eps: float,
    target_input: str,
    target_bias: bool,
    target_bound: float | None,
    eps: float,
) -> tuple[list, list, list, list, list]:
    """hs = [h_1, ..., h_{L+1}] shaped like x, rs = [r_1, ..., r_{L+1}] of shape [V], and, by sublayer and
    token, betas[l−1][t] of shape [], keys[l−1][t] of shape [D], vals[l−1][t] of shape [V]."""
    D = x.shape[-1]
    V = value_width
    L = len(sublayers)
    if target_input not in ("normed", "read"):
        raise ValueError(f"target_input {target_input!r}")
    embedding = x.reshape(-1, D)
    N = embedding.shape[0]  # tokens
    X = []
    for t in range(N):
        X.append([embedding[t] for _ in range(V)])  # V copies of v_0
    hs, rs, betas, keys, vals = [], [], [], [], []
    for ell in range(1, L + 2):
        if V == 1 or (ell == 1 and L >= 1):
            r = x.new_ones(V) / V
        elif ell <= L:
            r = params[f"mixers.{ell - 1}.readout"].reshape(V)
        else:
            r = params["out.readout"].reshape(V)
        reads = []
        for t in range(N):
            h_t = torch.zeros_like(embedding[t])
            for j in range(V):
                h_t = h_t + r[j] * X[t][j]  # h_l = Σ_j r_l[j] X[j]
            reads.append(h_t)
        h = _join(reads, x, (D,))
        hs.append(h)
        rs.append(r)
        if ell == L + 1:
            break

        w = params[f"mixers.{ell - 1}.beta_weight"].reshape(D)
        b = params[f"mixers.{ell - 1}.beta_bias"].reshape(())
        W = params[f"mixers.{ell - 1}.value_weight"].reshape(V, D)
        y = sublayers[ell - 1](h).reshape(-1, D)  # y_l = f_l(h_l)
        betas_l, keys_l, vals_l = [], [], []
        for t in range(N):
            c = _norm(reads[t], eps)  # c_l
            beta = 2 * torch.sigmoid((w * c).sum() + b)  # β_l
            source = c if target_input == "normed" else reads[t]  # in_l
            k = _key(y[t], key_norm, key_eps)  # k_l
            val = []
            for j in range(V):
                p = (W[j] * source).sum()  # p_l[j]
                if target_bias:
                    p = p + params[f"mixers.{ell - 1}.value_bias"].reshape(V)[j]
                val.append(p if target_bound is None else target_bound * torch.sigmoid(p))  # val_l[j]
                # X[j] ← X[j] + β_l (val_l[j] − ⟨X[j], k_l⟩) k_l
                X[t][j] = X[t][j] + beta * (val[j] - (X[t][j] * k).sum()) * k
            betas_l.append(beta)
            keys_l.append(k)
            vals_l.append(torch.stack(val))
        betas.append(betas_l)
        keys.append(keys_l)
        vals.append(vals_l)
    return hs, rs, betas, keys, vals


def _operator(i: int, ell: int, t: int, betas: list, keys: list, x: torch.Tensor) -> torch.Tensor:
    """T_{i→l} [D, D] of token t."""
    D = x.shape[-1]
    eye = torch.eye(D, dtype=x.dtype, device=x.device)
    T = eye  # T_{l−1→l} = I
    for m in range(i + 1, ell):
        k = keys[m - 1][t]
        A = eye - betas[m - 1][t] * torch.outer(k, k)  # A_m = I − β_m k_m k_mᵀ
        T = A @ T  # later sublayers act from the left
    return T


def inputs(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    value_width: int = 1,
    beta: float = 1.0,
    key_norm: str = "l2",
    key_eps: float = 1e-10,
    target_input: str = "normed",
    target_bias: bool = False,
    target_bound: float | None = None,
    eps: float = 1e-6,
) -> list[torch.Tensor]:
    """[h_1, ..., h_{L+1}], each shaped like x."""
    hs, _, _, _, _ = _run(
        x, sublayers, params, value_width, key_norm, key_eps, target_input, target_bias, target_bound, eps
    )
    return hs


def contributions(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    value_width: int = 1,
    beta: float = 1.0,
    key_norm: str = "l2",
    key_eps: float = 1e-10,
    target_input: str = "normed",
    target_bias: bool = False,
    target_bound: float | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """[L+1, L+1, ..., D]: entry [l−1, i] is the contribution of source i to row l, zero for i ≥ l."""
    D = x.shape[-1]
    V = value_width
    L = len(sublayers)
    _, rs, betas, keys, vals = _run(
        x, sublayers, params, value_width, key_norm, key_eps, target_input, target_bias, target_bound, eps
    )
    embedding = x.reshape(-1, D)
    N = embedding.shape[0]
    rows = []
    for ell in range(1, L + 2):
        r = rs[ell - 1]
        row = []
        for i in range(L + 1):
            tokens = []
            for t in range(N):
                total = torch.zeros_like(embedding[t])
                if i < ell:
                    T = _operator(i, ell, t, betas, keys, x)
                    for j in range(V):
                        if i == 0:
                            written = embedding[t]  # v_0
                        else:
                            written = betas[i - 1][t] * vals[i - 1][t][j] * keys[i - 1][t]  # β_i val_i[j] k_i
                        total = total + r[j] * (T @ written)  # Σ_j r_l[j] T_{i→l} (…)
                tokens.append(total)
            row.append(_join(tokens, x, (D,)))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def readout_matrix(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    value_width: int = 1,
    beta: float = 1.0,
    key_norm: str = "l2",
    key_eps: float = 1e-10,
    target_input: str = "normed",
    target_bias: bool = False,
    target_bound: float | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """[..., L, L+1]: entry [l−1, i] is k_lᵀ T_{i→l} k_i for 1 ≤ i < l ≤ L, zero elsewhere."""
    D = x.shape[-1]
    L = len(sublayers)
    _, _, betas, keys, _ = _run(
        x, sublayers, params, value_width, key_norm, key_eps, target_input, target_bias, target_bound, eps
    )
    if L == 0:
        return x.new_zeros(*x.shape[:-1], 0, 1)
    tokens = []
    for t in range(x.reshape(-1, D).shape[0]):
        rows = []
        for ell in range(1, L + 1):
            row = []
            for i in range(L + 1):
                if 1 <= i < ell:
                    T = _operator(i, ell, t, betas, keys, x)
                    row.append((keys[ell - 1][t] * (T @ keys[i - 1][t])).sum())  # k_lᵀ T_{i→l} k_i
                else:
                    row.append(x.new_zeros(()))
            rows.append(torch.stack(row))
        tokens.append(torch.stack(rows))
    return _join(tokens, x, (L, L + 1))
