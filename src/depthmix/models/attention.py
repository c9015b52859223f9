"""Grouped-query attention with QK-norm and RoPE, in Qwen3's order.

Axes: B batch, T token, D channel, Q query head, K key-value head, S column, d channel of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from depthmix.mechanisms import KVMixer, State
from depthmix.models.config import DecoderConfig
from depthmix.models.context import Context
from depthmix.models.norm import RMSNorm


class Attention(nn.Module):
    """Projections → norms of queries and keys → RoPE → mixing of values over depth → cache → attention."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        dim, d = config.dim, config.width
        self.head_dim = d
        self.keys_after_rope = config.key_norm == "after_rope"
        self.norm = RMSNorm(dim, eps=config.norm_eps)
        self.q_proj = nn.Linear(dim, config.heads * d, bias=False)
        self.k_proj = nn.Linear(dim, config.num_kv_heads * d, bias=False)
        self.v_proj = nn.Linear(dim, config.num_kv_heads * d, bias=False)
        self.o_proj = nn.Linear(config.heads * d, dim, bias=False)
        self.q_norm = RMSNorm(d, eps=config.norm_eps)
        self.k_norm = RMSNorm(d, eps=config.norm_eps)

    def forward(
        self, h: Tensor, kv: State, ctx: Context, mixer: KVMixer | None, slot: int
    ) -> tuple[Tensor, State, None]:
        """`mixer` and `slot` belong to this execution: a looped layer has a different pair in each run."""
        x = self.norm(h)
        q, k, v = (self.heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        assert ctx.rotation is not None
        q = rotate(self.q_norm(q), ctx.rotation)
        k = self.k_norm(rotate(k, ctx.rotation)) if self.keys_after_rope else rotate(self.k_norm(k), ctx.rotation)
        if mixer is not None:
            v, kv = mixer.mix(q, k, v, kv)
        if ctx.cache is not None:
            k, v = ctx.cache.put(slot, k, v)
        causal = ctx.mask is None and q.shape[2] == k.shape[2]  # a single new token attends to all columns
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=ctx.mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2)), kv, None

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, T, d]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
