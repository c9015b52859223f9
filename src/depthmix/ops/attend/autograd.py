"""The closed forms (native/ and torch_form.py) as one autograd function.

A closed form is a module with two functions. `forward` returns the mixtures, log-sum-exps and a few numbers per token;
`backward` computes the gradients from these, the sources and the incoming gradients. The module is chosen before the
forward pass and used for both passes.

Axes: ... any leading shape, D channel, Q query.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.attend import reference
from depthmix.ops.attend.options import ReadOptions


class Attend(torch.autograd.Function):
    """Saves references to the sources and a few numbers per token; recomputes everything of width D."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: ModuleType,
        options: ReadOptions,
        folded: Tensor,
        prior: Tensor | None,
        prior_lse: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        h, lse, rstd, weights = backend.forward(sources, folded, prior, prior_lse, options)
        ctx.backend, ctx.options = backend, options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(folded, rstd, weights, lse, None if prior is None else h[0], prior_lse, *sources)
        return (*h, *lse.unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        folded, rstd, weights, lse, h, prior_lse, *sources = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            if prior_lse is not None:
                raise RuntimeError(
                    "second derivatives of a two-phase read are not supported (the tensors they need are not saved). "
                    "Run the forward pass within depthmix.ops.using('reference')"
                )
            return None, None, *differentiable_backward(ctx.options, folded, sources, grads)
        queries = folded.shape[0]
        dense = [None if g is None else g.contiguous() for g in grads]
        of_sources, of_folded, of_prior, of_lse = ctx.backend.backward(
            sources, folded, h, prior_lse, rstd, weights, lse, dense[:queries], dense[queries:], ctx.options
        )
        return None, None, of_folded, of_prior, of_lse, *of_sources


def differentiable_backward(
    options: ReadOptions, folded: Tensor, sources: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """The same gradients from the plain form, with a graph: differentiating it gives the second derivatives."""
    h, lse = reference.attend(sources, folded, options=options)
    outputs = [(out, g) for out, g in zip((*h, *lse), grads, strict=True) if g is not None]
    inputs = [t for t in (folded, *sources) if t.requires_grad]
    gradients = iter(
        torch.autograd.grad(
            [out for out, _ in outputs], inputs, [g for _, g in outputs], create_graph=True, allow_unused=True
        )
    )
    of_folded, *of_sources = (next(gradients) if t.requires_grad else None for t in (folded, *sources))
    return of_folded, None, None, *of_sources
