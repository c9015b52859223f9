"""Block attention residuals, one token, one head and one source at a time.

Axes: L sublayers in blocks of S, T tokens (the flattened leading shape), D channels, H heads of D/H consecutive
channels, n the number of sources that a row reads.

    bank = [], p = v_0
    for l = 1 ... L:
        h_l = attention over bank + [p]
        if (l-1) mod S = 0:  push p to the bank, p = v_l
        otherwise:           p = p + v_l
    h_{L+1} = attention over bank + [p]

Attention of row l = 2 ... L+1 over its sources b_0 ... b_{n-1}, of which p = b_{n-1} is the newest; h_1 = v_0:

    norm(b) = b / sqrt(mean(b^2) + eps)         over all D channels, before they are split into heads
    w_l     = a parameter, or W_l norm(o_l)
    o_l     = p, the newest source               query_from="newest"
            = h_{l-1}                           "read"
            = b_0 + ... + b_{n-1}               "sum"
    k_j     = gamma_l * norm(b_j)               key_norm=False: b_j
    s_j     = scale <w_l, k_j>
    alpha_j = exp(s_j) / sum_m exp(s_m)         softmax
            = sigma(s_j)                        sigmoid
            = softmax of learned scalars        static
            = <phi(w_l), phi(k_j)> / sum_m <phi(w_l), phi(k_m)>,  phi = elu + 1 or exp, k_j = norm(b_j) or b_j   linear
    h_l     = sum_j alpha_j b_j                 scale_by_count: n sum_j alpha_j b_j

M_{i->l} = alpha_{j(i)} (scale_by_count: n alpha_{j(i)}) for i < l, where v_i is held by the source
j(0) = 0 and j(i) = 1 + floor((i-1) / S) for i >= 1.
"""

import math

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
    for b in sources:
        k = b
        if key_norm:
            k = _norm(b, eps)
            if mixing != "linear":
                k = params[f"{place}.key_weight"] * k  # k_j = gamma_l * norm(b_j)
        keys.append(_split(k, heads))

    alpha = []
    for g in range(heads):
        if mixing == "linear":
            a = [torch.dot(phi(w[g]), phi(k[g])) for k in keys]  # <phi(w_l), phi(k_j)>
            alpha.append(torch.stack([a_j / sum(a) for a_j in a]))
            continue
        s = torch.stack([scale * torch.dot(w[g], k[g]) for k in keys])  # s_j = scale <w_l, k_j>
        alpha.append(torch.softmax(s, dim=0) if mixing == "softmax" else torch.sigmoid(s))
    return alpha


def _block_size(L: int, block_sublayers: int | None, num_blocks: int | None) -> int:
    """S."""
    if block_sublayers is not None and num_blocks is not None:
        raise ValueError("give block_sublayers or num_blocks, not both")
    if block_sublayers is None and num_blocks is None:  # the even number nearest to L/8, the larger of two
        evens = list(range(2, L + 1, 2))
        return min(evens, key=lambda S: (abs(8 * S - L), -S)) if evens else 1
    given = num_blocks if block_sublayers is None else block_sublayers
    if not 1 <= given <= L:
        raise ValueError(f"block_sublayers and num_blocks must be in 1 ... {L}")
    return math.ceil(L / num_blocks) if block_sublayers is None else block_sublayers


def _origin(read: list[torch.Tensor], last: torch.Tensor, query_from: str) -> torch.Tensor:
    """o_l of all tokens, from the sources of row l and h_{l-1}."""
    return {"newest": lambda: read[-1], "read": lambda: last, "sum": lambda: sum(read)}[query_from]()


