"""Attention Residuals, full: every sublayer attends over the outputs of all sublayers below it.

Axes: ... any leading shape, D channel, H head, S source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms.base import (
    Coeff,
    DepthMixer,
    Facts,
    MixerConfig,
    PreNorm,
    Site,
    State,
    StateSpec,
    check_divides,
    check_positive,
    check_range,
    option,
    rank_cap,
)


@dataclass(frozen=True, kw_only=True)
class SourceAttentionConfig(MixerConfig):
    """How weights of sources are made; shared by the AttnRes family."""

    query: Literal["static", "input"] = option("static", "a learned vector, or a projection of the newest source")
    mixing: Literal["softmax", "sigmoid", "static", "linear"] = option(
        "softmax", "scores to weights; static: learned scalars; linear: a kernel"
    )
    key_norm: bool = option(True, "RMSNorm on keys")
    heads: int = option(1, "groups of channels with weights of their own")
    scale: float = option(1.0, "of the scores")
    eps: float = option(1e-6, "of the key norm")

    def check(self, *, dim: int, depth: int) -> None:
        check_divides("heads", self.heads, dim)
        check_positive("eps", self.eps)
        if self.mixing == "static" and (self.query == "input" or not self.key_norm):
            raise ValueError(
                f"mixing='static' with query={self.query!r} and key_norm={self.key_norm}; learned scalars have neither "
                "query nor key: leave both at their defaults"
            )
        if self.scale != 1 and self.mixing not in ("softmax", "sigmoid"):
            raise ValueError(f"scale={self.scale} with mixing={self.mixing!r}; only softmax and sigmoid have logits")

    @property
    def has_key_weight(self) -> bool:
        return self.key_norm and self.mixing in ("softmax", "sigmoid")

    @property
    def counts_sources(self) -> bool:
        return False

    def parameters(self, dim: int, sources: int) -> int:
        """Of one site that reads this many sources."""
        if self.mixing == "static":
            return self.heads * sources
        return (dim if self.query == "static" else dim * dim) + dim * self.has_key_weight

    def prenorm(self) -> PreNorm:
        return "no" if self.mixing == "linear" else "exact" if self.counts_sources else "up to scale"

    def rank(self, dim: int, generic: int, extra: int = 0) -> int:
        """Static queries over linear keys factor through the width of a head."""
        factors = self.mixing == "linear" and self.query == "static"
        return min(generic, dim // self.heads + extra) if factors else generic

    @property
    def two_phase(self) -> bool:
        return self.query == "static" and self.mixing == "softmax"


@dataclass(frozen=True, kw_only=True)
class AttnResConfig(SourceAttentionConfig):
    window: int | None = option(None, "read the embedding and this many newest outputs only")
    scale_by_count: bool = option(False, "multiply by the number of sources: PreNorm at the start, exactly")

    def check(self, *, dim: int, depth: int) -> None:
        super().check(dim=dim, depth=depth)
        if self.window is not None:
            check_range("window", self.window, 1)
        check_count(self.scale_by_count, self.mixing)

    @property
    def counts_sources(self) -> bool:
        return self.scale_by_count

    def sources(self, index: int) -> int:
        """How many sources the row of site `index` reads: the embedding and the newest outputs."""
        return 1 + (index if self.window is None else min(index, self.window))


def check_count(scale_by_count: bool, mixing: str) -> None:
    if scale_by_count and mixing not in ("softmax", "static"):
        raise ValueError(
            f"scale_by_count=True with mixing={mixing!r}; expected softmax or static, whose weights sum to 1"
        )


def options_of_family() -> tuple[dict[str, Any], ...]:
    """The rows of the paper's ablation table, and what else the weights can be."""
    return (
        {},
        {"query": "input"},
        {"mixing": "sigmoid"},
        {"mixing": "static"},
        {"mixing": "linear"},
        {"key_norm": False},
        {"heads": 2},
        {"heads": 4, "query": "input", "scale": 0.5},
        {"heads": 2, "mixing": "static"},
        {"heads": 2, "mixing": "linear", "query": "input"},
        {"mixing": "sigmoid", "key_norm": False, "scale": 2.0},
    )


