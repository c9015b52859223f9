"""What precedes the recurrence of Kimi Delta Attention: normalised queries and keys, and the log decay.

Axes: ... any leading shape, H head, K channel of a key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthmix.ops.reference import wide


def unit_vectors(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / √(Σ x² + eps) over the last axis, in the accumulator's dtype. The eps joins the sum, not the mean."""
    x = wide(x)
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def log_decay(f: Tensor, a_log: Tensor, bound: float | None = None) -> Tensor:
    """The log decay g ≤ 0 of every channel, in the accumulator's dtype.

    Without a bound g = −exp(a_log) softplus(f); with one (negative) g = bound · σ(exp(a_log) f), so that bound < g < 0.

    Args:
        f: [..., H, K], with its bias.
        a_log: [H].
        bound: the lower bound, such as -5; None for none.
    """
    if a_log.dim() != 1 or f.dim() < 2 or f.shape[-2] != a_log.shape[0]:
        raise ValueError(
            f"f has shape {list(f.shape)}, a_log {list(a_log.shape)}; expected f [..., H, K] and a_log [H]"
        )
    if bound is not None and not bound < 0:
        raise ValueError(f"bound={bound}; expected a number below 0, such as -5.0, or None")
    dtype = torch.promote_types(wide(f).dtype, wide(a_log).dtype)
    rate = a_log.to(dtype).exp().unsqueeze(-1)
    if bound is None:
        # Over [..., H·K]: the strides that torch's compiler expects of the derivative of softplus are wrong where its
        # gradient is laid out otherwise than its input, as that of a transposed g is.
        return -rate * torch.nn.functional.softplus(f.to(dtype).flatten(-2)).unflatten(-1, f.shape[-2:])
    return bound * torch.sigmoid(rate * f.to(dtype))
