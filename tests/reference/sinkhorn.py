"""Sinkhorn normalisation in the order of DeepSeek's mHC, in plain loops over rows and columns.

Axes: scores S and result C are [..., m, m]; the last axis but one is the row j, the last is the column i.

    C[j, :] = softmax(S[j, :]) + eps                                        for every row j
    C[:, i] <- C[:, i] / (sum_j C[j, i] + eps)                              for every column i
    then iterations - 1 times:
        C[j, :] <- C[j, :] / (sum_i C[j, i] + eps)                          for every row j
        C[:, i] <- C[:, i] / (sum_j C[j, i] + eps)                          for every column i

Columns are normalised last: sum_j C[j, i] = 1 with eps = 0, and s / (s + eps) for a column of sum s otherwise.
"""

import torch


def _rows(C: torch.Tensor, eps: float) -> torch.Tensor:
    """C[j, :] / (sum_i C[j, i] + eps), row by row."""
    m = C.shape[-1]
    return torch.stack([C[..., j, :] / (C[..., j, :].sum(-1, keepdim=True) + eps) for j in range(m)], dim=-2)


def _columns(C: torch.Tensor, eps: float) -> torch.Tensor:
    """C[:, i] / (sum_j C[j, i] + eps), column by column."""
    m = C.shape[-1]
    return torch.stack([C[..., :, i] / (C[..., :, i].sum(-1, keepdim=True) + eps) for i in range(m)], dim=-1)


def sinkhorn(scores: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """C [..., m, m] from scores S [..., m, m] after `iterations` >= 1 iterations."""
    m = scores.shape[-1]
    C = torch.stack([torch.softmax(scores[..., j, :], dim=-1) + eps for j in range(m)], dim=-2)
    C = _columns(C, eps)
    for _ in range(iterations - 1):
        C = _rows(C, eps)
        C = _columns(C, eps)
    return C