class SourceAttention(DepthMixer):
    """Weights over a list of sources, and the mixture; which sources there are is for subclasses to say."""

    query: Tensor | None
    query_proj: Tensor | None
    key_weight: Tensor | None
    logits: Tensor | None

    @classmethod
    def attends(cls, site: Site) -> bool:
        return not site.is_first

    def __init__(self, site: Site, config: Any) -> None:
        super().__init__(site, config)
        attends, dim, heads = self.attends(site), site.dim, config.heads
        sources = self.expects.essential
        static = config.mixing == "static"
        shape = (dim,) if heads == 1 else (heads, dim // heads)
        scalars = (sources,) if heads == 1 else (heads, sources)
        self.add_parameter("query", *shape, exists=attends and not static and config.query == "static")
        self.add_parameter("query_proj", dim, dim, exists=attends and not static and config.query == "input")
        self.add_parameter("key_weight", dim, exists=attends and config.has_key_weight)
        self.add_parameter("logits", *scalars, exists=attends and static)

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            nn.init.constant_(parameter, 1.0 if name == "key_weight" else 0.0)

    @property
    def groups(self) -> int:
        return int(self.config.heads)

    def weights(self, sources: Sequence[Tensor]) -> Tensor:
        """α [..., H, S]."""
        config = self.config
        if self.logits is not None:
            weights = torch.softmax(ops.wide(self.logits).view(config.heads, -1), -1)
            return weights * len(sources) if config.counts_sources else weights
        if self.query_proj is not None:
            query = ops.linear(ops.rms_norm(sources[-1], config.eps), self.query_proj)
        else:
            assert self.query is not None
            query = ops.wide(self.query).flatten()
        query = query.unflatten(-1, (config.heads, -1))  # [..., H, D/H]
        keys = [ops.key_of(v, self.key_weight, config.key_norm, config.eps) for v in sources]  # (1)
        if config.mixing == "linear":
            products = ops.scores([ops.elu1(k) for k in keys], ops.elu1(query))
            return products / products.sum(-1, keepdim=True)
        scores = config.scale * ops.scores(keys, query)  # (2)
        if config.mixing == "sigmoid":
            return torch.sigmoid(scores)
        weights = torch.softmax(scores, -1)  # (3)
        return weights * len(sources) if config.counts_sources else weights

    def coeff(self, state: State) -> Coeff:
        return self.weights(state) if self.attends(self.site) else None

    def combine(self, state: State, c: Coeff) -> Tensor:
        return state[0] if c is None else ops.mix(state, c)  # (4)


class AttnRes(SourceAttention):
    """Full Attention Residuals (arXiv 2603.15031, eq. 2–4): row l reads v_0 … v_{l−1}.

    (1) k_i = γ_l ⊙ norm(v_i)
    (2) s_i = scale · ⟨w_l, k_i⟩
    (3) α = softmax(s)
    (4) h_l = Σ_i α_i v_i
    (5) the sources grow by v_l

    State: the sources, oldest first. w starts at 0, as the paper demands: uniform weights, the PreNorm network up to
    the scale that each reader's norm removes.
    """

    Config = AttnResConfig
    paper = "arXiv 2603.15031"
    holds = "all outputs"
    rank_formula = "⌊(L+2)/2⌋"
    parameters_formula = "2·L·D"
    takes_decay = frozenset({"query_proj"})
    takes_muon = frozenset({"query_proj"})
    variants = (
        *options_of_family(),
        {"window": 2},
        {"window": 1, "heads": 2},
        {"scale_by_count": True},
        {"scale_by_count": True, "mixing": "static"},
    )

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        window = config.window if config.window is not None and config.window < depth else None
        counts = [config.sources(index) for index in range(1, depth + 1)]
        sums = {"softmax": 1, "static": 1, "linear": 1}.get(config.mixing)
        reads, writes = two_phase_traffic(depth) if config.two_phase and not window else (sum(counts) / depth + 1, 2)
        return Facts(
            preserves_prenorm=config.prenorm() if window is None else "no",
            rank=config.rank(dim, rank_cap(depth) if window is None else min(window + 1, rank_cap(depth))),
            parameters=sum(config.parameters(dim, n) for n in counts),
            reads=reads * dim,
            writes=writes * dim,
            two_phase=config.two_phase,
            row_sums=None if sums is None else tuple(float(n if config.scale_by_count else 1) for n in (1, *counts)),
        )

    def spec(self, site: Site) -> StateSpec:
        count = self.config.sources(site.index)
        sealed = count if self.config.window is None else 1
        return StateSpec(((site.dim,),) * count, essential=count, sealed=sealed)

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        kept = self.config.sources(self.site.index + 1) - 1
        return (*state[:1], *(*state[1:], v)[-kept:])  # (5)


def two_phase_traffic(depth: int, block: int | None = None) -> tuple[float, float]:
    """Reads and writes of full AttnRes a sublayer, in widths (the paper's appendix B), with blocks of about √L."""
    block = block or max(1, round(depth**0.5))
    return depth / block + block - 2, 2
