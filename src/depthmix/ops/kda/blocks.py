"""Views of the blocks of square matrices, and the inverse of unit lower triangular ones.

Axes: M matrix, C row or column, n block.
"""

from __future__ import annotations

from torch import Tensor


def blocks(x: Tensor, size: int) -> Tensor:
    """[..., C, K] as [..., n, size, K]."""
    return x.unflatten(-2, (-1, size))


def diagonal_blocks(square: Tensor, size: int) -> Tensor:
    """A view [..., n, size, size] of the blocks on the diagonal of [..., C, C]."""
    tiles = square.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def lower_blocks(square: Tensor, half: int) -> Tensor:
    """A view [..., n, half, half]: the lower left quarter of each block of 2·half on the diagonal."""
    return diagonal_blocks(square, 2 * half)[..., half:, :half]


def halves(size: int, block: int) -> list[int]:
    """Sizes of the halves that join blocks to the whole: block, 2·block … size/2."""
    return [half for half in (block << i for i in range(size.bit_length())) if half < size]


def inverse(lower: Tensor) -> Tensor:
    """(I + L)^(−1) of strictly lower triangular L [M, C, C], C a power of two.

    By doubling: the inverse of [[P, 0], [L, Q]] is [[P⁻¹, 0], [−Q⁻¹ L P⁻¹, Q⁻¹]].
    """
    out = -lower
    out.diagonal(dim1=-2, dim2=-1).fill_(1)
    for half in halves(lower.shape[-1], 1)[1:]:  # blocks of two are inverted already
        corner, both = lower_blocks(out, half), diagonal_blocks(out, half).unflatten(-3, (-1, 2))
        corner.copy_(both[..., 1, :, :] @ corner @ both[..., 0, :, :])
    return out
