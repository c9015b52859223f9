"""Full attention residuals, one token, one head and one source at a time.

Axes: L sublayers, T tokens (the flattened leading shape), D channels, H heads of D/H consecutive channels,
n the number of sources that a row reads.

Row l = 2 ... L+1 reads v_0 and v_1 ... v_{l-1} (with a window W: v_0 and the W newest of v_1 ... v_{l-1}); h_1 = v_0.

    norm(v) = v / sqrt(mean(v^2) + eps)         over all D channels, before they are split into heads
    w_l     = a parameter, or W_l norm(o_l)
    o_l     = v_{l-1}, the newest source         query_from="newest"
            = h_{l-1}                           "read"
            = v_0 + ... + v_{l-1}               "sum"
    k_i     = gamma_l * norm(v_i)               key_norm=False: v_i
    s_i     = scale <w_l, k_i>
    alpha_i = exp(s_i) / sum_j exp(s_j)         softmax
            = sigma(s_i)                        sigmoid
            = softmax of learned scalars        static
            = <phi(w_l), phi(k_i)> / sum_j <phi(w_l), phi(k_j)>,  phi = elu + 1 or exp, k_i = norm(v_i) or v_i   linear
    h_l     = sum_i alpha_i v_i                 scale_by_count: n sum_i alpha_i v_i

M_{i->l} = alpha_i (scale_by_count: n alpha_i) for the sources of row l, 0 for all others, and M_{0->1} = 1.
No value depends on `group_sublayers`, which says only which reads share a pass.
"""

import torch


def _check(width: int, query: str, mixing: str, key_norm: bool, heads: int, scale: float, count: bool, eps: float):
    if query not in ("static", "input") or mixing not in ("softmax", "sigmoid", "static", "linear"):
        raise ValueError(f"unknown query {query!r} or mixing {mixing!r}")
    if mixing == "static" and (query != "static" or not key_norm):
        raise ValueError("static mixing has neither query nor key")
    if scale != 1.0 and mixing not in ("softmax", "sigmoid"):
        raise ValueError(f"no logits to scale with mixing {mixing!r}")
    if count and mixing not in ("softmax", "static"):
        raise ValueError(f"scale_by_count does not go with mixing {mixing!r}")
    if heads < 1 or width % heads or eps <= 0:
        raise ValueError("heads must divide the width and eps be positive")


def _norm(v: torch.Tensor, eps: float) -> torch.Tensor:
    """norm(v) of one token v [D]."""
    return v / torch.sqrt((v * v).mean() + eps)


_PHI = {"elu1": lambda u: torch.nn.functional.elu(u) + 1, "torch:exp": torch.exp}


