"""What fla-core says of `fla.ops.attnres.fused_attnres`, in plain torch for a machine without a GPU.

The contract: arguments by these names and in this order; all arithmetic in float32, one rounding to the dtype of the
sources; sources that begin at multiples of 16 bytes; a backward pass of its own that has no graph, so that a second
derivative lacks terms without a word. tests/conformance compares it with fla-core's own files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, scale: float, query: Tensor, weight: Tensor, *sources: Tensor) -> Any:
        ctx.options = eps, scale
        ctx.save_for_backward(query, weight, *sources)
        h, weights = plain(eps, scale, query, weight, *sources)
        ctx.mark_non_differentiable(weights)
        return h, weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            h, _ = plain(*ctx.options, *leaves)
            return None, None, *torch.autograd.grad(h, leaves, grad)


def plain(eps: float, scale: float, query: Tensor, weight: Tensor, *sources: Tensor) -> tuple[Tensor, Tensor]:
    logits = []
    for v in sources:
        rms = (v.float().square().mean(-1, keepdim=True) + eps).sqrt()
        logits.append(scale * (v.float() / rms * weight.float() * query.float()).sum(-1))
    weights = torch.stack(logits).softmax(0)
    h = sum(a.unsqueeze(-1) * v.float() for a, v in zip(weights, sources, strict=True))
    assert isinstance(h, Tensor)
    return h.to(sources[0].dtype), weights


def fused_attnres(
    query: Tensor,
    residuals: Sequence[Tensor],
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    checkpoint_level: int = 1,
) -> Any:
    assert output_rms_weight is None, "the stand-in has no second norm"
    flat = [v.reshape(-1, v.shape[-1]).contiguous() for v in residuals]
    for v in flat:
        assert v.data_ptr() % 16 == 0, "attnres residual sources must be 16-byte aligned"
    h, weights = Read.apply(rms_eps, scale, query.flatten(), rms_weight.flatten(), *flat)
    h = h.view(residuals[0].shape)
    return (h, weights.view(len(residuals), *residuals[0].shape[:-1])) if return_weights else h
