"""ddl in plain loops: a state of V values of width D, rewritten by the delta rule.

Axes: L sublayers f_1 ... f_L; l a row (1 ... L+1, the last is the head's); i a source (0 the embedding, i >= 1 what
sublayer i wrote); n a token (the flattened leading shape); j a value (0 ... V-1); D the width.

For one token:

    X[j]  = v_0                                            for every j
    h_l   = sum_j r_l[j] X[j]                              h_1 = v_0; V = 1: r = 1
    c_l   = norm(h_l)
    k_l   = norm_k(y_l) / sqrt(D),   y_l = f_l(h_l)
    b_l   = 2 sigmoid(<w_l, c_l> + bias_l)                 beta_l
    val_l = W_l c_l                                        [V]
    X[j] <- X[j] + b_l (val_l[j] - <X[j], k_l>) k_l

Closed form, with the operators A_l = I - b_l k_l k_l^T (D x D):

    T_{i->l}  = A_{l-1} ... A_{i+1}                        T_{l-1->l} = I
    source 0: X_0[j] = v_0,   source i >= 1: w_i[j] = b_i val_i[j] k_i
    contribution of source i to row l = sum_j r_l[j] T_{i->l} w_i[j]          (T_{0->l} v_0 for the embedding)
    read-out matrix [l, i] = k_l^T T_{i->l} k_i            1 <= i < l <= L
"""

import math

import torch
from torch import Tensor


def _norm(v: Tensor, eps: float) -> Tensor:
    """norm(v) = v / sqrt(mean(v^2) + eps)."""
    return v / torch.sqrt(torch.mean(v * v) + eps)


def _tokens(t: Tensor) -> list[Tensor]:
    """[..., D] -> the list of its tokens, each [D]."""
    flat = t.reshape(-1, t.shape[-1])
    return [flat[n] for n in range(flat.shape[0])]


def _join(tokens: list[Tensor], x: Tensor) -> Tensor:
    """A list of tokens, each [D], -> a tensor shaped like x."""
    return torch.stack(tokens).reshape(x.shape) if tokens else x


