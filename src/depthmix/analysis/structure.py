"""The structure of a depth mixing matrix: semiseparable rank, effective rank, row sums; and of weights: sinks, entropy.

Axes: M is [..., L+1, L+1], lower triangular with its diagonal; leading axes are tokens, heads or channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def semiseparable_rank(M: Tensor, tol: float = 1e-6) -> Tensor:
    """The largest rank of a block that lies inside the lower triangle, for each matrix in `M`, as an integer tensor.

    It is the number of vectors of width D that have to cross a cut of the network: 1 for the residual, m for m streams.
    (Ordinary rank says nothing: the all-ones triangle has full rank.) Only the maximal blocks M[r:, :r+1] are needed;
    a singular value counts where it exceeds `tol` times the block's largest. Take it for each token, then aggregate:
    the mean of matrices of rank 1 has a higher rank.
    """
    if not 0 <= tol < 1:
        raise ValueError(f"tol={tol}; expected a share of the largest singular value in [0, 1), such as 1e-6")
    rank = torch.zeros(M.shape[:-2], dtype=torch.long, device=M.device)
    for s in block_spectra(M):
        rank = torch.maximum(rank, ((s > tol * s[..., :1]) & (s > 0)).sum(-1))
    return rank


def effective_rank(M: Tensor) -> Tensor:
    """As `semiseparable_rank`, but soft: the largest exp(entropy) of a block's normalised singular values."""
    rank = torch.zeros(M.shape[:-2], dtype=torch.float64, device=M.device)
    for s in block_spectra(M):
        p = s / s.sum(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)
        rank = torch.maximum(rank, torch.special.entr(p).sum(-1).exp())
    return rank


def block_spectra(M: Tensor) -> Iterator[Tensor]:
    """Singular values of the maximal blocks, in double precision."""
    if M.dim() < 2 or M.shape[-1] != M.shape[-2]:
        raise ValueError(f"M has shape {list(M.shape)}; expected [..., n, n], a row for each sublayer and the head")
    check_floating(M)
    if not torch.isfinite(M).all():
        raise ValueError("M has entries that are not finite; expected finite numbers. Check the model for overflow")
    if M.triu(1).any():
        raise ValueError(
            "M has entries above its diagonal; expected a lower-triangular matrix: a layer reads only layers below it"
        )
    M = M.detach().double()
    for r in range(M.shape[-1]):
        yield torch.linalg.svdvals(M[..., r:, : r + 1])


def check_floating(M: Tensor) -> None:
    if not M.is_floating_point():
        raise TypeError(f"M has dtype {M.dtype}; expected a floating-point dtype: convert it with .double()")


def row_sums(M: Tensor) -> Tensor:
    """[..., L+1]: 1 where a row is an average, l where it is the plain sum."""
    return M.sum(-1)


def shares(weights: Tensor) -> Tensor:
    """|weights| with each row normalised to 1; a row of zeros stays zero."""
    check_floating(weights)
    size = weights.abs()
    return size / size.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def sinks(M: Tensor, reads: Sequence[Sequence[int]] | None = None) -> Tensor:
    """[..., C]: each source's mean share in the rows that can read it.

    Each row of |M| is normalised to 1; a source's share is its mean over the rows that can read it. Uniform reads give
    a falling curve, from which a sink stands out. `M` can also be weights [..., L+1, C] over C sources; `reads` then
    says which of them each row reads.
    """
    share = shares(M)
    columns = range(M.shape[-1])
    counts = [len(columns) - i if reads is None else sum(i in row for row in reads) for i in columns]
    return share.sum(-2) / torch.tensor(counts, dtype=M.dtype, device=M.device).clamp(min=1)


def row_entropy(weights: Tensor) -> Tensor:
    """[..., L+1]: the entropy of each row of |weights|, normalised; at most ln n for a row of n sources."""
    return torch.special.entr(shares(weights)).sum(-1)


def locality(weights: Tensor, reads: Sequence[Sequence[int]] | None = None) -> Tensor:
    """[..., L+1]: the share of each row that its newest source has, the last one it reads (in M the diagonal)."""
    newest = [row if reads is None else (reads[row] or [0])[-1] for row in range(weights.shape[-2])]
    index = torch.tensor(newest, device=weights.device).unsqueeze(-1).expand(*weights.shape[:-1], 1)
    return shares(weights).gather(-1, index).squeeze(-1)


def token_deviation(weights: Tensor, tokens: int) -> Tensor:
    """Standard deviation of each share over tokens (the first `tokens` axes); the other axes stay."""
    share = shares(weights)
    share = share.flatten(0, tokens - 1) if tokens else share.unsqueeze(0)
    return (share - share.mean(0)).square().mean(0).sqrt()
