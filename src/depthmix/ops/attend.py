"""The public, checked forms of attention over depth: `attend` and `merge`.

Axes: ... any leading shape, D channel, Q query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops import closed, fused, native, operators, reference, traced
from depthmix.ops.backend import backend_for, chosen, takes_fused, takes_operators, traced_by_torch
from depthmix.ops.streams import weighted_sum


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
    check_beside("query", query, sources[0])
    if key_weight is not None:
        check_beside("key_weight", key_weight, sources[0])
    if query.dim() not in (1, 2) or query.shape[-1] != dim:
        raise ValueError(f"query has shape {list(query.shape)}; expected [D] or [Q, D] with D = {dim}, as the sources")
    if key_weight is not None and (key_weight.shape[-1:] != query.shape[-1:] or key_weight.dim() > query.dim()):
        raise ValueError(f"key_weight has shape {list(key_weight.shape)}; expected [{dim}] or that of the query")
    if key_weight is not None and key_weight.dim() == 2 and key_weight.shape != query.shape:
        raise ValueError(f"key_weight has shape {list(key_weight.shape)}; expected the query's, {list(query.shape)}")
    if not 0 < eps < math.inf:  # comparisons: a compiler for dynamic shapes has no number here to ask isfinite of
        raise ValueError(f"eps={eps}; expected a finite number above 0, such as 1e-6")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale={scale}; expected a finite number, such as 1.0")
    folded = reference.fold(query, key_weight, sources[0].dtype)
    h, lse = mixtures(sources, folded, normalize=normalize, eps=eps, scale=scale)
    return (h[0], lse[0]) if query.dim() == 1 else (h, torch.stack(lse, -1))


def mixtures(
    sources: Sequence[Tensor],
    folded: Tensor,
    prior: tuple[Tensor, Tensor] | None = None,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float = 1.0,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """`attend` without its checks, for queries [Q, D] that `fold` made: Q mixtures and their Q log-sum-exps.

    With one query a prior may join, the result (h, lse) over other sources: phase 2 of the two-phase computation.
    """
    if traced_by_torch():
        form = operators if takes_operators([*sources, folded, *(prior or ())]) else traced
        return form.attend(sources, folded, prior, normalize=normalize, eps=eps, scale=scale)
    if chosen() == "reference":
        return reference.attend(sources, folded, prior, normalize=normalize, eps=eps, scale=scale)
    h, lse = prior or (None, None)
    out = Attend.apply(normalize, eps, scale, folded.contiguous(), h, lse, *sources)
    queries = folded.shape[0]
    return out[:queries], out[queries:]


def mixture(
    sources: Sequence[Tensor], folded: Tensor, *, normalize: bool = True, eps: float = 1e-6, scale: float = 1.0
) -> Tensor:
    """A single read: the mixture of one folded query [1, D], where nobody asks for its log-sum-exp.

    Apart from `mixtures` because a kernel that gives no log-sum-exp can serve it.
    """
    if not traced_by_torch() and takes_fused(sources, folded, normalize=normalize):
        return fused.mixture(sources, folded, eps=eps, scale=scale)
    (h,), _ = mixtures(sources, folded, normalize=normalize, eps=eps, scale=scale)
    return h


class Attend(torch.autograd.Function):
    """Keeps references to the sources and numbers per token; recomputes everything of width D."""

    @staticmethod
    def forward(
        ctx: Any,
        normalize: bool,
        eps: float,
        scale: float,
        folded: Tensor,
        prior: Tensor | None,
        prior_lse: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        backend = backend_for([*sources, folded, *(t for t in (prior, prior_lse) if t is not None)])
        h, lse, rstd, weights = backend.forward(
            sources, folded, prior, prior_lse, normalize=normalize, eps=eps, scale=scale
        )
        ctx.options = {"normalize": normalize, "eps": eps, "scale": scale}
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(folded, rstd, weights, lse, None if prior is None else h[0], prior_lse, *sources)
        return (*h, *lse.unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        folded, rstd, weights, lse, h, prior_lse, *sources = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of the backward pass is wanted
            if prior_lse is not None:
                raise RuntimeError(
                    "second derivatives of a two-phase read are not there: what they need is not kept. "
                    "Run the forward pass within depthmix.ops.using('reference')"
                )
            return (*[None] * 3, *differentiable_backward(ctx.options, folded, sources, grads))
        queries = folded.shape[0]
        options = {key: ctx.options[key] for key in ("normalize", "scale")}
        dense = [None if g is None else g.contiguous() for g in grads]
        fits = native.fits([folded, *(g for g in dense if g is not None)])
        backend = ctx.backend if fits else closed
        of_sources, of_folded, of_prior, of_lse = backend.backward(
            sources, folded, h, prior_lse, rstd, weights, lse, dense[:queries], dense[queries:], **options
        )
        return (*[None] * 3, of_folded, of_prior, of_lse, *of_sources)


def differentiable_backward(
    options: dict[str, Any], folded: Tensor, sources: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """The same gradients from the plain form, with a graph: its own derivative is the second one."""
    h, lse = reference.attend(sources, folded, **options)
    outputs = [(out, g) for out, g in zip((*h, *lse), grads, strict=True) if g is not None]
    inputs = [t for t in (folded, *sources) if t.requires_grad]
    found = iter(
        torch.autograd.grad(
            [out for out, _ in outputs], inputs, [g for _, g in outputs], create_graph=True, allow_unused=True
        )
    )
    of_folded, *of_sources = (next(found) if t.requires_grad else None for t in (folded, *sources))
    return (of_folded, None, None, *of_sources)


def merge(h1: Tensor, lse1: Tensor, h2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of sources: the result of attending over their union, exactly.

    Args:
        h1, h2: mixed values ``[..., D]`` over either set.
        lse1, lse2: their log-sum-exp ``[...]``, as `attend` returns them.
    """
    check_sources([h1, h2], ("h1", "h2"))
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        check_beside(name, lse, h1)
        if lse.shape != h1.shape[:-1]:
            raise ValueError(f"{name} has shape {list(lse.shape)}; expected {list(h1.shape[:-1])}, one number a token")
    gap = (lse1 - lse2).unsqueeze(-1)
    h = weighted_sum([h1, h2], [torch.sigmoid(gap), torch.sigmoid(-gap)])  # keeps its inputs and two numbers a token
    return h, torch.logaddexp(lse1, lse2)


