"""DenseFormer: depth-weighted averages of Transformer block outputs.

Axes: ... leading shape (tokens), D width, L sublayers, B = block_sublayers, N = ⌈L/B⌉ blocks;
rows l = 1 … L+1 and sources i = 0 … L. Block j = 1 … N holds the sublayers (j−1)B+1 … min(jB, L).

    X_0 = Y_0 = v_0
    X_j = Y_{j−1} + Σ_{l in block j} v_l,    v_l = f_l(h_l)
    Y_j = Σ_{i in I_j} α_{j,i} X_i    if j mod period = 0,   I_j = { i ≤ j : (j − i) mod dilation = 0 }
    Y_j = X_j                          otherwise
    h_l = Y_{j−1} + Σ_{l' in block j, l' < l} v_{l'}    for l in block j
    h_{L+1} = Y_N

The closed form is over the block differences Δ_0 = v_0, Δ_j = Σ_{l in block j} v_l. With A the
[N+1, N+1] matrix of the averages (row j holds α_j, or a one at j where no average is taken; row 0 a one at
0) and Shift the down-shift, X = Shift Y + Δ and Y = A X, hence

    Y = C Δ,    C = (I − A·Shift)⁻¹ A
"""

import torch


def _averages(
    params: dict[str, torch.Tensor], L: int, dilation: int, period: int, B: int
) -> tuple[int, dict[int, dict[int, torch.Tensor]]]:
    """N, and α as {j: {i: α_{j,i}}} for those j where an average is taken, i over I_j."""
    N = (L + B - 1) // B  # N = ⌈L/B⌉
    alpha = {}
    for j in range(1, N + 1):
        if j % period != 0:
            continue
        I_j = [i for i in range(j + 1) if (j - i) % dilation == 0]  # ascending
        # Sublayer jB+1 is the first of block j+1.
        weights = params["out.weights" if j == N else f"mixers.{j * B}.weights"].reshape(len(I_j))
        alpha[j] = {i: weights[k] for k, i in enumerate(I_j)}
    return N, alpha


def inputs(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    dilation: int = 1,
    period: int = 1,
    block_sublayers: int = 2,
) -> list[torch.Tensor]:
    """[h_1, ..., h_{L+1}], each shaped like x."""
    L, B = len(sublayers), block_sublayers
    N, alpha = _averages(params, L, dilation, period, B)
    hs = []
    X = [x]  # X_0 = v_0
    Y = [x]  # Y_0 = v_0
    for j in range(1, N + 1):
        stream = Y[j - 1]
        for ell in range((j - 1) * B + 1, min(j * B, L) + 1):
            hs.append(stream)  # h_l = Y_{j−1} + the block's outputs so far
            stream = stream + sublayers[ell - 1](stream)
        X.append(stream)  # X_j = Y_{j−1} + Σ_{l in block j} v_l
        if j in alpha:
            Y_j = torch.zeros_like(x)
            for i, a in alpha[j].items():
                Y_j = Y_j + a * X[i]  # Y_j = Σ_{i in I_j} α_{j,i} X_i
        else:
            Y_j = X[j]  # Y_j = X_j
        Y.append(Y_j)
    hs.append(Y[N])  # h_{L+1} = Y_N
    return hs


def matrix(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    dilation: int = 1,
    period: int = 1,
    block_sublayers: int = 2,
) -> torch.Tensor:
    """M as [..., L+1, L+1]."""
    L, B = len(sublayers), block_sublayers
    N, alpha = _averages(params, L, dilation, period, B)
    zero, one = x.new_zeros(()), x.new_ones(())

    A_rows = []
    for j in range(N + 1):
        row_j = alpha.get(j, {j: one})  # α_j, or Y_j = X_j
        A_rows.append(torch.stack([row_j.get(i, zero) for i in range(N + 1)]))
    A = torch.stack(A_rows)
    eye = torch.eye(N + 1, dtype=x.dtype, device=x.device)
    Shift = torch.stack([torch.stack([one if i == j - 1 else zero for i in range(N + 1)]) for j in range(N + 1)])
    C = torch.linalg.solve_triangular(eye - A @ Shift, A, upper=False)  # C = (I − A·Shift)⁻¹ A

    def block(i: int) -> int:
        return (i + B - 1) // B  # the block that holds sublayer i; 0 for the embedding

    rows = []
    for ell in range(1, L + 2):
        j = N if ell == L + 1 else block(ell) - 1  # the row reads Y_j
        row = []
        for i in range(L + 1):
            if i >= ell:
                row.append(zero)
            elif block(i) <= j:
                row.append(C[j, block(i)])  # every v_i of a block shares the column of its Δ
            else:
                row.append(one)  # an earlier output of the same block
        rows.append(torch.stack(row))
    return torch.stack(rows).expand(*x.shape[:-1], L + 1, L + 1)