def _run(
    x, sublayers, params, S, query, mixing, key_norm, heads, scale, scale_by_count, eps, query_from, kernel, score
):
    """[h_1 ... h_{L+1}] and for each row alpha as a nested list [T][H] of tensors [n]."""
    D, L = x.shape[-1], len(sublayers)
    _check(D, query, mixing, key_norm, heads, scale, scale_by_count, eps)
    if score not in (None, "torch.linalg:vecdot") or (query_from != "newest" and query != "input"):
        raise ValueError(f"unknown score {score!r} or a static query from {query_from!r}")
    bank, p = [], x  # bank = [], p = v_0
    hs, alphas = [], []
    for row in range(1, L + 2):
        if row == 1:
            h = x  # h_1 = v_0
            alphas.append([[x.new_ones(1)] * heads for _ in x.reshape(-1, D)])
        else:
            place = f"mixers.{row - 1}" if row <= L else "out"
            read = [b.reshape(-1, D) for b in [*bank, p]]
            n = len(read)
            h_tokens, alpha_tokens = [], []
            origins = _origin(read, hs[-1], query_from).reshape(-1, D)
            for t in range(read[0].shape[0]):
                token = [source[t] for source in read]
                alpha = _alpha(token, params, place, query, mixing, key_norm, heads, scale, eps, origins[t], kernel)
                h_heads = []
                for g in range(heads):
                    terms = [a * _split(b_j, heads)[g] for a, b_j in zip(alpha[g], token, strict=True)]
                    h_g = sum(terms)  # h_l = sum_j alpha_j b_j
                    h_heads.append(n * h_g if scale_by_count else h_g)
                h_tokens.append(torch.cat(h_heads))
                alpha_tokens.append(alpha)
            h = torch.stack(h_tokens).reshape(x.shape) if h_tokens else torch.zeros_like(x) * x
            alphas.append(alpha_tokens)
        hs.append(h)
        if row <= L:
            v = sublayers[row - 1](h)  # v_l = f_l(h_l)
            if (row - 1) % S == 0:
                bank, p = [*bank, p], v
            else:
                p = p + v
    return hs, alphas


def inputs(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    block_sublayers: int | None = None,
    num_blocks: int | None = None,
    query: str = "static",
    mixing: str = "softmax",
    key_norm: bool = True,
    heads: int = 1,
    scale: float = 1.0,
    scale_by_count: bool = False,
    eps: float = 1e-6,
    query_from: str = "newest",
    query_init: float = 0.0,
    kernel: str = "elu1",
    score: str | None = None,
) -> list[torch.Tensor]:
    """[h_1, ..., h_{L+1}], each shaped like x."""
    S = _block_size(len(sublayers), block_sublayers, num_blocks)
    return _run(
        x, sublayers, params, S, query, mixing, key_norm, heads, scale, scale_by_count, eps, query_from, kernel, score
    )[0]


def matrix(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    block_sublayers: int | None = None,
    num_blocks: int | None = None,
    query: str = "static",
    mixing: str = "softmax",
    key_norm: bool = True,
    heads: int = 1,
    scale: float = 1.0,
    scale_by_count: bool = False,
    eps: float = 1e-6,
    query_from: str = "newest",
    query_init: float = 0.0,
    kernel: str = "elu1",
    score: str | None = None,
) -> torch.Tensor:
    """M [..., L+1, L+1], with heads [..., H, L+1, L+1]: in each column the weight of the source that holds v_i."""
    S = _block_size(len(sublayers), block_sublayers, num_blocks)
    alphas = _run(
        x, sublayers, params, S, query, mixing, key_norm, heads, scale, scale_by_count, eps, query_from, kernel, score
    )[1]
    n_rows = len(sublayers) + 1
    shape = (*x.shape[:-1], n_rows, n_rows) if heads == 1 else (*x.shape[:-1], heads, n_rows, n_rows)
    entries = []
    for t in range(x.reshape(-1, x.shape[-1]).shape[0]):
        for g in range(heads):
            for row in range(1, n_rows + 1):
                alpha = alphas[row - 1][t][g]
                for i in range(n_rows):
                    if i >= row:
                        entries.append(x.new_zeros(()))
                        continue
                    j = 0 if i == 0 else 1 + (i - 1) // S
                    entries.append(len(alpha) * alpha[j] if scale_by_count else alpha[j])  # M_{i->l} = alpha_{j(i)}
    return torch.stack(entries).reshape(shape) if entries else x.new_zeros(shape)
