"""Reads and writes of streams, and projections of norms, that save only their inputs and a few numbers per token.

Each equals its plain form to rounding. The only tensors of width D saved for the backward pass are references to the
inputs. Products over streams are batched [M, M] x [M, D] products.

Axes: ... any leading shape, D channel, H head, M stream, R row of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops import reference
from depthmix.ops.backend import plain_wanted
from depthmix.ops.reference import accumulator, full_precision, wide


def normed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """weight @ norm(x) + bias for weight [R, D], in the accumulator's dtype; norm(x) itself is never materialised."""
    if plain_wanted():
        return reference.linear(reference.rms_norm(x, eps), weight, bias)
    z: Tensor = NormedLinear.apply(x, weight, eps)
    return z if bias is None else z + bias.to(z.dtype)


def head_products(x: Tensor, weight: Tensor, head_dim: int, *, eps: float) -> Tensor:
    """⟨weight ⊙ u, u⟩ for each head [..., H], u = norm(x) and weight [D], in the accumulator's dtype."""
    if plain_wanted():
        return plain_head_products(x, weight, head_dim, eps)
    out: Tensor = HeadProducts.apply(x, weight, head_dim, eps)
    return out


def read_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """Σ_m weights[..., m] streams[..., m, :]."""
    if plain_wanted():
        return reference.read_streams(streams, weights)
    h: Tensor = ReadStreams.apply(streams, weights)
    return h


def write_streams(streams: Tensor, transition: Tensor | None, gain: Tensor, y: Tensor) -> Tensor:
    """streams[i] ← Σ_j transition[..., i, j] streams[j] + gain[..., i] y.

    A transition with one axis fewer is diagonal; None is the identity.
    """
    if plain_wanted():
        return reference.write_streams(streams, transition, gain, y)
    out: Tensor = WriteStreams.apply(streams, transition, gain, y)
    return out


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Tensor:
    """Σ weights[i] ⊙ tensors[i] with weights that broadcast over channels; None means 1."""
    if plain_wanted() or not any(w is not None for w in weights):  # a plain sum saves nothing anyway
        return reference.weighted_sum(tensors, weights)
    out: Tensor = WeightedSum.apply(len(tensors), *tensors, *weights)
    return out


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """`reference.inverse_rms`, in one pass where no square overflows; checking that is cheap only on a CPU."""
    if x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter):
        square = torch.linalg.vector_norm(wide(x), dim=-1, keepdim=True).square_()
        if bool(square.isfinite().all()):
            return square.div_(x.shape[-1]).add_(eps).rsqrt_()
    return reference.inverse_rms(x, eps)


def norm_factors(x: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """u and r with norm(x) = r u, where r · rstd does not underflow: x and rstd (no pass over x) if possible.

    Checking whether that is possible is cheap only on a CPU.
    """
    plain = x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)
    if plain and bool((rstd > torch.finfo(rstd.dtype).tiny ** 0.25).all()):
        return wide(x), rstd
    return wide(x) * rstd, torch.ones_like(rstd)


def plain_head_products(x: Tensor, weight: Tensor, head_dim: int, eps: float) -> Tensor:
    u = reference.rms_norm(x, eps)
    return (u * weight * u).unflatten(-1, (-1, head_dim)).sum(-1)


def differentiable_gradients(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the plain form, with a graph: differentiating it gives the second derivatives."""
    with torch.enable_grad():
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        gradients = iter(torch.autograd.grad(plain(*inputs), wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(gradients) if t is not None and t.requires_grad else None for t in inputs)


def common_accumulator(*tensors: Tensor | None) -> torch.dtype:
    """The dtype in which operations on all these tensors are accumulated."""
    dtype = torch.float32
    for t in tensors:
        dtype = dtype if t is None else torch.promote_types(dtype, accumulator(t.dtype))
    return dtype


def like(grad: Tensor, tensor: Tensor) -> Tensor:
    """A gradient in its tensor's shape and dtype: summed where the tensor was broadcast, rounded once."""
    return grad.sum_to_size(tensor.shape).to(tensor.dtype)


def rows(weights: Tensor, streams: Tensor) -> Tensor:
    """Weights [..., M] as matrices [..., 1, M] that multiply streams; expanded, or matmul would copy the streams."""
    return weights.expand(torch.broadcast_shapes(weights.shape, streams.shape[:-1])).unsqueeze(-2)


def dots(streams: Tensor, vector: Tensor) -> Tensor:
    """⟨streams[..., m, :], vector⟩ as [..., M]; row times matrix is several times faster than matrix times column."""
    return (vector.unsqueeze(-2) @ streams.mT).squeeze(-2)


class NormedLinear(torch.autograd.Function):
    """z = r (W x) with r = 1/rms(x). Saves x, W, r and z."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = inverse_rms(x, eps)
        z = reference.linear(x, weight).mul_(rstd)
        ctx.save_for_backward(x, weight, rstd, z)
        ctx.eps = eps
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, rstd, z = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = lambda x, weight: reference.linear(reference.rms_norm(x, ctx.eps), weight)  # noqa: E731
            return (*differentiable_gradients(plain, (x, weight), grad), None)
        u, r = norm_factors(x, rstd)
        of_x = of_weight = None
        with full_precision(x.device):
            if ctx.needs_input_grad[0]:
                pull = (grad * z).sum(-1, keepdim=True) * (rstd / -x.shape[-1]) * r
                of_x = ((grad * rstd) @ weight.to(rstd.dtype)).addcmul_(u, pull).to(x.dtype)
            if ctx.needs_input_grad[1]:
                of_weight = (grad * r).reshape(-1, grad.shape[-1]).T @ u.reshape(-1, x.shape[-1])
                of_weight = of_weight.to(weight.dtype)
        return of_x, of_weight, None


class HeadProducts(torch.autograd.Function):
    """s_h = Σ_{d in h} w_d u_d² with u = norm(x). Saves x, w, 1/rms(x) and s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, head_dim: int, eps: float) -> Tensor:
        rstd = inverse_rms(x, eps)
        u = wide(x) * rstd
        products = u.square_().mul_(weight.to(u.dtype)).unflatten(-1, (-1, head_dim)).sum(-1)
        ctx.save_for_backward(x, weight, rstd, products)
        ctx.options = (head_dim, eps)
        return products

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, rstd, products = ctx.saved_tensors
        head_dim, eps = ctx.options
        if torch.is_grad_enabled():
            plain = lambda x, weight: plain_head_products(x, weight, head_dim, eps)  # noqa: E731
            return (*differentiable_gradients(plain, (x, weight), grad), None, None)
        u = (wide(x) * rstd).unflatten(-1, (-1, head_dim))  # [..., H, D/H]
        slope = grad.unsqueeze(-1)
        of_weight = like((u.square() * slope).flatten(-2), weight)
        pull = (grad * products).sum(-1, keepdim=True).unsqueeze(-1) / x.shape[-1]
        heads = weight.to(u.dtype).unflatten(-1, (-1, head_dim))
        of_x = u.mul_(heads * slope - pull).flatten(-2).mul_(2 * rstd)
        return of_x.to(x.dtype), of_weight, None, None


