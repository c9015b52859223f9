"""Depth-Attention, one layer, one token, one key-value head and one source at a time.

Axes: N executions of attention layers, B batch, T tokens, Q query heads, K key-value heads, g = Q/K, d channels a head.
queries[l] is [B, Q, T, d]; keys[l] and values[l] are [B, K, T, d], the values raw. `order` names the layer that each
execution runs; without it no layer runs twice.

    S_l  = {j < l : j mod s = 0}                 absolute; relative: {l - s, l - 2s, ...}, none below 0
         = {j < l : j in the list}               sources
         with {j < l : j >= l - w} in addition   window
         = {j < l : order_j = order_l}           loop="same_layer"
         with {j < l : order_j = order_l} in addition to the grid   loop="both"
    qbar = (1/g) sum of the queries i with floor(i/g) = h
    e_j  = <qbar, k_j> / sqrt(d)                 j in S_l and j = l
    a    = softmax of e, or 1 / (|S_l| + 1)      rule
    u_l  = a_l v_l + sum_{j in S_l} a_j u_j      u_l = v_l where S_l is empty

With A the strictly lower matrix of the a_j and a the vector of the a_l: u = A u + diag(a) v, so M = (I - A)^-1 diag(a).
"""

import math

import torch


def _reads(
    l: int,  # noqa: E741
    n: int,
    stride: int | None,
    grid: str,
    chosen: list[int] | None,
    window: int,
    loop: str,
    order: list[int] | None,
) -> list[int]:
    """S_l, oldest first."""
    order = list(range(n)) if order is None else order
    if loop == "same_layer":
        if stride is not None or chosen is not None or window:
            raise ValueError("same_layer has no other sources than the layer itself")
        return [j for j in range(l) if order[j] == order[l]]
    if loop not in ("unrolled", "both") or grid not in ("absolute", "relative"):
        raise ValueError(f"unknown loop {loop!r} or grid {grid!r}")
    s = max(n // 2, 1) if stride is None else stride
    found = []
    for j in range(l):
        if chosen is not None:
            on_grid = j in chosen
        elif grid == "absolute":
            on_grid = j % s == 0
        else:
            on_grid = (l - j) % s == 0
        own_run = loop == "both" and order[j] == order[l]
        if on_grid or j >= l - window or own_run:
            found.append(j)
    return found


def sources(
    l: int,  # noqa: E741
    n: int,
    *,
    stride: int | None = None,
    grid: str = "absolute",
    sources: list[int] | None = None,
    window: int = 0,
    loop: str = "unrolled",
    order: list[int] | None = None,
) -> list[int]:
    """S_l of execution l among n, oldest first."""
    return _reads(l, n, stride, grid, sources, window, loop, order)


def weights(q: torch.Tensor, keys: list[torch.Tensor], head: int, rule: str) -> torch.Tensor:
    """a [number of candidates] of one token: q [Q, d] its queries, keys the candidates' [K, d], the own layer last."""
    Q, d = q.shape
    g = Q // keys[-1].shape[0]
    if rule == "uniform":
        return torch.stack([q.new_ones(()) / len(keys) for _ in keys])  # a_j = 1 / (|S_l| + 1)
    qbar = sum(q[i] for i in range(Q) if i // g == head) / g
    e = torch.stack([torch.dot(qbar, k[head]) / math.sqrt(d) for k in keys])  # e_j = <qbar, k_j> / sqrt(d)
    return torch.softmax(e, dim=0)


def mix(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, source_keys: list, source_values: list, rule: str
) -> torch.Tensor:
    """u_l [B, K, T, d] of one layer, from its own q, k, v and the keys and mixed values of its sources."""
    if not source_keys or not v.numel():
        return v  # S_l is empty: u_l = v_l
    B, K, T, _ = v.shape
    batch = []
    for b in range(B):
        heads = []
        for h in range(K):
            tokens = []
            for t in range(T):
                a = weights(q[b, :, t], [key[b, :, t] for key in [*source_keys, k]], h, rule)
                u = a[-1] * v[b, h, t]  # a_l v_l
                for a_j, u_j in zip(a[:-1], source_values, strict=True):
                    u = u + a_j * u_j[b, h, t]  # + a_j u_j
                tokens.append(u)
            heads.append(torch.stack(tokens))
        batch.append(torch.stack(heads))
    return torch.stack(batch)


def mixed(
    queries: list[torch.Tensor],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    *,
    stride: int | None = None,
    grid: str = "absolute",
    sources: list[int] | None = None,
    window: int = 0,
    rule: str = "softmax",
    loop: str = "unrolled",
    order: list[int] | None = None,
) -> list[torch.Tensor]:
    """[u_0, ..., u_{N-1}], each [B, K, T, d]."""
    N = len(values)
    u: list[torch.Tensor] = []
    for l in range(N):  # noqa: E741
        S = _reads(l, N, stride, grid, sources, window, loop, order)
        u.append(mix(queries[l], keys[l], values[l], [keys[j] for j in S], [u[j] for j in S], rule))
    return u


def matrix(
    queries: list[torch.Tensor],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    *,
    stride: int | None = None,
    grid: str = "absolute",
    sources: list[int] | None = None,
    window: int = 0,
    rule: str = "softmax",
    loop: str = "unrolled",
    order: list[int] | None = None,
) -> torch.Tensor:
    """M [B, T, K, N, N] = (I - A)^-1 diag(a): row = layer, column = whose raw value."""
    N = len(values)
    B, K, T, _ = values[0].shape
    zero, one = values[0].new_zeros(()), values[0].new_ones(())
    found = []
    for b in range(B):
        for t in range(T):
            for h in range(K):
                strict, own = [], []  # I - A and diag(a), entry by entry
                for l in range(N):  # noqa: E741
                    S = _reads(l, N, stride, grid, sources, window, loop, order)
                    a = weights(queries[l][b, :, t], [keys[j][b, :, t] for j in [*S, l]], h, rule)
                    for i in range(N):
                        strict.append(-a[S.index(i)] if i in S else one if i == l else zero)
                        own.append(a[-1] if i == l else zero)
                lower, diagonal = torch.stack(strict).reshape(N, N), torch.stack(own).reshape(N, N)
                found.append(torch.linalg.solve_triangular(lower, diagonal, upper=False))
    return torch.stack(found).reshape(B, T, K, N, N) if found else values[0].new_zeros(B, T, K, N, N)
