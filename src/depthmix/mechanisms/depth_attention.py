"""Depth-Attention: before it is cached, a value is mixed with those of earlier attention layers at the same token.

Axes: ... any leading shape, Q query head, K key-value head, T token, d channel of a head, S source (own one last).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from depthmix import ops
from depthmix.mechanisms import arithmetic
from depthmix.mechanisms.base import Coeff, KVFacts, KVMixer, MixerConfig, Site, State, StateSpec, option
from depthmix.support.checks import check_range


@dataclass(frozen=True, kw_only=True)
class DepthAttentionConfig(MixerConfig):
    either: ClassVar = (("stride", "sources"),)

    stride: int | None = option(None, "distance between source layers; None: half the number of attention layers")
    grid: Literal["absolute", "relative"] = option(
        "absolute", "source layers of a stride s: 0, s, 2s …; or l−s, l−2s …"
    )
    sources: tuple[int, ...] | None = option(None, "indices of the source layers, instead of a stride")
    window: int = option(0, "number of layers directly below that are sources too")
    rule: Literal["softmax", "uniform"] = option("softmax", "weights of the sources; uniform: plain average")
    loop: Literal["unrolled", "same_layer", "both"] = option(
        "unrolled", "sources in a looped model: executions by index; same_layer: earlier runs of the layer; or both"
    )

    def check(self, *, dim: int, depth: int) -> None:
        if self.stride is not None:
            check_range("stride", self.stride, 1)
        check_range("window", self.window, 0)
        if self.stride is not None and self.sources is not None:
            raise ValueError(f"stride={self.stride} and sources={list(self.sources)}; expected only one of them")
        for layer in self.sources or ():
            check_range("sources", layer, 0, depth - 1, remedy=f"There are {depth} attention layers")
        if self.loop == "same_layer" and (self.stride, self.sources, self.window) != (None, None, 0):
            given = f"stride={self.stride}, sources={self.sources}, window={self.window}"
            raise ValueError(
                f"loop='same_layer' with {given}; it reads only earlier runs of the same layer: do not set the others"
            )

    def resolved(self, *, dim: int, depth: int) -> dict[str, Any]:
        strided = self.sources is None and self.loop != "same_layer"
        return {**super().resolved(dim=dim, depth=depth), "stride": self.distance(depth) if strided else None}

    def distance(self, depth: int) -> int:
        return self.stride or max(1, depth // 2)

    def reads(self, index: int, order: tuple[int, ...]) -> list[int]:
        """The executions that execution `index` reads, all before it."""
        below = range(index)
        own_runs = [j for j in below if order[j] == order[index]] if self.loop != "unrolled" else []
        if self.loop == "same_layer":
            return own_runs
        if self.sources is not None:
            chosen = set(self.sources)
        else:
            stride = self.distance(len(order))
            start = index % stride if self.grid == "relative" else 0
            chosen = set(range(start, len(order), stride))
        return [j for j in below if j in chosen or j >= index - self.window or j in own_runs]

    def alive(self, index: int, order: tuple[int, ...]) -> list[int]:
        """The executions that `index` or a later one still reads: the contents of the state."""
        later = {j for i in range(index, len(order)) for j in self.reads(i, order)}
        return sorted(j for j in later if j < index)


class DepthAttention(KVMixer):
    """Depth-Attention (arXiv 2606.05014): for layer l with sources S_l below it, per token and key-value head

    (1) q̄ = mean of the queries of the head's group, after norm and RoPE
    (2) e_j = ⟨q̄, k_j⟩ / √d over j in S_l and j = l
    (3) a = softmax(e)
    (4) u_l = a_l v_l + Σ_j a_j u_j

    u_l is cached and attended to. The values of the sources are already mixed; the layer's own value is not. There are
    no parameters, and the first layer is unchanged.

    State: k_j and u_j of the layers that are still to be read, oldest first.
    """

    Config = DepthAttentionConfig
    paper = "arXiv 2606.05014"
    holds = "keys and values of the source layers"
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"stride": 1},
        {"stride": 2, "grid": "relative"},
        {"sources": (0,), "window": 1},
        {"rule": "uniform"},
        {"loop": "same_layer"},
        {"loop": "both"},
    )

    @classmethod
    def facts(cls, config: Any, *, heads: int, kv_heads: int, head_dim: int, order: tuple[int, ...]) -> KVFacts:
        counts = [len(config.reads(index, order)) + 1 for index in range(len(order))]  # including the layer's own value
        mixing = [n for n in counts if n > 1]
        flops = arithmetic.mixture(sum(mixing), kv_heads * head_dim)
        if config.rule == "softmax":
            pooling = heads * head_dim * (heads != kv_heads)
            logits = sum(n * (2 * head_dim + 1) + arithmetic.softmax(n) for n in mixing)
            flops += len(mixing) * pooling + kv_heads * logits
        note = f"{len(mixing)} of {len(order)} attention layers mix {sum(mixing)} values, including their own"
        return KVFacts(parameters=0, flops=flops, note=note)

    def __init__(self, site: Site, config: DepthAttentionConfig, order: tuple[int, ...]) -> None:
        super().__init__(site, config, order)
        held = config.alive(site.index, order)
        after = config.alive(site.index + 1, order)
        self.read_entries = [held.index(j) for j in config.reads(site.index, order)]
        self.kept_entries = [entry for entry, j in enumerate(held) if j in after]
        self.is_read = site.index in after

    @property
    def mixes(self) -> bool:
        return bool(self.read_entries)

    def spec(self, site: Site) -> StateSpec:
        count = 2 * len(self.config.alive(site.index, self.order))
        return StateSpec(((site.dim,),) * count, essential=count, sealed=count)

    def coeff(self, q: Tensor, k: Tensor, kv: State) -> Coeff:
        if not self.read_entries:
            return None
        keys = [*(kv[2 * entry] for entry in self.read_entries), k]
        if self.config.rule == "uniform":
            return ops.wide(k).new_full((*k.shape[:-1], len(keys)), 1 / len(keys))
        pooled = ops.wide(q)
        if q.shape[-3] != k.shape[-3]:
            pooled = pooled.unflatten(-3, (k.shape[-3], -1)).mean(-3)  # (1)
        logits = torch.stack([(pooled * key).sum(-1) for key in keys], -1)  # (2)
        return torch.softmax(logits * k.shape[-1] ** -0.5, -1)  # (3)

    def combine(self, v: Tensor, kv: State, c: Coeff) -> Tensor:
        if c is None:
            return v
        values = [*(kv[2 * entry + 1] for entry in self.read_entries), v]
        return ops.weighted_sum(values, [w.unsqueeze(-1) for w in c.unbind(-1)])  # (4)

    def update(self, k: Tensor, v: Tensor, mixed: Tensor, kv: State) -> State:
        kept = tuple(tensor for entry in self.kept_entries for tensor in kv[2 * entry : 2 * entry + 2])
        return (*kept, k, mixed) if self.is_read else kept
