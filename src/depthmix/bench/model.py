"""A decoder-shaped network without vocabulary, to put mechanisms into and take their time.

Axes: B batch, T token, D channel, H head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from depthmix.mechanisms import DepthStack


class Attention(nn.Module):
    """Causal attention with heads of 64 channels and its own PreNorm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = max(1, dim // 64)
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, 64]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        gate, up = self.up(self.norm(h)).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class BenchModel(nn.Module):
    """Attention and SwiGLU in turn, mixed by any mechanism."""

    def __init__(self, name: str, *, dim: int, depth: int, hidden: int, **options: Any) -> None:
        super().__init__()
        self.depth = DepthStack(name, dim=dim, depth=depth, **options)
        self.sublayers = nn.ModuleList(Attention(dim) if i % 2 == 0 else SwiGLU(dim, hidden) for i in range(depth))
        self.norm = nn.RMSNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        state = self.depth.begin(x)
        for mixer, sublayer in zip(self.depth, self.sublayers, strict=True):
            h, carry = mixer.read(state)
            state = mixer.write(state, carry, sublayer(h))
        return self.norm(self.depth.end(state))

    def step(self, x: Tensor) -> None:
        """Forward and backward, without an optimiser."""
        self.zero_grad(set_to_none=True)
        self(x).square().mean().backward()


def off_their_start(model: BenchModel, seed: int = 0) -> BenchModel:
    """Parameters of the mechanism moved, so that no product with a zero flatters it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.depth.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model
