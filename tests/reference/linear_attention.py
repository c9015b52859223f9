"""linear_attention in plain loops: linear attention over depth with a state S of r rows of width D.

Axes: L sublayers f_1 ... f_L; l a row (1 ... L+1, the last is the head's); s, i, j sources (0 the embedding, s >= 1
the output of sublayer s); n a token (the flattened leading shape); a a row of the state (0 ... r-1); D the width.

For one token, with u_s = norm(v_s) and psi the identity or phi(u) = elu(u) + 1:

    k_s = psi(K_s u_s + b_s)                                              [r]
    plain:  S <- S + k_s v_s^T
    gated:  g_s = sigmoid(G_s u_s + c_s),   S <- diag(g_s) S + k_s v_s^T          (no g_0: S is zero before v_0)
    delta:  k_s <- k_s / sqrt(<k_s, k_s> + eps),   beta_s = 2 sigmoid(<w_s, u_s> + d_s)
            S <- S + beta_s k_s (v_s - S^T k_s)^T
    gated_delta:  k_s and beta_s as in delta,   g_s = sigmoid(<gw_s, u_s> + c_s), a number   (no g_0)
            S <- g_s S + beta_s k_s (v_s - g_s S^T k_s)^T
    h_1 = v_0,   h_l = psi(q_l)^T S                                       l >= 2, S holding v_0 ... v_{l-1}
    normalize:  z <- z + k_s (gated: z <- g_s * z + k_s),   h_l = psi(q_l)^T S / psi(q_l)^T z

Closed form, Q holding psi(q_l) and K the keys as rows; row 1 is 1, and for l >= 2, i < l:

    plain:  M_{i->l} = psi(q_l) . k_i
    gated:  M_{i->l} = psi(q_l)^T (prod_{j=i+1}^{l-1} diag g_j) k_i
    delta:  M = mask(Q K^T) (I + strict_tril(diag(beta) K K^T))^{-1} diag(beta),   mask keeps i < l
    gated_delta:  M_{i->l} = psi(q_l)^T (prod_{j=i+1}^{l-1} g_j (I - beta_j k_j k_j^T)) beta_i k_i, newest j leftmost
    normalize:  M_{i->l} / sum_i M_{i->l}
"""

import torch
from torch import Tensor


def _norm(v: Tensor, eps: float) -> Tensor:
    """norm(v) = v / sqrt(mean(v^2) + eps)."""
    return v / torch.sqrt(torch.mean(v * v) + eps)


def _psi(u: Tensor, feature_map: str) -> Tensor:
    """identity: u; elu1: phi(u) = elu(u) + 1."""
    return torch.nn.functional.elu(u) + 1 if feature_map == "elu1" else u


def _tokens(t: Tensor) -> list[Tensor]:
    """[..., D] -> the list of its tokens, each [D]."""
    flat = t.reshape(-1, t.shape[-1])
    return [flat[n] for n in range(flat.shape[0])]


def _join(tokens: list[Tensor], x: Tensor) -> Tensor:
    """A list of tokens, each [D], -> a tensor shaped like x."""
    return torch.stack(tokens).reshape(x.shape) if tokens else x


def _check(rank: int, rule: str, feature_map: str, normalize: bool) -> None:
    if rank < 1:
        raise ValueError(f"rank {rank}")
    if rule not in ("plain", "gated", "delta", "gated_delta"):
        raise ValueError(f"rule {rule!r}")
    if feature_map not in ("identity", "elu1"):
        raise ValueError(f"feature_map {feature_map!r}")
    if normalize and (feature_map != "elu1" or rule in ("delta", "gated_delta")):
        raise ValueError("normalize needs elu1 and a rule without delta")


def _source_parameter(s: int, name: str, params: dict[str, Tensor]) -> Tensor:
    """The parameter of source s: s = 0 is the embedding's, held by sublayer 1."""
    return params[f"mixers.0.embedding_{name}"] if s == 0 else params[f"mixers.{s - 1}.{name}"]


def _key(s: int, v: Tensor, params: dict[str, Tensor], rule: str, feature_map: str, eps: float) -> Tensor:
    """k_s [r] of one token's source v_s [D]."""
    K, b = _source_parameter(s, "key_proj", params), _source_parameter(s, "key_bias", params)
    k = _psi(K @ _norm(v, eps) + b, feature_map)  # k_s = psi(K_s u_s + b_s)
    if rule in ("delta", "gated_delta"):
        k = k / torch.sqrt(torch.dot(k, k) + eps)  # k_s <- k_s / sqrt(<k_s, k_s> + eps)
    return k


def _gate(s: int, v: Tensor, params: dict[str, Tensor], eps: float) -> Tensor:
    """g_s [r] of one token's source v_s [D], s >= 1."""
    G, c = params[f"mixers.{s - 1}.gate_proj"], params[f"mixers.{s - 1}.gate_bias"]
    return torch.sigmoid(G @ _norm(v, eps) + c)  # g_s = sigmoid(G_s u_s + c_s)


