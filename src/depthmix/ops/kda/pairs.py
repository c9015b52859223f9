"""Products of all pairs of tokens in a chunk under a decay of every channel, and the gradients of these products.

    M[t, i] = Σ_c x[t, c] y[i, c] 2^(G[t, c] − G[i, c])     for i ≤ t, with G falling from token to token

2^G · 2^(−G) would overflow: a chunk may lose far more than the 127 that float32 can hold. So a chunk is divided into
blocks. Within a block both factors are taken relative to its middle; it is as large as float32 allows, one token if it
must. Pairs of different blocks are found by halving: the right half of a larger block against its left half, both
relative to the end of the left half, so that no exponent is positive.

Axes: M chunk of any row and head, R kind of row (key or query), C token of a chunk, n block, h token of a half,
K channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthmix.ops.kda.blocks import blocks, diagonal_blocks, halves, lower_blocks
from depthmix.ops.kda.layout import power

ROOM = {torch.float32: 86.0, torch.float64: 430.0}  # largest exponent; the rest of the range is for the numbers


def safe_block(G: Tensor) -> int:
    """The largest safe block for G [M, C, K]. Looking at G is cheap only on a CPU; elsewhere it is one token."""
    block = G.shape[-2] if G.device.type == "cpu" else 1
    while block > 1 and not largest_half(G, block) <= ROOM[G.dtype]:  # not a number is not safe either
        block //= 2
    return block


def largest_half(G: Tensor, block: int) -> float:
    """The largest loss between the middle of a block and its first or last token."""
    if not G.numel():
        return 0.0
    parts = blocks(G, block)
    middle = parts[..., middle_of(block), :]
    return float(torch.maximum(parts[..., 0, :] - middle, middle - parts[..., -1, :]).amax())


def middle_of(block: int) -> int:
    return max(block // 2 - 1, 0)


def pair_products(rows: Tensor, cols: Tensor, G: Tensor, block: int) -> Tensor:
    """M [M, R, C, C] of rows [M, R, C, K] and columns [M, C, K]; zero above the diagonal."""
    size, kinds = G.shape[-2], rows.shape[1]
    right, left, _, _ = centred(rows, cols, G, block)
    inner = apart(right @ left.mT, kinds)
    if block == size:
        return inner.squeeze(2).tril_()
    out = rows.new_zeros(*rows.shape[:-1], size)
    diagonal_blocks(out, block).copy_(inner.tril_())
    for half in halves(size, block):
        right, left, _, _ = joining(rows, cols, G, half)
        lower_blocks(out, half).copy_(apart(right @ left.mT, kinds))
    return out


def pair_gradients(grad: Tensor, rows: Tensor, cols: Tensor, G: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Gradients of rows and of columns, from that of M, which is zero above the diagonal."""
    size, kinds = G.shape[-2], rows.shape[1]
    right, left, up, down = centred(rows, cols, G, block)
    inner = together(diagonal_blocks(grad, block))
    of_rows = apart(inner @ left, kinds).mul(up.unsqueeze(1)).reshape(rows.shape)
    of_cols = (inner.mT @ right).mul_(down).view_as(cols)
    for half in halves(size, block):
        right, left, up, down = joining(rows, cols, G, half)
        inner = together(lower_blocks(grad, half))
        blocks(of_rows, 2 * half)[..., half:, :].addcmul_(apart(inner @ left, kinds), up.unsqueeze(1))
        blocks(of_cols, 2 * half)[..., :half, :].addcmul_(inner.mT @ right, down)
    return of_rows, of_cols


def centred(rows: Tensor, cols: Tensor, G: Tensor, block: int) -> tuple[Tensor, ...]:
    """Of every block: rows [M, n, R·h, K] and columns [M, n, h, K] times their factors, then the two factors."""
    parts, middle = blocks(G, block), middle_of(block)
    up = power(parts - parts[..., middle : middle + 1, :])
    down = up.reciprocal()
    return scaled(blocks(rows, block), up), blocks(cols, block) * down, up, down


def joining(rows: Tensor, cols: Tensor, G: Tensor, half: int) -> tuple[Tensor, ...]:
    """The same for right halves as rows and left halves as columns."""
    (late, early), parts = halved(rows, cols, half), blocks(G, 2 * half)
    end = parts[..., half - 1 : half, :]
    up, down = power(parts[..., half:, :] - end), power(end - parts[..., :half, :])
    return scaled(late, up), early * down, up, down


def halved(rows: Tensor, cols: Tensor, half: int) -> tuple[Tensor, Tensor]:
    return blocks(rows, 2 * half)[..., half:, :], blocks(cols, 2 * half)[..., :half, :]


def scaled(rows: Tensor, up: Tensor) -> Tensor:
    """Rows [M, R, n, h, K] times up [M, n, h, K] as [M, n, R·h, K]: small blocks are then one product, not R."""
    out = rows.new_empty(*up.shape[:2], rows.shape[1], *up.shape[2:])
    torch.mul(rows.movedim(1, 2), up.unsqueeze(2), out=out)
    return out.flatten(2, 3)


def apart(x: Tensor, kinds: int) -> Tensor:
    """[M, n, R·h, …] as a view [M, R, n, h, …]."""
    return x.unflatten(2, (kinds, -1)).movedim(2, 1)


def together(x: Tensor) -> Tensor:
    """[M, R, n, h, …] as [M, n, R·h, …]."""
    return x.movedim(1, 2).flatten(2, 3)
