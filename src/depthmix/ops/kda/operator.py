"""The chunkwise form as one custom operator: a compiler calls it without tracing into its loop over chunks.

The backward pass saves q, k, v, β and documents by reference, and in the accumulator's dtype G, Δ, the states before
each chunk and two products of pairs: per token and head K + V + K·V/C + 2·C numbers (`saved_bytes`).

Axes: B batch, H head, T token, N chunk, C token of a chunk, M = B·H·N, K channel of a key, V channel of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from depthmix.ops.kda import chunkwise
from depthmix.ops.kda.chunkwise import Saved
from depthmix.ops.streams import common_accumulator

FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state, Tensor? documents, int chunk) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor grad, Tensor? grad_state, Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? documents, Tensor G, "
    "Tensor states, Tensor delta, Tensor products) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("depthmix::kda", mutates_args=(), schema=FORWARD)
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, documents: Tensor | None, chunk: int
) -> tuple[Tensor, ...]:
    """o, the last state, and the fields of `Saved`."""
    o, last, saved = chunkwise.forward(q, k, v, g, beta, state, documents, chunk)
    return o, last, *saved


@torch.library.custom_op("depthmix::kda_backward", mutates_args=(), schema=BACKWARD)
def backward_op(
    grad: Tensor,
    grad_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    documents: Tensor | None,
    G: Tensor,
    states: Tensor,
    delta: Tensor,
    products: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, β and the first state, in the accumulator's dtype."""
    return chunkwise.backward(grad, grad_state, q, k, v, beta, documents, Saved(G, states, delta, products))


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Any, documents: Any, chunk: int) -> Any:
    (B, H, T, K), V = k.shape, v.shape[3]
    N = (T + chunk - 1) // chunk
    M, dtype = B * H * N, common_accumulator(q, k, v, g, beta, state)
    sizes = ((B, H, K, V), (M, chunk, K), (B * H, N + 1, K, V), (M, chunk, V), (M, 2, chunk, chunk))
    return v.new_empty(B, H, T, V), *(v.new_empty(size, dtype=dtype) for size in sizes)


@backward_op.register_fake
def _(
    grad: Any, grad_state: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, documents: Any, G: Tensor, *_: Any
) -> Any:
    sizes = (q.shape, k.shape, v.shape, k.shape, beta.shape, (*k.shape[:2], k.shape[3], v.shape[3]))
    return tuple(G.new_empty(size) for size in sizes)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, g, beta, state, documents, _ = inputs
    ctx.dtypes = [None if x is None else x.dtype for x in (q, k, v, g, beta, state)]
    ctx.save_for_backward(q, k, v, beta, documents, *output[2:])


def backward(ctx: Any, grad: Tensor, grad_state: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, beta, documents, *saved = ctx.saved_tensors
    gradients = backward_op(grad, grad_state, q, k, v, beta, documents, *saved)
    wanted = zip(gradients, ctx.dtypes, ctx.needs_input_grad, strict=False)
    return *(x.to(dtype) if needed else None for x, dtype, needed in wanted), None, None


def no_second_derivatives(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "double backward is not supported by the chunkwise form of kda (the tensors it needs are not saved). "
        "Run the forward pass within depthmix.ops.using('reference')"
    )


forward_op.register_autograd(backward, setup_context=save_for_backward)
backward_op.register_autograd(no_second_derivatives)
