"""Kimi Delta Attention (arXiv 2510.26692): linear attention with a delta rule and a decay of every channel.

reference.py   the recurrence, token by token: the ground truth, and the fastest form for a few tokens
chunkwise.py   all tokens of a chunk at once, with gradients written out; operator.py makes it an operator of torch
gates.py       the log decay, and the norm of queries and keys

This file defines the public function `kda`, which checks its arguments and chooses the form.

Axes: B batch, H head, T token, K channel of a key, V channel of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthmix.ops.backend import chosen, functional
from depthmix.ops.kda import reference
from depthmix.ops.kda.gates import log_decay, unit_vectors
from depthmix.ops.streams import common_accumulator

__all__ = ["kda", "log_decay", "saved_bytes", "unit_vectors"]

CHUNK = 64  # tokens
FEW = 16  # new tokens up to which the recurrence is faster than a chunk


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention over the tokens of every head.

    For every token: ``S ← Diag(e^g) S``;  ``δ = β (v − Sᵀk)``;  ``S ← S + k δᵀ``;  ``o = K^(−1/2) Sᵀq``. Everything is
    computed in float32 at least and differentiable, once: double backward needs ``using("reference")``.

    Args:
        q, k: queries and keys ``[B, H, T, K]``, both of length about 1 (`unit_vectors`). Longer keys or a β outside
            of [0, 1] make the recurrence, and with it the chunkwise form, unstable.
        v: values ``[B, H, T, V]``.
        g: log decay of every channel ``[B, H, T, K]``, finite and at most 0 (`log_decay`).
        beta: step of the delta rule ``[B, H, T]``. A token with β = 0 and g = 0 leaves the state as it is.
        state: state before the first token ``[B, H, K, V]``; None for zeros.
        documents: ``[B, T]`` indices of packed documents: each starts from an empty state. The given state belongs to
            the document of the first token.

    Returns:
        ``(o, state)``: ``o [B, H, T, V]`` in the dtype of v, and the state after the last token ``[B, H, K, V]`` in
        float32 at least.
    """
    check_shapes(q, k, v, g, beta)
    check_state(state, q, v)
    check_documents(documents, q)
    if recurrent(q.shape[2]) or 0 in q.shape[:2]:
        dtype, narrow = common_accumulator(q, k, v, g, beta, state), v.dtype
        q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
        o, last = reference.kda(q, k, v, g, beta, None if state is None else state.to(dtype), documents)
        return o.to(narrow), last
    from depthmix.ops.kda.operator import forward_op  # here, or `import depthmix` would take longer

    size = CHUNK if q.shape[2] > CHUNK // 2 else CHUNK // 2
    o, last, *_ = forward_op(q, k, v, g, beta, state, documents, size)
    return o, last


def recurrent(tokens: int) -> bool:
    """Whether the recurrence computes this: for few tokens, on demand, and where an operator cannot be used.

    Functional transforms need derivatives of any order, and an exported program must run without depthmix.
    """
    if tokens <= FEW or functional() or torch.compiler.is_exporting():
        return True
    return not torch.compiler.is_compiling() and chosen() == "reference"  # a compiler cannot trace `chosen`


def saved_bytes(key: int, value: int, chunk: int = CHUNK, itemsize: int = 4) -> float:
    """Bytes per token and head that the backward pass needs besides the inputs: G, Δ, the states, a and P."""
    return itemsize * (key + value + key * value / chunk + 2 * chunk)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    if q.dim() != 4 or not q.shape[2] or not q.shape[3]:
        raise ValueError(f"q has shape {list(q.shape)}; expected [B, H, T, K] with at least one token and one channel")
    B, H, T, K = q.shape
    V = v.shape[3] if v.dim() == 4 else "V"
    for name, x, want in (
        ("k", k, [B, H, T, K]),
        ("v", v, [B, H, T, V]),
        ("g", g, [B, H, T, K]),
        ("beta", beta, [B, H, T]),
    ):
        if list(x.shape) != want:
            raise ValueError(f"{name} has shape {list(x.shape)}; expected {want}, as q has shape {list(q.shape)}")
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        check_numbers(name, x, q)


def check_state(state: Tensor | None, q: Tensor, v: Tensor) -> None:
    if state is None:
        return
    want = [*q.shape[:2], q.shape[3], v.shape[3]]
    if list(state.shape) != want:
        raise ValueError(f"state has shape {list(state.shape)}; expected [B, H, K, V], here {want}")
    check_numbers("state", state, q)


def check_numbers(name: str, x: Tensor, q: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} has dtype {x.dtype}; expected a floating-point dtype: convert it with .float()")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}; expected {q.device}, the device of q")


def check_documents(documents: Tensor | None, q: Tensor) -> None:
    if documents is None:
        return
    want = [q.shape[0], q.shape[2]]
    if list(documents.shape) != want or documents.is_floating_point():
        raise ValueError(
            f"documents is {documents.dtype} of shape {list(documents.shape)}; expected integers [B, T], here {want}"
        )
