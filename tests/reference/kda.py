"""Kimi Delta Attention (arXiv 2510.26692), one row, one head and one token at a time.

Axes: B rows, T tokens, D model width, H heads, K channels of a key, V channels of a value, W width of a convolution,
P = H·K or H·V. q, k, g are [B, H, T, K], v is [B, H, T, V], beta is [B, H, T], a state S is [B, H, K, V].

    z = x W_z^T                                             z one of q, k, v; x is already normalised
    y_t = sum_{j < W} w[:, j] z_{t - W + 1 + j}             zeros before the start; the last tap is the own token
    q, k, v = SiLU(y);  q, k <- u / sqrt(sum u^2 + 1e-6)    per head; v is not normalised
    g = -exp(A_h) softplus(f)                               f = f_b f_a x + dt_bias, per head and channel
    g = bound * sigmoid(exp(A_h) f)                         instead, if there is a bound (negative)
    beta = sigmoid(b x)                                     per head
    S <- Diag(e^g) S;  delta = beta (v - S^T k);  S <- S + k delta^T;  o = K^(-1/2) S^T q
    o <- o / sqrt(mean o^2 + eps) * o_norm * sigmoid(g_b g_a x);  out = o o_proj^T

Every document starts from an empty state and an empty convolution; tokens that are not valid do not exist.
"""

import math

import torch

Params = dict[str, torch.Tensor]


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B, H, T, V] and the last state [B, H, K, V]."""
    B, H, T, K = q.shape
    V = v.shape[-1]
    outputs, states = [], []
    for b in range(B):
        for h in range(H):
            S = q.new_zeros(K, V) if state is None else state[b, h]
            for t in range(T):
                S = g[b, h, t].exp().reshape(K, 1) * S
                delta = beta[b, h, t] * (v[b, h, t] - S.T @ k[b, h, t])
                S = S + k[b, h, t].reshape(K, 1) * delta.reshape(1, V)
                outputs.append(S.T @ q[b, h, t] / math.sqrt(K))
            states.append(S)
    o = torch.stack(outputs).reshape(B, H, T, V) if T else v
    return o, torch.stack(states).reshape(B, H, K, V)


def documents_alone(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    lengths: list[int],
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for packed documents of these lengths, each by itself. The state belongs to the first one."""
    outputs, start = [], 0
    for length in lengths:
        at = slice(start, start + length)
        o, last = recurrence(q[:, :, at], k[:, :, at], v[:, :, at], g[:, :, at], beta[:, :, at], state)
        outputs.append(o)
        start, state = start + length, None
    return torch.cat(outputs, 2), last


def convolution(z: torch.Tensor, weight: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """SiLU of the causal depthwise convolution of z [T, P] with weight [P, W], after history [W − 1, P]."""
    T, W = z.shape[0], weight.shape[1]
    line = [*history, *z]
    outputs = []
    for t in range(T):
        y = torch.zeros_like(z[0])
        for j in range(W):
            y = y + weight[:, j] * line[t + j]  # z_{t - W + 1 + j}
        outputs.append(y / (1 + torch.exp(-y)))
    return torch.stack(outputs) if outputs else z


def unit(u: torch.Tensor) -> torch.Tensor:
    return u / torch.sqrt((u * u).sum() + 1e-6)


def log_decay(f: torch.Tensor, rate: torch.Tensor, bound: float | None) -> torch.Tensor:
    """g [K] of one token and head, from f [K] and A_h."""
    if bound is None:
        return -torch.exp(rate) * torch.logaddexp(f, torch.zeros_like(f))  # softplus(f) = log(e^f + e^0)
    return bound / (1 + torch.exp(-torch.exp(rate) * f))


def row(
    x: torch.Tensor,
    params: Params,
    heads: int,
    eps: float,
    bound: float | None,
    state: torch.Tensor,
    history: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sublayer on one row x [T, D]: its output, its state [H, K, V] and its last W − 1 raw projections."""
    T = x.shape[0]
    raw = {name: x @ params[f"{name}_proj.weight"].T for name in "qkv"}
    q, k, v = (convolution(raw[name], params[f"{name}_conv"], history[name]) for name in "qkv")
    f = x @ params["f_a_proj.weight"].T @ params["f_b_proj.weight"].T + params["dt_bias"]
    gate = x @ params["g_a_proj.weight"].T @ params["g_b_proj.weight"].T
    b = x @ params["b_proj.weight"].T
    K, V = q.shape[1] // heads, v.shape[1] // heads
    outputs, states = [], []
    for h in range(heads):
        key, value = slice(h * K, (h + 1) * K), slice(h * V, (h + 1) * V)
        tokens = []
        S = state[h]
        for t in range(T):
            g = log_decay(f[t, key], params["A_log"][h], bound)
            token = [unit(q[t, key]), unit(k[t, key]), v[t, value], g, 1 / (1 + torch.exp(-b[t, h]))]
            o, S = recurrence(*(u[None, None, None] for u in token), S[None, None])
            o, S = o[0, 0, 0], S[0, 0]
            o = o / torch.sqrt((o * o).mean() + eps) * params["o_norm.weight"]
            tokens.append(o / (1 + torch.exp(-gate[t, value])))
        states.append(S)
        outputs.append(torch.stack(tokens) if tokens else v[:, value])
    last = {}
    for name in "qkv":
        line = torch.cat([history[name], raw[name]])
        last[name] = line[len(line) - len(history[name]) :]
    return torch.cat(outputs, -1) @ params["o_proj.weight"].T, torch.stack(states), last


def sublayer(
    x: torch.Tensor,
    params: Params,
    *,
    heads: int,
    eps: float = 1e-5,
    bound: float | None = None,
    documents: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output [B, T, D] of x [B, T, D], 0 at padding. Documents and valid are [B, T]."""
    B, T, _ = x.shape
    out = torch.zeros_like(x)
    for b in range(B):
        exists = [t for t in range(T) if valid is None or bool(valid[b, t])]
        numbers = [0 if documents is None else int(documents[b, t]) for t in exists]
        for number in dict.fromkeys(numbers):
            at = [t for t, n in zip(exists, numbers, strict=True) if n == number]
            y, _, _ = row(x[b, at], params, heads, eps, bound, *empty(x, params, heads))
            out = out.index_put((torch.tensor(b), torch.tensor(at)), y)
    return out


def empty(x: torch.Tensor, params: Params, heads: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The state and the history before the first token."""
    K, V = (params[f"{name}_proj.weight"].shape[0] // heads for name in "kv")
    W = params["q_conv"].shape[1]
    history = {name: x.new_zeros(W - 1, params[f"{name}_proj.weight"].shape[0]) for name in "qkv"}
    return x.new_zeros(heads, K, V), history