def _one_gate(s: int, v: Tensor, params: dict[str, Tensor], eps: float) -> Tensor:
    """g_s [] of one token's source v_s [D]; 1 for the embedding, before which S is zero."""
    if s == 0:
        return v.new_ones(())
    w, c = params[f"mixers.{s - 1}.gate_weight"], params[f"mixers.{s - 1}.gate_bias"][0]
    return torch.sigmoid(torch.dot(w, _norm(v, eps)) + c)  # g_s = sigmoid(<gw_s, u_s> + c_s)


def _beta(s: int, v: Tensor, params: dict[str, Tensor], eps: float) -> Tensor:
    """beta_s [] of one token's source v_s [D]."""
    w, d = _source_parameter(s, "beta_weight", params), _source_parameter(s, "beta_bias", params)[0]
    return 2 * torch.sigmoid(torch.dot(w, _norm(v, eps)) + d)  # beta_s = 2 sigmoid(<w_s, u_s> + d_s)


def _query(layer: int, n_sublayers: int, params: dict[str, Tensor], feature_map: str) -> Tensor:
    """psi(q_l) [r], l >= 2."""
    return _psi(params["out.query" if layer == n_sublayers + 1 else f"mixers.{layer - 1}.query"], feature_map)


def _run(
    x: Tensor,
    sublayers: list,
    params: dict[str, Tensor],
    rank: int,
    rule: str,
    feature_map: str,
    normalize: bool,
    eps: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """[h_1 ... h_{L+1}] and [v_0 ... v_L], each shaped like x."""
    n_sublayers = len(sublayers)
    n_tokens = len(_tokens(x))
    # S[n][a] in R^D is the row a of the state of token n, z[n][a] its normaliser.
    S = [[torch.zeros_like(v_0) for _ in range(rank)] for v_0 in _tokens(x)]
    z = [[x.new_zeros(()) for _ in range(rank)] for _ in range(n_tokens)]

    def write(s: int, source: Tensor) -> None:
        for n, v in enumerate(_tokens(source)):
            k = _key(s, v, params, rule, feature_map, eps)
            if rule == "plain" or (rule == "gated" and s == 0):
                S[n] = [S[n][a] + k[a] * v for a in range(rank)]  # S <- S + k_s v_s^T
                z[n] = [z[n][a] + k[a] for a in range(rank)]  # z <- z + k_s
            elif rule == "gated":
                g = _gate(s, v, params, eps)
                S[n] = [g[a] * S[n][a] + k[a] * v for a in range(rank)]  # S <- diag(g_s) S + k_s v_s^T
                z[n] = [g[a] * z[n][a] + k[a] for a in range(rank)]  # z <- g_s * z + k_s
            elif rule == "gated_delta":
                g, beta = _one_gate(s, v, params, eps), _beta(s, v, params, eps)
                Sk = sum(k[a] * S[n][a] for a in range(rank))  # S^T k_s
                # S <- g_s S + beta_s k_s (v_s - g_s S^T k_s)^T
                S[n] = [g * S[n][a] + beta * k[a] * (v - g * Sk) for a in range(rank)]
            else:
                beta = _beta(s, v, params, eps)
                Sk = sum(k[a] * S[n][a] for a in range(rank))  # S^T k_s
                S[n] = [S[n][a] + beta * k[a] * (v - Sk) for a in range(rank)]  # S <- S + beta_s k_s (v_s - S^T k_s)^T

    def read(layer: int) -> Tensor:
        q = _query(layer, n_sublayers, params, feature_map)
        tokens = []
        for n in range(n_tokens):
            h_n = sum(q[a] * S[n][a] for a in range(rank))  # psi(q_l)^T S
            if normalize:
                h_n = h_n / sum(q[a] * z[n][a] for a in range(rank))  # psi(q_l)^T S / psi(q_l)^T z
            tokens.append(h_n)
        return _join(tokens, x)

    hs, vs = [x], [x]  # h_1 = v_0
    for layer in range(1, n_sublayers + 1):
        vs.append(sublayers[layer - 1](hs[layer - 1]))  # v_l = f_l(h_l)
        if layer == 1:
            write(0, vs[0])
        write(layer, vs[layer])
        hs.append(read(layer + 1))
    return hs, vs


def inputs(
    x: Tensor,
    sublayers: list,
    params: dict[str, Tensor],
    *,
    rank: int = 4,
    rule: str = "plain",
    feature_map: str = "identity",
    normalize: bool = False,
    eps: float = 1e-6,
) -> list[Tensor]:
    """[h_1, ..., h_{L+1}], each shaped like x."""
    _check(rank, rule, feature_map, normalize)
    return _run(x, sublayers, params, rank, rule, feature_map, normalize, eps)[0]


def _rows_plain(q: dict[int, Tensor], k: list[Tensor]) -> dict[int, list[Tensor]]:
    """M_{i->l} = psi(q_l) . k_i."""
    return {layer: [torch.dot(q_l, k[i]) for i in range(layer)] for layer, q_l in q.items()}


def _rows_gated(q: dict[int, Tensor], k: list[Tensor], g: dict[int, Tensor]) -> dict[int, list[Tensor]]:
    """M_{i->l} = psi(q_l)^T (prod_{j=i+1}^{l-1} diag g_j) k_i."""
    rows: dict[int, list[Tensor]] = {}
    for layer, q_l in q.items():
        rows[layer] = []
        for i in range(layer):
            carry = torch.ones_like(k[i])
            for j in range(i + 1, layer):
                carry = carry * g[j]  # prod_{j=i+1}^{l-1} g_j
            rows[layer].append(torch.dot(q_l, carry * k[i]))
    return rows


def _rows_delta(q: dict[int, Tensor], k: list[Tensor], beta: list[Tensor]) -> dict[int, list[Tensor]]:
    """M = mask(Q K^T) (I + strict_tril(diag(beta) K K^T))^{-1} diag(beta), its rows l >= 2."""
    K = torch.stack(k)  # [L+1, r]
    B = torch.diag(torch.stack(beta))  # diag(beta)
    eye = torch.eye(len(k), dtype=K.dtype, device=K.device)
    lower = eye + torch.tril(B @ K @ K.T, diagonal=-1)  # I + strict_tril(diag(beta) K K^T)
    solved = torch.linalg.solve_triangular(lower, B, upper=False)  # (...)^{-1} diag(beta)
    zero = K.new_zeros(())
    rows = {}
    for layer, q_l in q.items():
        masked = torch.stack([torch.dot(q_l, k[i]) if i < layer else zero for i in range(len(k))])  # mask(Q K^T)
        product = masked @ solved
        rows[layer] = [product[i] for i in range(layer)]
    return rows


def _rows_gated_delta(
    q: dict[int, Tensor], k: list[Tensor], beta: list[Tensor], g: list[Tensor]
) -> dict[int, list[Tensor]]:
    """M_{i->l} = psi(q_l)^T (prod_{j=i+1}^{l-1} g_j (I - beta_j k_j k_j^T)) beta_i k_i."""
    rows: dict[int, list[Tensor]] = {}
    for layer, q_l in q.items():
        rows[layer] = []
        for i in range(layer):
            carried = beta[i] * k[i]
            for j in range(i + 1, layer):  # the newest factor comes last, so it stands on the left
                carried = g[j] * (carried - beta[j] * torch.dot(k[j], carried) * k[j])
            rows[layer].append(torch.dot(q_l, carried))
    return rows


def matrix(
    x: Tensor,
    sublayers: list,
    params: dict[str, Tensor],
    *,
    rank: int = 4,
    rule: str = "plain",
    feature_map: str = "identity",
    normalize: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """M [..., L+1, L+1]: row l-1, column i holds M_{i->l}; from its closed form."""
    _check(rank, rule, feature_map, normalize)
    n_sublayers = len(sublayers)
    shape = (*x.shape[:-1], n_sublayers + 1, n_sublayers + 1)
    _, vs = _run(x, sublayers, params, rank, rule, feature_map, normalize, eps)
    sources = [_tokens(v) for v in vs]  # sources[i][n] = v_i of token n
    q = {layer: _query(layer, n_sublayers, params, feature_map) for layer in range(2, n_sublayers + 2)}
    zero, one = x.new_zeros(()), x.new_ones(())

    entries = []
    for n in range(len(_tokens(x))):
        rows = {}
        if n_sublayers > 0:
            k = [_key(s, sources[s][n], params, rule, feature_map, eps) for s in range(n_sublayers + 1)]
            if rule == "plain":
                rows = _rows_plain(q, k)
            elif rule == "gated":
                rows = _rows_gated(q, k, {s: _gate(s, sources[s][n], params, eps) for s in range(1, n_sublayers + 1)})
            else:
                beta = [_beta(s, sources[s][n], params, eps) for s in range(n_sublayers + 1)]
                if rule == "delta":
                    rows = _rows_delta(q, k, beta)
                else:
                    g = [_one_gate(s, sources[s][n], params, eps) for s in range(n_sublayers + 1)]
                    rows = _rows_gated_delta(q, k, beta, g)
            if normalize:
                rows = {layer: [m / sum(row) for m in row] for layer, row in rows.items()}  # divided by the row's sum
        rows[1] = [one]  # row 1 is 1
        for layer in range(1, n_sublayers + 2):
            entries.extend(rows[layer][i] if i < layer else zero for i in range(n_sublayers + 1))
    return torch.stack(entries).reshape(shape) if entries else x.new_zeros(shape)
