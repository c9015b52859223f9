"""Attention over depth: one operation, one file for each backend, and the choice of backend in dispatch.py.

This file defines its public functions `attend` and `merge`, which check their arguments.

Axes: ... any leading shape, D channel, Q query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.attend.dispatch import read_many, read_one, sharing_pays, using
from depthmix.ops.attend.options import ReadOptions
from depthmix.ops.attend.reference import fold, key_of, normed_scores, scores, weighted_mixture
from depthmix.ops.streams import weighted_sum

__all__ = [
    "ReadOptions",
    "attend",
    "check_sources",
    "fold",
    "key_of",
    "merge",
    "normed_scores",
    "read_many",
    "read_one",
    "scores",
    "sharing_pays",
    "using",
    "weighted_mixture",
]


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

    Logits are ``scale * <query, key_weight * norm(source)>``; values are the unnormalised sources.

    Args:
        sources: list of tensors ``[..., D]`` of the same shape, dtype and device (not stacked).
        query: ``[D]``, or ``[Q, D]`` for Q queries at once.
        key_weight: weight of the key norm, ``[D]`` or ``[Q, D]``; None means ones.
        normalize: False drops the RMSNorm of the key.
        eps: eps of that RMSNorm.
        scale: multiplier of the logits.

    Returns:
        ``(h, lse)``: for one query ``h [..., D]`` and the log-sum-exp of the logits ``lse [...]``; for Q queries ``h``
        is a tuple of Q tensors ``[..., D]`` and ``lse`` is ``[..., Q]``. Both are differentiable; ``lse`` is at least
        float32.
    """
    options = ReadOptions(normalize, eps, scale)
    check_sources(sources)
    check_query(query, key_weight, sources[0])
    check_options(options)
    h, lse = read_many(sources, fold(query, key_weight), options=options)
    return (h[0], lse[0]) if query.dim() == 1 else (h, torch.stack(lse, -1))


def merge(h1: Tensor, lse1: Tensor, h2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Join the results of attention over two disjoint sets of sources: exactly the attention over their union.

    Args:
        h1, h2: mixed values ``[..., D]`` of each set.
        lse1, lse2: their log-sum-exp ``[...]``, as `attend` returns them.
    """
    check_sources([h1, h2], ("h1", "h2"))
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        check_tensor(name, lse, h1)
        if lse.shape != h1.shape[:-1]:
            raise ValueError(
                f"{name} has shape {list(lse.shape)}; expected {list(h1.shape[:-1])}, one number per token"
            )
    gap = (lse1 - lse2).unsqueeze(-1)
    h = weighted_sum([h1, h2], [torch.sigmoid(gap), torch.sigmoid(-gap)])  # saves its inputs and two numbers per token
    return h, torch.logaddexp(lse1, lse2)


def check_sources(sources: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
    """Reject sources that would be silently broadcast, promoted or moved to another device."""
    if isinstance(sources, Tensor) or not len(sources):
        got = f"a tensor of shape {list(sources.shape)}" if isinstance(sources, Tensor) else "an empty list"
        raise TypeError(f"sources: got {got}; expected a list of at least one tensor [..., D]")
    names = names or [f"sources[{i}]" for i in range(len(sources))]
    first = sources[0]
    for name, v in zip(names, sources, strict=True):
        if not isinstance(v, Tensor):
            raise TypeError(f"{name} is a {type(v).__name__}; expected a tensor [..., D]")
        if not v.dim():
            raise ValueError(f"{name} has shape []; expected [..., D]")
        if v is first and not v.is_floating_point():
            raise TypeError(f"{name} has dtype {v.dtype}; expected a floating-point dtype: convert it with .float()")
        for what, value, want in (
            ("shape", list(v.shape), list(first.shape)),
            ("dtype", v.dtype, first.dtype),
            ("device", v.device, first.device),
        ):
            if value != want:
                raise ValueError(
                    f"{name} has {what} {value}, but {names[0]} has {want}; "
                    f"expected the same {what} for all: convert before the call"
                )


def check_query(query: Tensor, key_weight: Tensor | None, source: Tensor) -> None:
    check_tensor("query", query, source)
    if key_weight is not None:
        check_tensor("key_weight", key_weight, source)
    dim = source.shape[-1]
    if query.dim() not in (1, 2) or query.shape[-1] != dim:
        raise ValueError(
            f"query has shape {list(query.shape)}; expected [D] or [Q, D] with D = {dim}, the sources' width"
        )
    if key_weight is not None and (key_weight.shape[-1:] != query.shape[-1:] or key_weight.dim() > query.dim()):
        raise ValueError(f"key_weight has shape {list(key_weight.shape)}; expected [{dim}] or the query's shape")
    if key_weight is not None and key_weight.dim() == 2 and key_weight.shape != query.shape:
        raise ValueError(
            f"key_weight has shape {list(key_weight.shape)}; expected the query's shape, {list(query.shape)}"
        )


def check_options(options: ReadOptions) -> None:
    """Check by comparisons: under dynamic shapes a compiler has symbols here, for which isfinite does not work."""
    if not 0 < options.eps < math.inf:
        raise ValueError(f"eps={options.eps}; expected a finite number above 0, such as 1e-6")
    if not -math.inf < options.scale < math.inf:
        raise ValueError(f"scale={options.scale}; expected a finite number, such as 1.0")


def check_tensor(name: str, tensor: Tensor, source: Tensor) -> None:
    """Check that a query, weight or lse is floating-point and on the sources' device; its dtype may differ."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a tensor")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected a floating-point dtype: convert it with .float()")
    if tensor.device != source.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {source.device}, the sources' device")
