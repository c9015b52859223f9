"""The public, checked forms of attention over depth: `attend` and `merge`.

Axes: ... any leading shape, D channel, Q query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops import reference


def attend(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = None,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float = 1.0,
) -> tuple[Any, Tensor]:
    """Attend over depth: softmax over the sources, independently for each token.

    Logits are ``scale * <query, key_weight * norm(source)>``, values are the raw sources.

    Args:
        sources: tensors ``[..., D]`` of one shape, dtype and device; never stacked by the caller.
        query: ``[D]``, or ``[Q, D]`` for Q queries at once.
        key_weight: weight of the key norm, ``[D]`` or ``[Q, D]``; None means ones.
        normalize: False drops the RMSNorm of the key.
        eps: of that norm.
        scale: multiplies the logits.

    Returns:
        ``(h, lse)``: for one query ``h [..., D]`` and the log-sum-exp of the logits ``lse [...]``; for Q queries ``h``
        is a tuple of Q tensors ``[..., D]`` and ``lse`` is ``[..., Q]``. Both are differentiable; ``lse`` is float32 at
        least.
    """
    check_sources(sources)
    dim = sources[0].shape[-1]
    if query.dim() not in (1, 2) or query.shape[-1] != dim:
        raise ValueError(f"query has shape {list(query.shape)}; expected [D] or [Q, D] with D = {dim}, as the sources")
    if key_weight is not None and (key_weight.shape[-1:] != query.shape[-1:] or key_weight.dim() > query.dim()):
        raise ValueError(f"key_weight has shape {list(key_weight.shape)}; expected [{dim}] or that of the query")
    if key_weight is not None and key_weight.dim() == 2 and key_weight.shape != query.shape:
        raise ValueError(f"key_weight has shape {list(key_weight.shape)}; expected the query's, {list(query.shape)}")
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps={eps}; expected a finite number above 0, such as 1e-6")
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}; expected a finite number, such as 1.0")
    return reference.attend(sources, query, key_weight, normalize=normalize, eps=eps, scale=scale)


def merge(h1: Tensor, lse1: Tensor, h2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of sources: the result of attending over their union, exactly.

    Args:
        h1, h2: mixed values ``[..., D]`` over either set.
        lse1, lse2: their log-sum-exp ``[...]``, as `attend` returns them.
    """
    check_sources([h1, h2])
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        if lse.shape != h1.shape[:-1]:
            raise ValueError(f"{name} has shape {list(lse.shape)}; expected {list(h1.shape[:-1])}, one number a token")
    return reference.merge(h1, lse1, h2, lse2)


def check_sources(sources: Sequence[Tensor]) -> None:
    """Refuse anything that would be broadcast, promoted or moved silently."""
    if isinstance(sources, Tensor) or not len(sources):
        got = f"a tensor of shape {list(sources.shape)}" if isinstance(sources, Tensor) else "no source at all"
        raise TypeError(f"sources: got {got}; expected a list of at least one tensor [..., D]")
    first = sources[0]
    if not torch.is_floating_point(first):
        raise TypeError(f"sources[0] has dtype {first.dtype}; expected a floating dtype: convert it with .float()")
    for i, v in enumerate(sources):
        for what in ("shape", "dtype", "device"):
            if getattr(v, what) != getattr(first, what):
                raise ValueError(
                    f"sources[{i}] has {what} {getattr(v, what)}, but sources[0] has {getattr(first, what)}; "
                    "expected one for all: convert before the call"
                )
