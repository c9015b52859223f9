"""Attention over depth in the form that compilers fuse best: sums along a row, neither normalised keys nor matmuls.

A compiler makes one loop over a source of its norm and all its logits; a matrix product would want the normalised keys
in memory first. Any transform of torch can take derivatives of it.

Axes: ... any leading shape, D channel, S source, Q query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthmix.ops.reference import join, rms_parts, wide


def attend(
    sources: Sequence[Tensor],
    folded: Tensor,
    prior: tuple[Tensor, Tensor] | None = None,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float = 1.0,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """As `reference.attend`."""
    return join(sources, torch.stack([logits(v, folded, normalize, eps, scale) for v in sources], -1), prior)


def logits(v: Tensor, folded: Tensor, normalize: bool, eps: float, scale: float) -> Tensor:
    """[..., Q] of one source."""
    u, r = rms_parts(v, eps)[:2] if normalize else (wide(v), 1.0)
    return scale * r * torch.stack([(u * c).sum(-1) for c in folded.unbind(0)], -1)
