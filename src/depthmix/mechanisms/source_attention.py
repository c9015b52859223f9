"""Weights over a list of sources, and their mixture: what the AttnRes family shares.

Axes: ... any leading shape, D channel, H head, S source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms import arithmetic
from depthmix.mechanisms.base import Coeff, DepthMixer, MixerConfig, PreNorm, Site, SourceWeights, State, option
from depthmix.support.checks import check_divides, check_positive


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
    def single_softmax(self) -> bool:
        """Whether a read is one softmax under a query known in advance: what `ops.read_one` computes."""
        return self.query == "static" and self.mixing == "softmax" and self.heads == 1

    @property
    def read_options(self) -> ops.ReadOptions:
        return ops.ReadOptions(self.key_norm, self.eps, self.scale)

    def attend_flops(self, dim: int, sources: int, queries: int = 1, prior: int = 0) -> int:
        """Of one pass in which so many queries attend over sources, each with `prior` mixtures of known logits too."""
        joined = sources + prior
        logits = sources * (2 * dim + self.heads * (self.key_norm + 1))  # dot product, times 1/rms and scale
        weights = self.heads * (joined if self.mixing == "sigmoid" else arithmetic.softmax(joined))
        norms = sources * self.key_norm * arithmetic.inverse_rms(dim)
        return norms + queries * (logits + weights + arithmetic.mixture(joined, dim))

    def read_flops(self, dim: int, sources: int) -> int:
        """Of one read over this many sources, at least 2."""
        if self.mixing == "static":
            return arithmetic.mixture(sources, dim)
        flops = dim if self.counts_sources else 0
        if self.query == "input":
            flops += arithmetic.rms_norm(dim) + arithmetic.linear(dim, dim) + dim * self.has_key_weight
        if self.mixing != "linear":
            return flops + self.attend_flops(dim, sources)
        flops += arithmetic.elu1(dim) * (self.query == "input")
        key = arithmetic.rms_norm(dim) * self.key_norm + arithmetic.elu1(dim)
        return flops + sources * (key + 2 * dim + 2 * self.heads) + arithmetic.mixture(sources, dim)

    def direct_reads(self, sources: Sequence[int]) -> int:
        """Widths that rows over this many sources read as keys and as values, the embedding not counted."""
        return sum(n - 1 for n in sources) * (1 if self.mixing == "static" else 2)


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
    reads_partial = False  # whether the newest source is still growing

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
        if self.key_weight is not None:
            query = query * self.key_weight  # (1) γ in the query, 1/rms in the logit: no key is made
        query = query.unflatten(-1, (config.heads, -1))  # [..., H, D/H]
        if config.mixing == "linear":
            keys = [ops.key_of(v, None, config.key_norm, config.eps) for v in sources]  # (1)
            products = ops.scores([ops.elu1(k) for k in keys], ops.elu1(query))
            return products / products.sum(-1, keepdim=True)
        scores = config.scale * ops.normed_scores(sources, query, config.key_norm, config.eps)  # (2)
        if config.mixing == "sigmoid":
            return torch.sigmoid(scores)
        weights = torch.softmax(scores, -1)  # (3)
        return weights * len(sources) if config.counts_sources else weights

    def coeff(self, state: State) -> Coeff:
        return self.weights(state) if self.attends(self.site) else None

    def combine(self, state: State, c: Coeff) -> Tensor:
        return state[0] if c is None else ops.weighted_mixture(state, c)  # (4)

    def source_names(self) -> tuple[str, ...]:
        """Of the sources that this site reads, oldest first; none where a subclass does not name them."""
        return ()

    def source_weights(self, c: Coeff) -> SourceWeights | None:
        """α as (3) has it, without the factor of `scale_by_count`; sigmoids do not sum to 1."""
        names = self.source_names()
        if not names:
            return None
        weights = torch.ones(()) if c is None else c / len(names) if self.config.counts_sources else c
        return SourceWeights(weights, names, self.reads_partial)