def _split(u: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """[D] -> H groups [D/H] of consecutive channels."""
    size = u.shape[0] // heads
    return [u[g * size : (g + 1) * size] for g in range(heads)]


def _alpha(
    sources: list[torch.Tensor],
    params: dict[str, torch.Tensor],
    place: str,
    query: str,
    mixing: str,
    key_norm: bool,
    heads: int,
    scale: float,
    eps: float,
    origin: torch.Tensor,
    kernel: str,
) -> list[torch.Tensor]:
    """alpha [n] of every head, for the sources [D] of one token, oldest first; a query is projected from origin [D]."""
    phi = _PHI[kernel]
    if mixing == "static":
        logits = params[f"{place}.logits"]
        return [torch.softmax(b, dim=0) for b in ([logits] if heads == 1 else [logits[g] for g in range(heads)])]

    if query == "input":
        W = params[f"{place}.query_proj"]
        w = _split(W @ _norm(origin, eps), heads)  # w_l = W_l norm(o_l)
    else:
        w = params[f"{place}.query"]
        w = [w] if heads == 1 else [w[g] for g in range(heads)]

    keys = []
    for v in sources:
        k = v
        if key_norm:
            k = _norm(v, eps)
            if mixing != "linear":
                k = params[f"{place}.key_weight"] * k  # k_i = gamma_l * norm(v_i)
        keys.append(_split(k, heads))

    alpha = []
    for g in range(heads):
        if mixing == "linear":
            a = [torch.dot(phi(w[g]), phi(k[g])) for k in keys]  # <phi(w_l), phi(k_i)>
            alpha.append(torch.stack([a_i / sum(a) for a_i in a]))
            continue
        s = torch.stack([scale * torch.dot(w[g], k[g]) for k in keys])  # s_i = scale <w_l, k_i>
        alpha.append(torch.softmax(s, dim=0) if mixing == "softmax" else torch.sigmoid(s))
    return alpha


def _sources(row: int, window: int | None) -> list[int]:
    """The i of the sources v_i of row l, oldest first."""
    outputs = list(range(1, row))
    return [0] + (outputs if window is None else outputs[-window:])


def _origin(read: list[torch.Tensor], last: torch.Tensor, query_from: str) -> torch.Tensor:
    """o_l of all tokens, from the sources of row l and h_{l-1}."""
    return {"newest": lambda: read[-1], "read": lambda: last, "sum": lambda: sum(read)}[query_from]()


def _run(
    x, sublayers, params, query, mixing, key_norm, heads, window, scale, scale_by_count, eps, query_from, kernel, score
):
    """[h_1 ... h_{L+1}] and for each row alpha as a nested list [T][H] of tensors [n]."""
    D, L = x.shape[-1], len(sublayers)
    _check(D, query, mixing, key_norm, heads, scale, scale_by_count, eps)
    if score not in (None, "torch.linalg:vecdot") or (query_from != "newest" and query != "input"):
        raise ValueError(f"unknown score {score!r} or a static query from {query_from!r}")
    if window is not None and window < 1:
        raise ValueError("window must be at least 1")
    v = [x]
    hs, alphas = [], []
    for row in range(1, L + 2):
        if row == 1:
            h = x  # h_1 = v_0
            alphas.append([[x.new_ones(1)] * heads for _ in x.reshape(-1, D)])
        else:
            place = f"mixers.{row - 1}" if row <= L else "out"
            read = [v[i].reshape(-1, D) for i in _sources(row, window)]
            n = len(read)
            h_tokens, alpha_tokens = [], []
            origins = _origin(read, hs[-1], query_from).reshape(-1, D)
            for t in range(read[0].shape[0]):
                token = [source[t] for source in read]
                alpha = _alpha(token, params, place, query, mixing, key_norm, heads, scale, eps, origins[t], kernel)
                h_heads = []
                for g in range(heads):
                    terms = [a * _split(v_i, heads)[g] for a, v_i in zip(alpha[g], token, strict=True)]
                    h_g = sum(terms)  # h_l = sum_i alpha_i v_i
                    h_heads.append(n * h_g if scale_by_count else h_g)
                h_tokens.append(torch.cat(h_heads))
                alpha_tokens.append(alpha)
            h = torch.stack(h_tokens).reshape(x.shape) if h_tokens else torch.zeros_like(x) * x
            alphas.append(alpha_tokens)
        hs.append(h)
        if row <= L:
            v.append(sublayers[row - 1](h))  # v_l = f_l(h_l)
    return hs, alphas


def inputs(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    query: str = "static",
    mixing: str = "softmax",
    key_norm: bool = True,
    heads: int = 1,
    window: int | None = None,
    scale: float = 1.0,
    scale_by_count: bool = False,
    eps: float = 1e-6,
    group_sublayers: int | None = None,
    query_from: str = "newest",
    query_init: float = 0.0,
    kernel: str = "elu1",
    score: str | None = None,
) -> list[torch.Tensor]:
    """[h_1, ..., h_{L+1}], each shaped like x."""
    return _run(
        x,
        sublayers,
        params,
        query,
        mixing,
        key_norm,
        heads,
        window,
        scale,
        scale_by_count,
        eps,
        query_from,
        kernel,
        score,
    )[0]


def matrix(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    query: str = "static",
    mixing: str = "softmax",
    key_norm: bool = True,
    heads: int = 1,
    window: int | None = None,
    scale: float = 1.0,
    scale_by_count: bool = False,
    eps: float = 1e-6,
    group_sublayers: int | None = None,
    query_from: str = "newest",
    query_init: float = 0.0,
    kernel: str = "elu1",
    score: str | None = None,
) -> torch.Tensor:
    """M [..., L+1, L+1], with heads [..., H, L+1, L+1]: the weights, each in the column of its source."""
    alphas = _run(
        x,
        sublayers,
        params,
        query,
        mixing,
        key_norm,
        heads,
        window,
        scale,
        scale_by_count,
        eps,
        query_from,
        kernel,
        score,
    )[1]
    n_rows = len(sublayers) + 1
    shape = (*x.shape[:-1], n_rows, n_rows) if heads == 1 else (*x.shape[:-1], heads, n_rows, n_rows)
    entries = []
    for t in range(x.reshape(-1, x.shape[-1]).shape[0]):
        for g in range(heads):
            for row in range(1, n_rows + 1):
                read = _sources(row, window)
                for i in range(n_rows):
                    if i not in read:
                        entries.append(x.new_zeros(()))
                        continue
                    a = alphas[row - 1][t][g][read.index(i)]
                    entries.append(len(read) * a if scale_by_count else a)  # M_{i->l} = alpha_i
    return torch.stack(entries).reshape(shape) if entries else x.new_zeros(shape)
