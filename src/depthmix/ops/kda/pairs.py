"""Products of all pairs of tokens in a chunk under a decay of every channel, and the gradients of these products.

    M[t, i] = Σ_c x[t, c] y[i, c] exp(G[t, c] − G[i, c])     for i ≤ t, with G falling from token to token

exp(G) · exp(−G) would overflow: a chunk may lose far more than the 88 that float32 can hold. So a chunk is divided into
blocks. Within a block both factors are taken relative to its middle if the loss over half a block is small enough for
that, and otherwise every pair gets its own exponent. Pairs of different blocks are found by halving: the right half of
a larger block against its left half, both relative to the end of the left half, so that no exponent is positive.

Axes: M chunk of any row and head, R kind of row (key or query), C token of a chunk, n block, b token of a block,
K channel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from depthmix.ops.kda.blocks import blocks, diagonal_blocks, halves, lower_blocks

PAIRWISE = 4  # tokens in a block where every pair has its own exponent
SMALLEST = 8  # a smaller block relative to its middle saves nothing
ROOM = {torch.float32: 60.0, torch.float64: 300.0}  # largest exponent; the other half of the range is for the numbers


class Plan(NamedTuple):
    """How a chunk is divided."""

    block: int
    centred: bool  # whether a block is taken relative to its middle


def plan(G: Tensor) -> Plan:
    """The largest safe blocks; looking at G is cheap only on a CPU."""
    size = G.shape[-2]
    if G.device.type == "cpu":
        block = size
        while block >= SMALLEST:
            if largest_half(G, block) <= ROOM[G.dtype]:
                return Plan(block, True)
            block //= 2
    return Plan(min(PAIRWISE, size), False)


def largest_half(G: Tensor, block: int) -> float:
    """The largest loss between the middle of a block and its first or last token; not finite if G is not."""
    parts = blocks(G, block)
    middle = parts[..., middle_of(block), :]
    left, right = parts[..., 0, :] - middle, middle - parts[..., -1, :]
    largest = float(torch.maximum(left, right).amax()) if left.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


def middle_of(block: int) -> int:
    return block // 2 - 1


def pair_products(rows: Tensor, cols: Tensor, G: Tensor, how: Plan) -> Tensor:
    """M [M, R, C, C] of rows [M, R, C, K] and columns [M, C, K]; zero above the diagonal."""
    size = G.shape[-2]
    if how == (size, True):
        up, down = centred_factors(G)
        return ((rows * up.unsqueeze(-3)).flatten(1, 2) @ (cols * down).mT).unflatten(1, rows.shape[1:3]).tril_()
    out = rows.new_zeros(*rows.shape[:-1], size)
    parts = blocks(rows, how.block)
    if how.centred:
        up, down = centred_factors(blocks(G, how.block))
        inner = ((parts * up.unsqueeze(1)) @ (blocks(cols, how.block) * down).unsqueeze(1).mT).tril_()
    else:
        inner = (parts.unsqueeze(-2) @ decayed(cols, G, how.block).unsqueeze(1).mT).squeeze(-2)
    diagonal_blocks(out, how.block).copy_(inner)
    for half in halves(size, how.block):
        up, down = joining_factors(G, half)
        right = blocks(rows, 2 * half)[..., half:, :] * up.unsqueeze(1)
        left = blocks(cols, 2 * half)[..., :half, :] * down
        lower_blocks(out, half).copy_(right @ left.unsqueeze(1).mT)
    return out


def pair_gradients(grad: Tensor, rows: Tensor, cols: Tensor, G: Tensor, how: Plan) -> tuple[Tensor, Tensor]:
    """Gradients of rows and of columns, from that of M, which is zero above the diagonal."""
    size = G.shape[-2]
    if how == (size, True):
        up, down = centred_factors(G)
        flat = grad.flatten(1, 2)
        of_rows = (flat @ (cols * down)).unflatten(1, rows.shape[1:3]).mul_(up.unsqueeze(1))
        return of_rows, (flat.mT @ (rows * up.unsqueeze(1)).flatten(1, 2)).mul_(down)
    of_rows, of_cols = torch.empty_like(rows), torch.empty_like(cols)
    inner, parts = diagonal_blocks(grad, how.block), blocks(rows, how.block)
    if how.centred:
        up, down = centred_factors(blocks(G, how.block))
        blocks(of_rows, how.block).copy_((inner @ (blocks(cols, how.block) * down).unsqueeze(1)).mul_(up.unsqueeze(1)))
        blocks(of_cols, how.block).copy_((inner.mT @ (parts * up.unsqueeze(1))).sum(1).mul_(down))
    else:
        near = decayed(cols, G, how.block)  # [M, n, t, i, K]
        blocks(of_rows, how.block).copy_((inner.unsqueeze(-2) @ near.unsqueeze(1)).squeeze(-2))
        weighted = torch.einsum("mrnti,mrntk->mntik", inner, parts)
        blocks(of_cols, how.block).copy_((weighted * decayed(torch.ones_like(cols), G, how.block)).sum(-3))
    for half in halves(size, how.block):
        up, down = joining_factors(G, half)
        join, down = lower_blocks(grad, half), down.unsqueeze(1)
        left = blocks(cols, 2 * half)[..., :half, :].unsqueeze(1) * down
        blocks(of_rows, 2 * half)[..., half:, :].addcmul_(join @ left, up.unsqueeze(1))
        right = blocks(rows, 2 * half)[..., half:, :] * up.unsqueeze(1)
        blocks(of_cols, 2 * half)[..., :half, :].addcmul_((join.mT @ right).sum(1), down.squeeze(1))
    return of_rows, of_cols


def centred_factors(G: Tensor) -> tuple[Tensor, Tensor]:
    """exp(G − R) and exp(R − G), R in the middle of the last axis but one."""
    middle = middle_of(G.shape[-2])
    up = (G - G[..., middle : middle + 1, :]).exp_()
    return up, up.reciprocal()


def joining_factors(G: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """exp(G − R) of right halves and exp(R − G) of left halves [M, n, half, K], R at the end of the left half."""
    parts = blocks(G, 2 * half)
    end = parts[..., half - 1 : half, :]
    return (parts[..., half:, :] - end).exp_(), (end - parts[..., :half, :]).exp_()


def decayed(cols: Tensor, G: Tensor, block: int) -> Tensor:
    """y[i] exp(G[t] − G[i]) for all pairs of a block [M, n, t, i, K], zero for i > t."""
    parts = blocks(G, block)
    later = torch.ones(block, block, dtype=torch.bool, device=G.device).triu(1).unsqueeze(-1)
    exponent = (parts.unsqueeze(-2) - parts.unsqueeze(-3)).masked_fill_(later, -math.inf)
    return exponent.exp_().mul_(blocks(cols, block).unsqueeze(-3))
