"""The forms for compilers and functional transforms: plain operations, or the native read as a custom operator.

The plain operations are in the form that compilers fuse best: sums along a row, without normalised keys or matmuls. A
compiler fuses the norm of a source and all its logits into one loop; a matrix product would need the normalised keys in
memory first. Any transform of torch can differentiate this form.

A compiler calls the custom operator without tracing into it. Its backward pass saves what that of the eager read
saves: references to the sources and a few numbers per token. Its arguments are those that torch's schemas support:
plain numbers instead of `ReadOptions`.

Axes: ... any leading shape, D channel, S source, Q query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.attend import native
from depthmix.ops.attend.options import DEFAULT, ReadOptions
from depthmix.ops.attend.reference import Reads, join
from depthmix.ops.reference import rms_parts, wide

FORWARD = "(Tensor[] v, Tensor c, Tensor? prior, Tensor? prior_lse, bool normalize, float eps, float scale) -> Tensor[]"
BACKWARD = (
    "(Tensor[] v, Tensor c, Tensor? h, Tensor? prior_lse, Tensor rstd, Tensor weights, Tensor lse, Tensor?[] grad_h, "
    "Tensor? grad_lse, bool normalize, float scale) -> Tensor[]"
)


def attend(
    sources: Sequence[Tensor],
    folded: Tensor,
    prior: tuple[Tensor, Tensor] | None = None,
    options: ReadOptions = DEFAULT,
) -> Reads:
    """The same as `reference.attend`, in plain operations."""
    return join(sources, torch.stack([logits(v, folded, options) for v in sources], -1), prior)


def logits(v: Tensor, folded: Tensor, options: ReadOptions) -> Tensor:
    """Logits [..., Q] of one source."""
    u, r = rms_parts(v, options.eps)[:2] if options.normalize else (wide(v), 1.0)
    return options.scale * r * torch.stack([(u * c).sum(-1) for c in folded.unbind(0)], -1)


def attend_by_operator(
    sources: Sequence[Tensor],
    folded: Tensor,
    prior: tuple[Tensor, Tensor] | None = None,
    options: ReadOptions = DEFAULT,
) -> Reads:
    """The same as `reference.attend`, computed by the native kernel."""
    queries = folded.shape[0]
    h, lse = prior or (None, None)
    out = forward_op(list(sources), folded.contiguous(), h, lse, options.normalize, options.eps, options.scale)
    return tuple(out[:queries]), out[queries].unbind(0)


@torch.library.custom_op("depthmix::attend", mutates_args=(), schema=FORWARD)
def forward_op(
    v: Sequence[Tensor],
    c: Tensor,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    normalize: bool,
    eps: float,
    scale: float,
) -> list[Tensor]:
    """[h of each query, lse [Q, ...], 1/rms [..., S], weights [..., Q, S]]."""
    v, (c, prior, prior_lse) = dense(v), dense([c, prior, prior_lse])
    h, lse, rstd, weights = native.forward(v, c, prior, prior_lse, ReadOptions(normalize, eps, scale))
    return [*h, lse, rstd, weights]


@torch.library.custom_op("depthmix::attend_backward", mutates_args=(), schema=BACKWARD)
def backward_op(
    v: Sequence[Tensor],
    c: Tensor,
    h: Tensor | None,
    prior_lse: Tensor | None,
    rstd: Tensor,
    weights: Tensor,
    lse: Tensor,
    grad_h: Sequence[Tensor | None],
    grad_lse: Tensor | None,
    normalize: bool,
    scale: float,
) -> list[Tensor]:
    """Gradients of each source and of c; with a prior, of its mixture and its log-sum-exp too."""
    of_lse = [None] * len(c) if grad_lse is None else list(grad_lse.contiguous().unbind(0))
    v, grad_h, (c, h, prior_lse) = dense(v), dense(grad_h), dense([c, h, prior_lse])
    rstd, weights, lse = dense([rstd, weights, lse])
    options = ReadOptions(normalize, scale=scale)
    of_v, *rest = native.backward(v, c, h, prior_lse, rstd, weights, lse, grad_h, of_lse, options)
    return [*of_v, *(gradient for gradient in rest if gradient is not None)]


def dense(tensors: Sequence[Tensor | None]) -> list[Any]:
    return [None if t is None else t.contiguous() for t in tensors]


@forward_op.register_fake
def _(v: Sequence[Tensor], c: Tensor, prior: Any, prior_lse: Any, *options: Any) -> list[Tensor]:
    lead, queries = v[0].shape[:-1], c.shape[0]
    numbers = [(queries, *lead), (*lead, len(v)), (*lead, queries, len(v))]
    return [*(v[0].new_empty(v[0].shape) for _ in range(queries)), *map(v[0].new_empty, numbers)]


@backward_op.register_fake
def _(v: Sequence[Tensor], c: Tensor, h: Any, prior_lse: Tensor | None, *rest: Any) -> list[Tensor]:
    inputs = [*v, c] if prior_lse is None else [*v, c, v[0], prior_lse]
    return [t.new_empty(t.shape) for t in inputs]


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    v, c, prior, prior_lse, ctx.normalize, _, ctx.scale = inputs
    *h, lse, rstd, weights = output
    ctx.save_for_backward(*v, c, None if prior is None else h[0], prior_lse, rstd, weights, lse)


def backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    *v, c, h, prior_lse, rstd, weights, lse = ctx.saved_tensors
    *grad_h, grad_lse, _, _ = grads
    gradients = backward_op(v, c, h, prior_lse, rstd, weights, lse, grad_h, grad_lse, ctx.normalize, ctx.scale)
    of_v, (of_c, *of_prior) = gradients[: len(v)], gradients[len(v) :]
    return of_v, of_c, *(of_prior or [None, None]), None, None, None


forward_op.register_autograd(backward, setup_context=save_for_backward)
