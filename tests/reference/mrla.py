"""Multi-head Recurrent Layer Attention, causal and token-local, token by token in plain loops.

Axes: x is [..., D]; a token is one row of x.reshape(N, D). Heads are D / d_h runs of d_h neighbouring channels.
gamma_l, lambda_l, wq_l, wk_l, a_s spread over the channels, alpha_{s->l} spread over the channels: [D].

    u_s = norm(v_s)
    x_l = sum_{i<l} v_i
    h_1 = v_0
    h_l = x_l + gamma_l * o_l                                                         l >= 2

light:
    a_s = sigmoid(<wq_s * u_s, wk_s * u_s>_head / sqrt(d_h))                          s >= 0
    o_1 = a_0 * v_0
    o_l = lambda_{l-1} * o_{l-1} + a_{l-1} * v_{l-1}                                  l >= 2
    M_{i->l} = 1 + gamma_l * a_i * prod_{j=i+1}^{l-1} lambda_j                        l >= 2

base:
    alpha_{s->l} = softmax_{s<l}(<wq_l * u_{l-1}, wk_s * u_s>_head / sqrt(d_h))       l >= 2
    o_l = sum_{s<l} alpha_{s->l} * v_s
    M_{i->l} = 1 + gamma_l * alpha_{i->l}                                             l >= 2

and M_{0->1} = 1 in both. wq_0 (light) and wk_0 belong to sublayer 1; in base wq_l belongs to the reader.
"""

import math

import torch


def _norm(v: torch.Tensor, eps: float) -> torch.Tensor:
    """v / sqrt(mean(v^2) + eps) of one vector."""
    return v / torch.sqrt((v * v).mean() + eps)


def _scores(q: torch.Tensor, k: torch.Tensor, d_h: int) -> list[torch.Tensor]:
    """<q, k>_head / sqrt(d_h), one scalar for each head."""
    scores = []
    for start in range(0, q.shape[0], d_h):
        head = slice(start, start + d_h)
        scores.append((q[head] * k[head]).sum() / math.sqrt(d_h))
    return scores


def _spread(per_head: list[torch.Tensor], d_h: int) -> torch.Tensor:
    """[D] from one scalar for each head, the same on all channels of the head."""
    return torch.stack([value for value in per_head for _ in range(d_h)])


def _reader(ell: int, L: int) -> str:
    """Owner of the read-side parameters of row l."""
    return f"mixers.{ell - 1}" if ell <= L else "out"


def _wk(params: dict[str, torch.Tensor], s: int) -> torch.Tensor:
    return params["mixers.0.embedding_k_weight"] if s == 0 else params[f"mixers.{s - 1}.k_weight"]


def _wq_light(params: dict[str, torch.Tensor], s: int) -> torch.Tensor:
    return params["mixers.0.embedding_q_weight"] if s == 0 else params[f"mixers.{s - 1}.q_weight"]


def _a(v_s: torch.Tensor, s: int, params: dict[str, torch.Tensor], d_h: int, eps: float) -> torch.Tensor:
    """a_s [D] of one token (light)."""
    u_s = _norm(v_s, eps)
    scores = _scores(_wq_light(params, s) * u_s, _wk(params, s) * u_s, d_h)
    return _spread([torch.sigmoid(score) for score in scores], d_h)


def _alpha(
    v: list[torch.Tensor], ell: int, L: int, params: dict[str, torch.Tensor], d_h: int, eps: float
) -> list[torch.Tensor]:
    """[alpha_{0->l}, ..., alpha_{l-1->l}], each [D], of one token with sources v_0 ... v_{l-1} (base)."""
    u = [_norm(v_s, eps) for v_s in v]
    query = params[f"{_reader(ell, L)}.q_weight"] * u[ell - 1]  # wq_l * u_{l-1}
    scores = [_scores(query, _wk(params, s) * u[s], d_h) for s in range(ell)]  # [source][head]
    heads = len(scores[0])
    weights = [torch.softmax(torch.stack([scores[s][head] for s in range(ell)]), dim=0) for head in range(heads)]
    return [_spread([weights[head][s] for head in range(heads)], d_h) for s in range(ell)]


