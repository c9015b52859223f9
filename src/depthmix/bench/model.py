"""A decoder-shaped network without vocabulary, to put mechanisms into and take their time.

Axes: B batch, T token, D channel, H head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.mechanisms import DepthStack


@dataclass(frozen=True, kw_only=True)
class Size:
    dim: int = 768
    depth: int = 24
    hidden: int = 2048
    tokens: int = 1024
    batch: int = 1


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
    """Attention and SwiGLU in turn, mixed by any mechanism; `sublayers` may be those of another one."""

    def __init__(
        self, name: str, size: Size, options: Mapping[str, Any] | None = None, sublayers: nn.ModuleList | None = None
    ) -> None:
        super().__init__()
        self.depth = DepthStack(name, dim=size.dim, depth=size.depth, **(options or {}))
        self.sublayers = sublayers or nn.ModuleList(
            Attention(size.dim) if i % 2 == 0 else SwiGLU(size.dim, size.hidden) for i in range(size.depth)
        )
        self.norm = nn.RMSNorm(size.dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        state = self.depth.begin(x)
        for mixer, sublayer in self.depth.pairs(self.sublayers):
            h, carry = mixer.read(state)
            state = mixer.write(state, carry, sublayer(h))
        return self.norm(self.depth.end(state))


def build(
    name: str, options: Mapping[str, Any], size: Size, sublayers: nn.ModuleList | None = None, seed: int = 0
) -> BenchModel:
    """Parameters of the mechanism are moved off their start, so that no product with a zero flatters it."""
    torch.manual_seed(seed)
    model = BenchModel(name, size, options, sublayers)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.depth.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens_for(size: Size) -> Tensor:
    return torch.randn(size.batch, size.tokens, size.dim, generator=torch.Generator().manual_seed(0))


def options_for(name: str, depth: int) -> dict[str, Any]:
    """Options with which a mechanism is timed: its defaults, but 8 blocks as in the paper's models."""
    return {"num_blocks": min(8, depth)} if name == "block_attnres" else {}


def size_for(dim: int, depth: int, tokens: int) -> Size:
    """With the usual width of a SwiGLU: 8/3 of the stream's, in whole 64s."""
    return Size(dim=dim, depth=depth, hidden=-(-dim * 8 // 3 // 64) * 64, tokens=tokens)
