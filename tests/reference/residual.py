"""The plain residual stream.

Axes: ... leading shape (tokens), D width, L sublayers; rows l = 1 … L+1 and sources i = 0 … L.

    h_1 = v_0
    h_{l+1} = h_l + v_l,    v_l = f_l(h_l)

    M_{i→l} = 1    for i < l
"""

import torch


def inputs(x: torch.Tensor, sublayers: list, params: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """[h_1, ..., h_{L+1}], each shaped like x."""
    h = x  # h_1 = v_0
    hs = [h]
    for f in sublayers:
        v = f(h)  # v_l = f_l(h_l)
        h = h + v  # h_{l+1} = h_l + v_l
        hs.append(h)
    return hs


def matrix(x: torch.Tensor, sublayers: list, params: dict[str, torch.Tensor]) -> torch.Tensor:
    """M as [..., L+1, L+1]."""
    L = len(sublayers)
    rows = []
    for ell in range(1, L + 2):
        row = []
        for i in range(L + 1):
            row.append(x.new_ones(()) if i < ell else x.new_zeros(()))  # M_{i→l} = 1
        rows.append(torch.stack(row))
    return torch.stack(rows).expand(*x.shape[:-1], L + 1, L + 1)
