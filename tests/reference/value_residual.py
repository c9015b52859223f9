"""Value residual, one layer, one token and one key-value head at a time.

Axes: N executions of attention layers, B batch, T tokens, K key-value heads, d channels a head.
values[l] is [B, K, T, d], raw. Queries and keys take no part. Every execution has its own pair of weights, so `order`,
the layer that each execution runs, changes nothing.

    u_0 = v_0
    u_l = own_l v_l + first_l v_0                 l >= 1

params["kv_mixers.{l}.own"] and params["kv_mixers.{l}.first"], shape [1], exist for l >= 1 if they are learned.
M has first_l in column 0 and own_l in column l; row 0 is (1, 0, ...).
"""

import torch


def sources(l: int, n: int, *, order: list[int] | None = None) -> list[int]:  # noqa: E741
    """The layers that execution l reads besides itself."""
    return [0] if l > 0 else []


def weights(
    l: int,  # noqa: E741
    like: torch.Tensor,
    params: dict[str, torch.Tensor],
    own: float,
    first: float,
    learned: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """own_l and first_l of layer l >= 1, without axes."""
    if learned:
        return params[f"kv_mixers.{l}.own"][0], params[f"kv_mixers.{l}.first"][0]
    return like.new_tensor(own), like.new_tensor(first)


def mix(v: torch.Tensor, v_0: torch.Tensor, own: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """u_l [B, K, T, d] of one layer l >= 1."""
    B, K, T, _ = v.shape
    tokens = []
    for b in range(B):
        for h in range(K):
            for t in range(T):
                tokens.append(own * v[b, h, t] + first * v_0[b, h, t])  # u_l = own_l v_l + first_l v_0
    return torch.stack(tokens).reshape(v.shape) if tokens else v


def mixed(
    queries: list[torch.Tensor],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    *,
    params: dict[str, torch.Tensor],
    own: float = 0.5,
    first: float = 0.5,
    learned: bool = True,
    order: list[int] | None = None,
) -> list[torch.Tensor]:
    """[u_0, ..., u_{N-1}], each [B, K, T, d]."""
    u = [values[0]]  # u_0 = v_0
    for l in range(1, len(values)):  # noqa: E741
        u.append(mix(values[l], values[0], *weights(l, values[0], params, own, first, learned)))
    return u


def matrix(
    queries: list[torch.Tensor],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    *,
    params: dict[str, torch.Tensor],
    own: float = 0.5,
    first: float = 0.5,
    learned: bool = True,
    order: list[int] | None = None,
) -> torch.Tensor:
    """M [B, T, K, N, N]: row = layer, column = whose raw value; the same for every token and head."""
    N = len(values)
    B, K, T, _ = values[0].shape
    zero, one = values[0].new_zeros(()), values[0].new_ones(())
    rows = [torch.stack([one] + [zero] * (N - 1))]
    for l in range(1, N):  # noqa: E741
        own_l, first_l = weights(l, values[0], params, own, first, learned)
        rows.append(torch.stack([first_l if i == 0 else own_l if i == l else zero for i in range(N)]))
    return torch.stack(rows).expand(B, T, K, N, N)
