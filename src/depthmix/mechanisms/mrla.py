"""MRLA: layer attention added to the residual, in a form that is causal and local to a token.

Axes: ... any leading shape, D channel, H head, S source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms import arithmetic
from depthmix.mechanisms.base import Coeff, DepthMixer, Facts, MixerConfig, Site, State, StateSpec, option, rank_cap
from depthmix.mechanisms.state import SourceWeights, output_names
from depthmix.support.checks import check_divides, check_positive


@dataclass(frozen=True, kw_only=True)
class LayerAttentionConfig(MixerConfig):
    form: Literal["light", "base"] = option("light", "form; light: gated recurrence; base: softmax over all outputs")
    head_dim: int | None = option(None, "number of channels per head; None: gcd(dim, 32)")
    eps: float = option(1e-6, "eps of the norm of queries and keys")

    def check(self, *, dim: int, depth: int) -> None:
        check_positive("eps", self.eps)
        if self.head_dim is not None:
            check_divides("head_dim", self.head_dim, dim)

    def resolved(self, *, dim: int, depth: int) -> dict[str, Any]:
        return {**super().resolved(dim=dim, depth=depth), "head_dim": self.width(dim)}

    def width(self, dim: int) -> int:
        return self.head_dim or math.gcd(dim, 32)


class LightCoeff(NamedTuple):
    gamma: Tensor | None  # [D]; None: reads only the embedding
    embedding: Tensor | None  # a_0 [..., D], at the first site
    decay: Tensor | None  # [D]
    gate: Tensor | None  # a_l [..., D]


class BaseCoeff(NamedTuple):
    gamma: Tensor | None  # [D]
    weights: Tensor | None  # [..., H, S]
    embedding: Tensor | None  # the embedding's key [..., D], at the first site
    key: Tensor | None  # [..., D]


class LayerAttention(DepthMixer):
    """MRLA light (arXiv 2302.03985): u_s = norm(v_s), heads of d_h channels.

    (1) a_s = σ(⟨wq_s ⊙ u_s, wk_s ⊙ u_s⟩ / √d_h) per head
    (2) o ← λ_l ⊙ o + a_l ⊙ v_l
    (3) x ← x + v_l
    (4) h_l = x + γ_l ⊙ o

    State: the residual x and the attention o, both [D]; before sublayer 1 only the embedding. γ starts at 0: the
    plain residual.
    """

    Config = LayerAttentionConfig
    paper = "arXiv 2302.03985"
    holds = "stream, attention"
    rank_formula = "2 per channel"
    parameters_formula = "(4L+2)·D"
    variants = ({}, {"head_dim": 2}, {"form": "base"}, {"form": "base", "head_dim": 4})

    @classmethod
    def resolve(cls, config: Any) -> type[DepthMixer]:
        return LayerAttention if config.form == "light" else BaseLayerAttention

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        return Facts(
            preserves_prenorm="exact",
            rank=min(2, rank_cap(depth)),
            parameters=(4 * depth + 2) * dim,
            reads=3 * dim,
            writes=2 * dim,
            flops=depth * 6 * dim + dim + (depth + 1) * cls.gate_flops(config, dim),
        )

    @classmethod
    def gate_flops(cls, config: Any, dim: int) -> int:
        """FLOPs of the gate of one source: the norm, its weighted square in each head, scale and sigmoid."""
        return arithmetic.rms_norm(dim) + 3 * dim + 2 * dim // int(config.width(dim))

    gamma: Tensor | None
    decay: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    embedding_q_weight: Tensor | None
    embedding_k_weight: Tensor | None

    def __init__(self, site: Site, config: LayerAttentionConfig) -> None:
        super().__init__(site, config)
        self.head_dim = config.width(site.dim)
        for name, exists in self.layout(site).items():
            self.add_parameter(name, site.dim, exists=exists)

    @staticmethod
    def layout(site: Site) -> dict[str, bool]:
        """Which parameters a site owns."""
        return {
            "gamma": not site.is_first,
            "decay": not site.is_out,
            "q_weight": not site.is_out,
            "k_weight": not site.is_out,
            "embedding_q_weight": site.is_first,
            "embedding_k_weight": site.is_first,
        }

    def reset_parameters(self) -> None:
        starts = {"gamma": 0.0, "k_weight": self.head_dim**-0.5, "embedding_k_weight": self.head_dim**-0.5}
        for name, parameter in self.named_parameters(recurse=False):
            nn.init.constant_(parameter, starts.get(name, 1.0))

    @property
    def groups(self) -> int:
        return self.site.dim

    def spec(self, site: Site) -> StateSpec:
        count = 1 if site.is_first else 2
        return StateSpec(((site.dim,),) * count, essential=count, sealed=0)

    def head_gate(self, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> Tensor:
        """The gates [..., H]."""
        assert q_weight is not None
        assert k_weight is not None
        weight = ops.wide(q_weight) * ops.wide(k_weight)
        products = ops.head_products(v, weight, self.head_dim, eps=self.config.eps)
        return torch.sigmoid(products * self.head_dim**-0.5)  # (1)

    def channels(self, gate: Tensor) -> Tensor:
        return gate.repeat_interleave(self.head_dim, -1)

    def coeff(self, state: State) -> Coeff:
        embedding = None
        if self.site.is_first:
            embedding = self.channels(self.head_gate(state[0], self.embedding_q_weight, self.embedding_k_weight))
        gamma, decay = (None if p is None else ops.wide(p) for p in (self.gamma, self.decay))
        return LightCoeff(gamma, embedding, decay, None)

    def combine(self, state: State, c: Coeff) -> Tensor:
        if c.gamma is None:
            return state[0]
        return ops.weighted_sum(state, [None, c.gamma])  # (4)

    def value(self, state: State, c: Coeff, y: Tensor) -> tuple[Coeff, Tensor]:
        return c._replace(gate=self.channels(self.head_gate(y, self.q_weight, self.k_weight))), y

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        x, o, kept = self.held(state, c)
        return x + v, ops.weighted_sum([o, v], [kept, c.gate])  # (3) (2)

    def held(self, state: State, c: Coeff) -> tuple[Tensor, Tensor, Tensor]:
        """x, o and the decay of o; at the first write the embedding gets its gate."""
        if c.embedding is None:
            return *state, c.decay
        return state[0], state[0], c.decay * c.embedding

    def write(self, state: State, carry: Any, y: Tensor) -> State:
        """The same as `value` and `update`, with one gate per head (a trace needs one per channel)."""
        y = self.checked_output(state, y)
        x, *rest = self.held(state, carry)
        gate = self.head_gate(y, self.q_weight, self.k_weight).unsqueeze(-1)
        o, v, kept = (t.unflatten(-1, (-1, self.head_dim)) for t in (rest[0], y, rest[1]))
        return x + y, ops.weighted_sum([o, v], [kept, gate]).flatten(-2)


class BaseLayerAttention(LayerAttention):
    """MRLA base: u_s = norm(v_s), heads of d_h channels, the query from the newest source.

    (1) k_s = wk_s ⊙ u_s
    (2) α = softmax_s(⟨wq_l ⊙ u_{l−1}, k_s⟩ / √d_h) per head
    (3) h_l = Σ_s v_s + γ_l ⊙ Σ_s α_s v_s

    State: every source with its key, v_0, k_0, v_1, k_1, …; before sublayer 1 only the embedding.
    """

    holds = "all outputs and their keys"
    rank_formula = "⌊(L+2)/2⌋ per channel"
    parameters_formula = "(3L+1)·D"

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        return Facts(
            preserves_prenorm="exact",
            rank=rank_cap(depth),
            parameters=(3 * depth + 1) * dim,
            reads=(depth + 1) * dim,  # keys and values of (L+1)/2 sources on average
            writes=3 * dim,
            flops=(depth + 1) * (arithmetic.rms_norm(dim) + dim)
            + sum(cls.row_flops(config, dim, sources) for sources in range(2, depth + 2)),
        )

    @classmethod
    def row_flops(cls, config: Any, dim: int, sources: int) -> int:
        """FLOPs of one read: the query, its scores and softmax per head, the mixture, γ, and the plain sum."""
        heads = dim // int(config.width(dim))
        weights = 2 * dim * sources + heads * arithmetic.softmax(sources)
        query = arithmetic.rms_norm(dim) + 2 * dim
        return query + weights + arithmetic.mixture(sources, dim) + dim + dim * sources

    @staticmethod
    def layout(site: Site) -> dict[str, bool]:
        return {
            "gamma": not site.is_first,
            "q_weight": not site.is_first,
            "k_weight": not site.is_out,
            "embedding_k_weight": site.is_first,
        }

    def spec(self, site: Site) -> StateSpec:
        count = 1 if site.is_first else 2 * (site.index + 1)
        return StateSpec(((site.dim,),) * count, essential=count, sealed=count)

    def key(self, v: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return ops.rms_norm(v, self.config.eps) * weight  # (1)

    def coeff(self, state: State) -> Coeff:
        if self.site.is_first:
            return BaseCoeff(None, None, self.key(state[0], self.embedding_k_weight), None)
        assert self.q_weight is not None
        assert self.gamma is not None
        query = ops.rms_norm(state[-2], self.config.eps) * self.q_weight * self.head_dim**-0.5
        logits = ops.scores(state[1::2], query.unflatten(-1, (-1, self.head_dim)))
        return BaseCoeff(ops.wide(self.gamma), torch.softmax(logits, -1), None, None)  # (2)

    def combine(self, state: State, c: Coeff) -> Tensor:
        if c.weights is None:
            return state[0]
        values = state[::2]
        attention = ops.weighted_mixture(values, c.weights)
        return ops.weighted_sum([attention, *values], [c.gamma, *[None] * len(values)])  # (3)

    def value(self, state: State, c: Coeff, y: Tensor) -> tuple[Coeff, Tensor]:
        return (c if self.k_weight is None else c._replace(key=self.key(y, self.k_weight))), y

    write = DepthMixer.write

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        known = state if c.embedding is None else (state[0], c.embedding.to(v.dtype))
        return (*known, v, c.key.to(v.dtype))

    def source_weights(self, c: Coeff) -> SourceWeights | None:
        return None if c.weights is None else SourceWeights(c.weights, output_names(1, self.site.index))

    def with_weights(self, c: Coeff, weights: Tensor) -> Coeff:
        return c._replace(weights=weights)

    def streams(self, state: State) -> State:
        return state[::2]  # without the keys
