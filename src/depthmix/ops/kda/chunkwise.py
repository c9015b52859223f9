"""Kimi Delta Attention in chunks (arXiv 2510.26692, equations 2 to 9), and its gradients written out.

Within a chunk, G_t = Σ_{j≤t} g_j, S is the state before it and s = K^(−1/2):

    a_ti = Σ_c k_tc k_ic e^{G_tc − G_ic}  (i < t)      P_ti = s Σ_c q_tc k_ic e^{G_tc − G_ic}  (i ≤ t)
    K̂ = e^G ⊙ K,  Q̂ = s e^G ⊙ Q,  K̄ = e^{G_C − G} ⊙ K,  X = (I + Diag(β) a)^{−1},  W = X Diag(β) K̂
    Δ = X Diag(β) V − W S;   O = Q̂ S + P Δ;   S' = Diag(e^{G_C}) S + K̄ᵀ Δ

G is kept in powers of two: e^g = 2^(g log₂ e). Only Δ and S' are computed chunk by chunk, everything else for all
chunks at once. The last chunk is filled with tokens that change nothing: k = 0, β = 0, g = 0. Documents multiply by
constants: a and P where a pair is of one document, K̂ and Q̂ where a token is of the state's document, K̄ where it is of
the last token's, e^{G_C} where these two are one.

Axes: B batch, H head, T token, N chunk, C token of a chunk, M = B·H·N, K channel of a key, V channel of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthmix.ops.kda.blocks import inverse
from depthmix.ops.kda.layout import Masks, before, by_chunk, chunks, cumulated, decays, in_chunks, joined
from depthmix.ops.kda.pairs import pair_gradients, pair_products, safe_block
from depthmix.ops.reference import full_precision
from depthmix.ops.streams import common_accumulator


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
        G = cumulated(g, size, dtype)
        keys = keys_queries[:, 0]
        products = within_documents(pair_products(keys_queries, keys, G, safe_block(G)), masks)
        up, down, last = decays(G, masks)
        bars = keys * down
        hats = keys_queries.mul_(up.unsqueeze(1))  # in place: from here on the keys are needed no more
        X = inverse(b * products[:, 0]).mul_(b.mT)
        shape = (*k.shape[:2], k.shape[3], v.shape[3])
        first = (values.new_zeros(shape) if state is None else state.to(dtype)).flatten(0, 1)
        states, delta = scan(X @ values, X @ hats[:, 0], bars, last, first)
        o = (hats[:, 1] @ before(states)).baddbmm_(products[:, 1], delta)
    return joined(o, v.shape).to(v.dtype), states[:, -1].reshape(shape).clone(), Saved(G, states, delta, products)


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
    dtype, size, S = G.dtype, G.shape[-2], before(states)
    with full_precision(q.device):
        keys_queries, values, b, masks = in_chunks(q, k, v, beta, documents, size, dtype)
        keys, of_o = keys_queries[:, 0], chunks(grad, size, dtype)
        up, down, last = decays(G, masks)
        hats, X = keys_queries * up.unsqueeze(1), inverse(b * products[:, 0])
        local, through = products[:, 1].mT @ of_o, hats[:, 1].mT @ of_o
        end = torch.zeros_like(states[:, 0]) if grad_state is None else grad_state.flatten(0, 1).to(dtype)
        of_states, of_delta = scan_back(local, through, (X * b.mT) @ hats[:, 0], keys * down, last, end)
        E, later = X.mT @ of_delta, of_states[:, 1:].flatten(0, 1)
        of_values, missing = b * E, torch.baddbmm(values, hats[:, 0], S, alpha=-1)

        of_products = within_documents(torch.stack([-(E @ delta.mT), of_o @ delta.mT], 1).tril_(), masks)
        of_beta = (E * missing).sum(-1) + (of_products[:, 0] * products[:, 0]).sum(-1)
        of_products[:, 0].mul_(b)
        of_rows, of_cols = pair_gradients(of_products, keys_queries, keys, G, safe_block(G))
        of_keys, of_queries = of_rows.unbind(1)
        of_keys.addcmul_(of_values @ S.mT, up, value=-1)
        of_queries.addcmul_(of_o @ S.mT, up)
        of_bars = (delta @ later.mT).mul_(down)
        of_cols += of_bars

        of_G = (of_keys - of_cols).mul_(keys).addcmul_(keys_queries[:, 1], of_queries)
        of_G[:, -1] += (keys * of_bars).sum(-2) + (last * later * S).sum(-1)
        of_g = of_G.flip(-2).cumsum(-2).flip(-2)
        of_queries *= k.shape[-1] ** -0.5
    of_tokens = (of_queries, of_keys + of_cols, of_values, of_g, of_beta)
    shapes = (q.shape, k.shape, v.shape, k.shape, beta.shape)
    of_state = of_states[:, 0].unflatten(0, beta.shape[:2]).clone()
    return *(joined(x, shape) for x, shape in zip(of_tokens, shapes, strict=True)), of_state


def within_documents(products: Tensor, masks: Masks | None) -> Tensor:
    """Products [M, 2, C, C], or their gradients, with a zero for a token with itself in a, and across documents."""
    products[:, 0].diagonal(dim1=-2, dim2=-1).zero_()
    return products if masks is None else products.mul_(masks.same)


def scan(new: Tensor, W: Tensor, bars: Tensor, last: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """All states [B·H, N + 1, K, V] and Δ [M, C, V], from `new`, which holds X Diag(β) V.

    Every step makes dense tensors of its own: products into slices of a larger one would run matrix by matrix.
    """
    changes, w, writes, keeps = (by_chunk(x, len(state)) for x in (new, W, bars.mT, last))
    states, deltas = [state], []
    for n, change in enumerate(changes):
        deltas.append(torch.baddbmm(change, w[n], states[-1], alpha=-1))
        states.append((states[-1] * keeps[n]).baddbmm_(writes[n], deltas[-1]))
    return torch.stack(states, 1), torch.stack(deltas, 1).flatten(0, 1)


def scan_back(
    local: Tensor, through: Tensor, W: Tensor, bars: Tensor, last: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of all states and of Δ, from those through P Δ in `local` [M, C, V] and Q̂ S in `through` [M, K, V]."""
    changes, reads, w, writes, keeps = (by_chunk(x, len(grad_state)) for x in (local, through, W.mT, bars, last))
    of_states, of_deltas = [grad_state], []
    for n in reversed(range(len(changes))):
        of_deltas.append(torch.baddbmm(changes[n], writes[n], of_states[-1]))
        below = torch.addcmul(reads[n], of_states[-1], keeps[n])
        of_states.append(below.baddbmm_(w[n], of_deltas[-1], alpha=-1))
    return torch.stack(of_states[::-1], 1), torch.stack(of_deltas[::-1], 1).flatten(0, 1)