def _head_dim(x: torch.Tensor, form: str, head_dim: int | None) -> int:
    if form not in ("light", "base"):
        raise ValueError(form)
    d_h = math.gcd(x.shape[-1], 32) if head_dim is None else head_dim
    if x.shape[-1] % d_h:
        raise ValueError(head_dim)
    return d_h


def _run(
    x: torch.Tensor, sublayers: list, params: dict[str, torch.Tensor], form: str, d_h: int, eps: float
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """The reads h_1 ... h_{L+1}, and the sources v[n][i] of each token n."""
    L, D = len(sublayers), x.shape[-1]
    N = math.prod(x.shape[:-1])
    tokens = x.reshape(N, D)
    v = [[tokens[n]] for n in range(N)]
    o = [None] * N
    h = []
    for ell in range(1, L + 2):
        h_l = []
        for n in range(N):
            if ell == 1:
                if form == "light" and L > 0:
                    o[n] = _a(v[n][0], 0, params, d_h, eps) * v[n][0]  # o_1 = a_0 v_0
                h_l.append(v[n][0])  # h_1 = v_0
                continue
            x_l = sum(v[n][i] for i in range(ell))
            if form == "light":
                decay = params[f"mixers.{ell - 2}.decay"]  # lambda_{l-1}
                o[n] = decay * o[n] + _a(v[n][ell - 1], ell - 1, params, d_h, eps) * v[n][ell - 1]
            else:
                alpha = _alpha(v[n], ell, L, params, d_h, eps)
                o[n] = sum(alpha[s] * v[n][s] for s in range(ell))
            h_l.append(x_l + params[f"{_reader(ell, L)}.gamma"] * o[n])  # h_l = x_l + gamma_l * o_l
        h.append(torch.stack(h_l).reshape(x.shape) if N else x)
        if ell <= L:
            v_l = sublayers[ell - 1](h[-1]).reshape(N, D)
            for n in range(N):
                v[n].append(v_l[n])
    return h, v


def inputs(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    form: str = "light",
    head_dim: int | None = None,
    eps: float = 1e-6,
) -> list[torch.Tensor]:
    """[h_1, ..., h_{L+1}], each shaped like x."""
    h, _ = _run(x, sublayers, params, form, _head_dim(x, form, head_dim), eps)
    return h


def matrix(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    form: str = "light",
    head_dim: int | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """M [..., D, L+1, L+1] from its closed form."""
    d_h = _head_dim(x, form, head_dim)
    _, v = _run(x, sublayers, params, form, d_h, eps)
    L, D, N = len(sublayers), x.shape[-1], len(v)
    shape = (*x.shape[:-1], D, L + 1, L + 1)
    zero, one = x.new_zeros(D), x.new_ones(D)
    M = []
    for n in range(N):
        a = [_a(v[n][s], s, params, d_h, eps) for s in range(L + 1)] if form == "light" and L > 0 else []
        rows = [torch.stack([one] + [zero] * L, dim=-1)]  # M_{0->1} = 1
        for ell in range(2, L + 2):
            gamma = params[f"{_reader(ell, L)}.gamma"]
            alpha = _alpha(v[n][:ell], ell, L, params, d_h, eps) if form == "base" else []
            row = []
            for i in range(L + 1):
                if i >= ell:
                    row.append(zero)
                elif form == "light":
                    product = one
                    for j in range(i + 1, ell):
                        product = product * params[f"mixers.{j - 1}.decay"]  # prod_{j=i+1}^{l-1} lambda_j
                    row.append(1 + gamma * a[i] * product)
                else:
                    row.append(1 + gamma * alpha[i])
            rows.append(torch.stack(row, dim=-1))  # [D, L+1]
        M.append(torch.stack(rows, dim=-2))  # [D, L+1, L+1]
    return torch.stack(M).reshape(shape) if N else x.new_zeros(shape)
