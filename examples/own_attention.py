"""Depth-Attention in an attention of your own, without depthmix's decoder.

    python examples/own_attention.py

Two lines are new in the model: a `dm.KVStack` beside its layers, and `mix` in each attention, between the keys and the
cache. What is cached is the mixed value, so decoding with a cache gives what one pass over all tokens gives.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import depthmix as dm

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 6
DIM = HEADS * HEAD_DIM


class Cache:
    """Keys and values of earlier tokens of one attention."""

    def __init__(self) -> None:
        self.pair: tuple[Tensor, Tensor] | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.pair = (k, v) if self.pair is None else (torch.cat([self.pair[0], k], 2), torch.cat([self.pair[1], v], 2))
        return self.pair


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, heads * HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, mixer: dm.KVMixer, kv: dm.State, cache: Cache) -> tuple[Tensor, dm.State]:
        x = self.norm(x)
        q, k, v = (p(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for p in (self.q, self.k, self.v))
        v, kv = mixer.mix(q, k, v, kv)  # new: after norms and RoPE of q and k, if you have them; before the cache
        k, v = cache.extend(k, v)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(-2)), kv


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.values = dm.KVStack("depth_attention", head_dim=HEAD_DIM, depth=LAYERS)  # new

    def forward(self, x: Tensor, caches: list[Cache]) -> Tensor:
        """[B, T, D] to [B, T, D]: all tokens at once with empty caches, or one more token."""
        kv = self.values.begin()  # it lives within one pass: nothing of it is kept between tokens
        for attention, mixer, cache in zip(self.layers, self.values, caches, strict=True):
            y, kv = attention(x, mixer, kv, cache)
            x = x + y
        return x


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(2, 10, DIM, dtype=torch.float64)
    at_once = model(x, [Cache() for _ in range(LAYERS)])
    caches = [Cache() for _ in range(LAYERS)]
    one_by_one = torch.cat([model(token, caches) for token in x.split(1, dim=1)], 1)
    print(f"{len(model.values)} attention layers, {sum(p.numel() for p in model.values.parameters())} more parameters")
    print(f"decoding with a cache differs by {(one_by_one - at_once).abs().max():.0e}")


if __name__ == "__main__":
    main()