def _readout(layer: int, n_sublayers: int, value_width: int, params: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    """r_l[j] for every j: a parameter for V >= 2 and l >= 2, else 1/V."""
    if value_width == 1 or layer == 1:
        return [x.new_tensor(1 / value_width) for _ in range(value_width)]
    name = "out.readout" if layer == n_sublayers + 1 else f"mixers.{layer - 1}.readout"
    return [params[name][j] for j in range(value_width)]


def _run(
    x: Tensor,
    sublayers: list,
    params: dict[str, Tensor],
    value_width: int,
    eps: float,
    key_eps: float,
) -> tuple[list[Tensor], dict[int, list[Tensor]], dict[int, list[Tensor]], dict[int, list[Tensor]]]:
    """[h_1 ... h_{L+1}], and k, beta, val as dicts by l >= 1 of lists over tokens."""
    width = x.shape[-1]
    n_sublayers = len(sublayers)
    # X[n][j] is the value j of token n.
    state = [[v_0 for _ in range(value_width)] for v_0 in _tokens(x)]
    hs: list[Tensor] = []
    key: dict[int, list[Tensor]] = {}
    beta: dict[int, list[Tensor]] = {}
    val: dict[int, list[Tensor]] = {}

    for layer in range(1, n_sublayers + 2):
        # h_l = sum_j r_l[j] X[j]
        if layer == 1:
            h = x
        else:
            r = _readout(layer, n_sublayers, value_width, params, x)
            h = _join([sum(r[j] * X[j] for j in range(value_width)) for X in state], x)
        hs.append(h)
        if layer == n_sublayers + 1:
            break

        y = sublayers[layer - 1](h)  # y_l = f_l(h_l)
        w = params[f"mixers.{layer - 1}.beta_weight"]
        bias = params[f"mixers.{layer - 1}.beta_bias"][0]
        W = params[f"mixers.{layer - 1}.value_weight"]

        key[layer], beta[layer], val[layer] = [], [], []
        next_state = []
        for h_n, y_n, X in zip(_tokens(h), _tokens(y), state, strict=True):
            c = _norm(h_n, eps)  # c_l
            k = _norm(y_n, key_eps) / math.sqrt(width)  # k_l
            b = 2 * torch.sigmoid(torch.dot(w, c) + bias)  # beta_l
            value = torch.stack([torch.dot(W[j], c) for j in range(value_width)])  # val_l = W_l c_l
            # X[j] <- X[j] + beta_l (val_l[j] - <X[j], k_l>) k_l
            next_state.append([X[j] + b * (value[j] - torch.dot(X[j], k)) * k for j in range(value_width)])
            key[layer].append(k)
            beta[layer].append(b)
            val[layer].append(value)
        state = next_state

    return hs, key, beta, val


def _operator(
    i: int, layer: int, n: int, key: dict[int, list[Tensor]], beta: dict[int, list[Tensor]], x: Tensor
) -> Tensor:
    """T_{i->l} = A_{l-1} ... A_{i+1} of token n, with A_s = I - beta_s k_s k_s^T; [D, D]."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    T = eye
    for s in range(i + 1, layer):
        A = eye - beta[s][n] * torch.outer(key[s][n], key[s][n])
        T = A @ T
    return T


def inputs(
    x: Tensor,
    sublayers: list,
    params: dict[str, Tensor],
    *,
    value_width: int = 1,
    beta: float = 1.0,
    eps: float = 1e-6,
    key_eps: float = 1e-5,
) -> list[Tensor]:
    """[h_1, ..., h_{L+1}], each shaped like x."""
    del beta  # it decides only where beta_bias starts
    return _run(x, sublayers, params, value_width, eps, key_eps)[0]


def contributions(
    x: Tensor,
    sublayers: list,
    params: dict[str, Tensor],
    *,
    value_width: int = 1,
    beta: float = 1.0,
    eps: float = 1e-6,
    key_eps: float = 1e-5,
) -> Tensor:
    """[L+1 (row l), L+1 (source i), ..., D]: what source i contributes to h_l; zero for i >= l."""
    del beta  # it decides only where beta_bias starts
    n_sublayers = len(sublayers)
    _, key, b, val = _run(x, sublayers, params, value_width, eps, key_eps)
    embedding = _tokens(x)

    rows = []
    for layer in range(1, n_sublayers + 2):
        r = _readout(layer, n_sublayers, value_width, params, x)
        row = []
        for i in range(n_sublayers + 1):
            if i >= layer:
                row.append(torch.zeros_like(x))
                continue
            tokens = []
            for n, v_0 in enumerate(embedding):
                T = _operator(i, layer, n, key, b, x)
                if i == 0:
                    written = [v_0 for _ in range(value_width)]  # X_0[j] = v_0
                else:
                    written = [b[i][n] * val[i][n][j] * key[i][n] for j in range(value_width)]  # w_i[j]
                tokens.append(sum(r[j] * (T @ written[j]) for j in range(value_width)))  # sum_j r_l[j] T_{i->l} w_i[j]
            row.append(_join(tokens, x))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def readout_matrix(
    x: Tensor,
    sublayers: list,
    params: dict[str, Tensor],
    *,
    value_width: int = 1,
    beta: float = 1.0,
    eps: float = 1e-6,
    key_eps: float = 1e-5,
) -> Tensor:
    """[..., L, L+1]: entry [l-1, i] is k_l^T T_{i->l} k_i for 1 <= i < l, else zero."""
    del beta  # it decides only where beta_bias starts
    n_sublayers = len(sublayers)
    shape = (*x.shape[:-1], n_sublayers, n_sublayers + 1)
    _, key, b, _ = _run(x, sublayers, params, value_width, eps, key_eps)

    zero = x.new_zeros(())
    entries = []
    for n in range(len(_tokens(x))):
        for layer in range(1, n_sublayers + 1):
            for i in range(n_sublayers + 1):
                if 1 <= i < layer:
                    T = _operator(i, layer, n, key, b, x)
                    entries.append(torch.dot(key[layer][n], T @ key[i][n]))  # k_l^T T_{i->l} k_i
                else:
                    entries.append(zero)
    return torch.stack(entries).reshape(shape) if entries else x.new_zeros(shape)