class ReadStreams(torch.autograd.Function):
    """Saves the streams and the weights."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(streams, weights)
        dtype = common_accumulator(streams, weights)
        with full_precision(streams.device):
            return (rows(weights.to(dtype), streams) @ streams.to(dtype)).squeeze(-2).detach().to(streams.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        streams, weights = ctx.saved_tensors
        dtype = common_accumulator(streams, weights)
        g, of_streams, of_weights = grad.to(dtype), None, None
        with full_precision(streams.device):
            if ctx.needs_input_grad[0]:
                of_streams = like(weights.to(dtype).unsqueeze(-1) * g.unsqueeze(-2), streams)
            if ctx.needs_input_grad[1]:
                of_weights = like(dots(streams.to(dtype), g), weights)
        return of_streams, of_weights


class WriteStreams(torch.autograd.Function):
    """Saves the streams before the write, y and the coefficients."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, transition: Tensor | None, gain: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(streams, transition, gain, y)
        dtype = common_accumulator(streams, transition, gain, y)
        with full_precision(streams.device):
            kept = apply_transition(streams.to(dtype), transition, gain)
        return torch.addcmul(kept, gain.to(dtype).unsqueeze(-1), y.to(dtype).unsqueeze(-2)).to(streams.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        streams, transition, gain, y = ctx.saved_tensors
        dtype = common_accumulator(streams, transition, gain, y)
        g = grad.to(dtype)
        of_streams = of_transition = of_gain = of_y = None
        with full_precision(streams.device):
            if ctx.needs_input_grad[0]:
                back = transition if transition is None or transition.dim() == gain.dim() else transition.mT
                of_streams = like(apply_transition(g, back, gain), streams)
            if transition is not None and ctx.needs_input_grad[1]:
                held = streams.to(dtype)
                diagonal = transition.dim() == gain.dim()
                of_transition = like((g * held).sum(-1) if diagonal else g @ held.mT, transition)
            if ctx.needs_input_grad[2]:
                of_gain = like(dots(g, y.to(dtype)), gain)
            if ctx.needs_input_grad[3]:
                of_y = like((rows(gain.to(dtype), g) @ g).squeeze(-2), y)
        return of_streams, of_transition, of_gain, of_y


def apply_transition(streams: Tensor, transition: Tensor | None, gain: Tensor) -> Tensor:
    """The streams after a transition: a matrix, a diagonal or None for the identity."""
    if transition is None:
        return streams
    transition = transition.to(streams.dtype)
    if transition.dim() == gain.dim():
        return transition.unsqueeze(-1) * streams
    lead = torch.broadcast_shapes(transition.shape[:-2], streams.shape[:-2])
    return transition.expand(*lead, *transition.shape[-2:]) @ streams


class WeightedSum(torch.autograd.Function):
    """Saves the weights and the tensors that have one."""

    @staticmethod
    def forward(ctx: Any, count: int, *inputs: Tensor | None) -> Tensor:
        tensors, weights = inputs[:count], inputs[count:]
        ctx.save_for_backward(*(None if w is None else x for x, w in zip(tensors, weights, strict=True)), *weights)
        ctx.count, ctx.layouts = count, [(x.shape, x.dtype) for x in tensors if x is not None]
        return reference.weighted_sum(tensors, weights)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        tensors, weights = saved[: ctx.count], saved[ctx.count :]
        g = wide(grad)
        of_tensors: list[Tensor | None] = []
        of_weights: list[Tensor | None] = []
        for i, (x, w, (shape, dtype)) in enumerate(zip(tensors, weights, ctx.layouts, strict=True)):
            of_tensor, of_weight = ctx.needs_input_grad[1 + i], ctx.needs_input_grad[1 + ctx.count + i]
            of_tensors.append((g if w is None else g * w).sum_to_size(shape).to(dtype) if of_tensor else None)
            of_weights.append(like(g * x, w) if of_weight else None)
        return (None, *of_tensors, *of_weights)