def check_sources(sources: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
    """Refuse anything that would be broadcast, promoted or moved silently."""
    if isinstance(sources, Tensor) or not len(sources):
        got = f"a tensor of shape {list(sources.shape)}" if isinstance(sources, Tensor) else "no source at all"
        raise TypeError(f"sources: got {got}; expected a list of at least one tensor [..., D]")
    names = names or [f"sources[{i}]" for i in range(len(sources))]
    first = sources[0]
    for name, v in zip(names, sources, strict=True):
        if not isinstance(v, Tensor):
            raise TypeError(f"{name} is a {type(v).__name__}; expected a tensor [..., D]")
        if not v.dim():
            raise ValueError(f"{name} has shape []; expected [..., D]")
        if v is first and not v.is_floating_point():
            raise TypeError(f"{name} has dtype {v.dtype}; expected a floating dtype: convert it with .float()")
        for what, own, want in (
            ("shape", list(v.shape), list(first.shape)),
            ("dtype", v.dtype, first.dtype),
            ("device", v.device, first.device),
        ):
            if own != want:
                raise ValueError(
                    f"{name} has {what} {own}, but {names[0]} has {want}; expected one for all: convert before the call"
                )


def check_beside(name: str, tensor: Tensor, source: Tensor) -> None:
    """What weighs the sources is floating and lives where they do; its dtype may differ."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a tensor")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected a floating dtype: convert it with .float()")
    if tensor.device != source.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {source.device}, as the sources")
