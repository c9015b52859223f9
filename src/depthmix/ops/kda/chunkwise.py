"""Kimi Delta Attention in chunks (arXiv 2510.26692, equations 2 to 9), and its gradients written out.

Within a chunk, G_t = Σ_{j≤t} g_j, S is the state before it and s = K^(−1/2):

    a_ti = Σ_c k_tc k_ic e^{G_tc − G_ic}  (i < t)      P_ti = s Σ_c q_tc k_ic e^{G_tc − G_ic}  (i ≤ t)
    K̂ = e^G ⊙ K,  Q̂ = s e^G ⊙ Q,  K̄ = e^{G_C − G} ⊙ K,  X = (I + Diag(β) a)^{−1},  W = X Diag(β) K̂
    Δ = X Diag(β) V − W S;   O = Q̂ S + P Δ;   S' = Diag(e^{G_C}) S + K̄ᵀ Δ

Only Δ and S' are computed chunk by chunk, everything else for all chunks at once. The last chunk is filled with tokens
that change nothing: k = 0, β = 0, g = 0. Documents multiply by constants: a and P where a pair is of one document, K̂
and Q̂ where a token is of the state's document, K̄ where it is of the last token's, e^{G_C} where these two are one.

Axes: B batch, H head, T token, N chunk, C token of a chunk, M = B·H·N, K channel of a key, V channel of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthmix.ops.kda.blocks import inverse
from depthmix.ops.kda.layout import before, by_chunk, chunks, decays, in_chunks, joined
from depthmix.ops.kda.pairs import pair_gradients, pair_products, safe_block
from depthmix.ops.reference import full_precision
from depthmix.ops.streams import common_accumulator

CHUNK = 64


class Saved(NamedTuple):
    """What the backward pass needs besides the inputs q, k, v, β and documents."""

    G: Tensor  # [M, C, K]
    states: Tensor  # [B·H, N + 1, K, V], before each chunk and after the last
    delta: Tensor  # Δ [M, C, V]
    products: Tensor  # a and P [M, 2, C, C]


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, documents: Tensor | None, size: int
) -> tuple[Tensor, Tensor, Saved]:
    """o [B, H, T, V] in v's dtype, the last state in the accumulator's, and what the backward pass needs."""
    dtype = common_accumulator(q, k, v, g, beta, state)
    with full_precision(q.device):
        keys_queries, values, b, masks = in_chunks(q, k, v, beta, documents, size, dtype)
        G = chunks(g, size, dtype).cumsum(-2)
        keys = keys_queries[:, 0]
        products = pair_products(keys_queries, keys, G, safe_block(G))
        products[:, 0].diagonal(dim1=-2, dim2=-1).zero_()
        if masks is not None:
            products.mul_(masks.same)
        up, down, last = decays(G, masks)
        bars = keys * down
        hats = keys_queries.mul_(up.unsqueeze(1))  # in place: from here on the keys are needed no more
        X = inverse(b * products[:, 0]).mul_(b.mT)
        delta = X @ values
        first = values.new_zeros(k.shape[0] * k.shape[1], k.shape[3], v.shape[3])
        if state is not None:
            first.copy_(state.flatten(0, 1))
        states = scan(delta, X @ hats[:, 0], bars, last, first)
        o = (hats[:, 1] @ before(states)).baddbmm_(products[:, 1], delta)
    lead = v.shape[:2]
    return joined(o, v.shape).to(v.dtype), states[:, -1].unflatten(0, lead).clone(), Saved(G, states, delta, products)


def backward(
    grad: Tensor,
    grad_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    documents: Tensor | None,
    saved: Saved,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, β and the first state, in the accumulator's dtype."""
    G, states, delta, products = saved
    dtype, size = G.dtype, G.shape[-2]
    with full_precision(q.device):
        keys_queries, values, b, masks = in_chunks(q, k, v, beta, documents, size, dtype)
        of_o, S, keys = chunks(grad, size, dtype), before(states), keys_queries[:, 0]
        up, down, last = decays(G, masks)
        hats, X = keys_queries * up.unsqueeze(1), inverse(b * products[:, 0])
        of_delta, of_states = products[:, 1].mT @ of_o, hats[:, 1].mT @ of_o  # so far, without what comes later
        W = (X * b.mT) @ hats[:, 0]
        end = torch.zeros_like(states[:, 0]) if grad_state is None else grad_state.flatten(0, 1).to(dtype)
        of_states = scan_back(of_delta, of_states, W, keys * down, last, end)
        E = X.mT @ of_delta
        of_values, missing = b * E, torch.baddbmm(values, hats[:, 0], S, alpha=-1)
        of_products = torch.stack([-(E @ delta.mT), of_o @ delta.mT], 1).tril_()
        of_products[:, 0].diagonal(dim1=-2, dim2=-1).zero_()
        if masks is not None:
            of_products.mul_(masks.same)
        of_beta = (E * missing).sum(-1) + (of_products[:, 0] * products[:, 0]).sum(-1)
        of_products[:, 0].mul_(b)
        of_rows, of_cols = pair_gradients(of_products, keys_queries, keys, G, safe_block(G))
        of_keys, of_queries = of_rows.unbind(1)
        of_queries.addcmul_(of_o @ S.mT, up)
        of_keys.addcmul_(of_values @ S.mT, up, value=-1)
        later = of_states[:, 1:].flatten(0, 1)
        of_bars = (delta @ later.mT).mul_(down)
        of_cols += of_bars
        of_G = (of_keys - of_cols).mul_(keys).addcmul_(keys_queries[:, 1], of_queries)
        of_G[:, -1] += (keys * of_bars).sum(-2) + (last * later * S).sum(-1)
        of_g = of_G.flip(-2).cumsum(-2).flip(-2)
        of_queries *= k.shape[-1] ** -0.5
    back = [joined(x, q.shape) for x in (of_queries, of_keys + of_cols)]
    return (
        *back,
        joined(of_values, v.shape),
        joined(of_g, q.shape),
        joined(of_beta.unsqueeze(-1), (*beta.shape, 1)).squeeze(-1),
        of_states[:, 0].unflatten(0, beta.shape[:2]).clone(),
    )


def scan(delta: Tensor, W: Tensor, bars: Tensor, last: Tensor, state: Tensor) -> Tensor:
    """All states [B·H, N + 1, K, V]. Makes Δ, in place, of `delta`, which holds X Diag(β) V."""
    changes, w, writes, keeps = (by_chunk(x, len(state)) for x in (delta, W, bars.mT, last))
    states = state.new_empty(len(state), len(changes) + 1, *state.shape[1:])
    states[:, 0] = state
    for n, change in enumerate(changes):
        change.baddbmm_(w[n], state, alpha=-1)
        state = (state * keeps[n]).baddbmm_(writes[n], change)
        states[:, n + 1] = state
    return states


def scan_back(of_delta: Tensor, local: Tensor, W: Tensor, bars: Tensor, last: Tensor, grad_state: Tensor) -> Tensor:
    """Gradients of all states, from those through Q̂ S in `local` [M, K, V]. Completes `of_delta`, in place."""
    heads = len(grad_state)
    changes, through, w, writes, keeps = (by_chunk(x, heads) for x in (of_delta, local, W.mT, bars, last))
    of_states = local.new_empty(heads, len(changes) + 1, *local.shape[1:])
    of_states[:, -1] = grad_state
    for n in reversed(range(len(changes))):
        changes[n].baddbmm_(writes[n], grad_state)
        grad_state = torch.addcmul(through[n], grad_state, keeps[n]).baddbmm_(w[n], changes[n], alpha=-1)
        of_states[:, n] = grad_state
    return of_states
