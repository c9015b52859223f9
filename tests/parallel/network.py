"""A tiny network for pipelines, every parameter away from its start, and its gradients in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import depthmix as dm

DIM, TOKENS, ROWS, VOCAB, HEADS = 8, 4, 2, 11, 2


class Attention(nn.Module):
    """For networks with value mixers: grouped queries, and keys that come out of a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(DIM), nn.Linear(DIM, DIM)
        self.q, self.k, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM // 2), nn.Linear(DIM, DIM // 2)

    def forward(self, h: Tensor, mixer: dm.KVMixer, kv: dm.State) -> tuple[Tensor, dm.State]:
        h = self.norm(h)
        q, k, v = (p(h).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        v, kv = mixer.mix(q, k, v, kv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(-2)), kv


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.RMSNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, h: Tensor, scale: Tensor | None = None) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.inner(self.norm(h))))
        return y if scale is None else y * scale


class Network(nn.Module):
    """`case` holds mechanism, options, depth and, if it has value mixers, kv and kv_options."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        depth, kv = case["depth"], case.get("kv")
        torch.manual_seed(0)
        self.depth = dm.DepthStack(case["mechanism"], dim=DIM, depth=depth, **case.get("options", {}))
        self.values = None
        if kv:
            options = case.get("kv_options", {})
            self.values = dm.KVStack(kv, head_dim=DIM // HEADS, depth=(depth + 1) // 2, **options)
        parts: list[nn.Module] = [Attention() if kv and i % 2 == 0 else MLP() for i in range(depth)]
        if case.get("repeat"):
            parts[case["repeat"]] = parts[case["repeat"] - 1]  # one module at two depths of a stage
        self.sublayers = nn.ModuleList(parts)
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB))
        self.double()
        with torch.no_grad():
            for parameter in self.depth.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))

    def forward(self, tokens: Tensor, **shared: Tensor) -> Tensor:
        state, kv = self.depth.begin(self.embed(tokens)), () if self.values is None else self.values.begin()
        for i, (mixer, sublayer) in enumerate(self.depth.pairs(self.sublayers)):
            h, carry = mixer.read(state)
            if self.values is not None and i % 2 == 0:
                y, kv = sublayer(h, self.values[i // 2], kv)
            else:
                y = sublayer(h, **shared)
            state = mixer.write(state, carry, y)
        return self.head(self.depth.end(state))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch_of(microbatches: int, shared: bool = False) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = ROWS * microbatches
    x, target = (torch.randint(0, VOCAB, (rows, TOKENS), generator=generator) for _ in range(2))
    scale = torch.rand(rows, TOKENS, 1, generator=generator, dtype=torch.float64)
    return x, target, {"scale": scale} if shared else {}
