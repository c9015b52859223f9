"""Weights over a list of sources and their mixture: the shared part of the AttnRes family.

Axes: ... any leading shape, D channel, H head, S source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms import arithmetic
from depthmix.mechanisms.base import (
    Coeff,
    DepthMixer,
    MixerConfig,
    PreNorm,
    Site,
    SourceWeights,
    State,
    StateSpec,
    option,
)
from depthmix.mechanisms.functions import ELU1, count_features, kernel_function, score_function, starts_uniform
from depthmix.support.checks import check_divides, check_positive, check_range


@dataclass(frozen=True, kw_only=True)
class SourceAttentionConfig(MixerConfig):
    """Options for the weights of sources; shared by the AttnRes family."""

    starts: ClassVar = frozenset({"query_init"})
    functions: ClassVar = frozenset({"kernel", "score"})

    query: Literal["static", "input"] = option("static", "query: a learned vector, or a projection (see query_from)")
    query_from: Literal["newest", "read", "sum"] = option(
        "newest", "input that query='input' projects: the newest source, the previous read, or the sum of all sources"
    )
    query_init: float = option(0.0, "initial standard deviation of queries (or of their projections)")
    mixing: Literal["softmax", "sigmoid", "static", "linear"] = option(
        "softmax", "function from scores to weights; static: learned scalars; linear: a kernel"
    )
    key_norm: bool = option(True, "RMSNorm of the keys")
    heads: int = option(1, "number of heads: channel groups with separate weights")
    scale: float = option(1.0, "multiplier of the scores")
    kernel: str = option(ELU1, "feature map of mixing='linear': elu1, or your own function as package.module:function")
    score: str | None = option(None, "score(query, key) as package.module:function; None: the dot product")
    eps: float = option(1e-6, "eps of the key norm")

    def check(self, *, dim: int, depth: int) -> None:
        check_divides("heads", self.heads, dim)
        check_positive("eps", self.eps)
        if self.mixing == "static" and (self.query == "input" or not self.key_norm):
            raise ValueError(
                f"mixing='static' with query={self.query!r} and key_norm={self.key_norm}; learned scalars have no "
                "query and no key: leave both at their defaults"
            )
        if self.scale != 1 and self.mixing not in ("softmax", "sigmoid"):
            raise ValueError(f"scale={self.scale} with mixing={self.mixing!r}; only softmax and sigmoid have logits")
        self.check_query()
        self.check_functions(dim)

    def check_query(self) -> None:
        check_range("query_init", self.query_init, 0)
        if self.query_init and self.mixing == "static":
            raise ValueError(
                f"query_init={self.query_init} with mixing='static', which has no query: do not set query_init"
            )
        if self.query_from != "newest" and self.query != "input":
            raise ValueError(
                f"query_from={self.query_from!r} with query={self.query!r}; expected query='input': a static query "
                "has no input"
            )

    def check_functions(self, dim: int) -> None:
        """Import user-defined functions and try them, so that errors are reported before anything runs."""
        if self.kernel != ELU1 and self.mixing != "linear":
            raise ValueError(f"kernel={self.kernel!r} with mixing={self.mixing!r}; expected mixing='linear'")
        if self.score is not None and self.mixing not in ("softmax", "sigmoid"):
            raise ValueError(f"score={self.score!r} with mixing={self.mixing!r}; expected softmax or sigmoid")
        count_features(self.kernel, dim // self.heads)
        starts_uniform(self.score, self.heads, dim // self.heads)

    @property
    def carries_read(self) -> bool:
        """Whether the state passes each site's read on to the next site, after the sources."""
        return self.query == "input" and self.query_from == "read"

    @property
    def has_key_weight(self) -> bool:
        return self.key_norm and self.mixing in ("softmax", "sigmoid")

    @property
    def counts_sources(self) -> bool:
        return False

    def parameters(self, dim: int, sources: int) -> int:
        """Number of parameters of one site that reads this many sources."""
        if self.mixing == "static":
            return self.heads * sources
        return (dim if self.query == "static" else dim * dim) + dim * self.has_key_weight

    def prenorm(self, dim: int) -> PreNorm:
        uniform = not self.query_init and starts_uniform(self.score, self.heads, dim // self.heads)
        if self.mixing == "linear" or not uniform:
            return "no"
        return "exact" if self.counts_sources else "up to scale"

    def rank(self, dim: int, generic: int, extra: int = 0) -> int:
        """Rank of M: static queries over linear keys factor through the features of a head."""
        factors = self.mixing == "linear" and self.query == "static"
        return min(generic, count_features(self.kernel, dim // self.heads) + extra) if factors else generic

    @property
    def single_softmax(self) -> bool:
        """Whether a read is a single softmax with a query known in advance, which `ops.read_one` computes."""
        return self.query == "static" and self.mixing == "softmax" and self.heads == 1 and self.score is None

    @property
    def read_options(self) -> ops.ReadOptions:
        return ops.ReadOptions(self.key_norm, self.eps, self.scale)

    def attend_flops(self, dim: int, sources: int, queries: int = 1, prior: int = 0) -> int:
        """FLOPs of one pass in which `queries` queries attend over sources, each also over `prior` earlier results."""
        joined, normed = sources + prior, sources * self.key_norm
        norms, logits = normed * arithmetic.inverse_rms(dim), sources * (2 * dim + self.heads)  # dot product, scale
        if self.score is None:
            logits += normed * self.heads  # times 1/rms
        else:  # keys are materialised, times γ
            norms += normed * 2 * dim
        weights = self.heads * (joined if self.mixing == "sigmoid" else arithmetic.softmax(joined))
        return norms + queries * (logits + weights + arithmetic.mixture(joined, dim))

    def read_flops(self, dim: int, sources: int) -> int:
        """FLOPs of one read over this many sources, at least 2. A user-defined score counts as the dot product, a
        user-defined kernel as one operation per number."""
        if self.mixing == "static":
            return arithmetic.mixture(sources, dim)
        flops = dim if self.counts_sources else 0
        if self.query == "input":
            flops += arithmetic.rms_norm(dim) + arithmetic.linear(dim, dim)
            flops += dim * (self.has_key_weight and self.score is None) + (sources - 1) * dim * (
                self.query_from == "sum"
            )
        if self.mixing != "linear":
            return flops + self.attend_flops(dim, sources)
        features = arithmetic.elu1(dim) if self.kernel == ELU1 else dim
        key = arithmetic.rms_norm(dim) * self.key_norm + features + 2 * dim + 2 * self.heads
        return flops + features * (self.query == "input") + sources * key + arithmetic.mixture(sources, dim)

    def carried_flops(self, dim: int, sources: Iterable[int]) -> int:
        """FLOPs of the reads that rows over this many sources pass on: the write computes them once more."""
        return sum(arithmetic.mixture(n, dim) for n in sources) if self.carries_read else 0

    def direct_reads(self, sources: Sequence[int]) -> int:
        """Widths that rows over this many sources read as keys and as values, without the embedding.

        A query's own input is one of the keys; the sum reads all sources once more, the previous read is one tensor.
        """
        passes = 1 if self.mixing == "static" else 3 if self.query_from == "sum" else 2
        return sum(n - 1 for n in sources) * passes + self.carried_reads(len(sources))

    def carried_reads(self, rows: int) -> int:
        """Widths of the previous reads, over the first `rows` sites: written by each but the first, then read."""
        return max(0, rows - 2) if self.carries_read else 0


def check_count(scale_by_count: bool, mixing: str) -> None:
    if scale_by_count and mixing not in ("softmax", "static"):
        raise ValueError(
            f"scale_by_count=True with mixing={mixing!r}; expected mixing='softmax' or 'static', whose weights sum to 1"
        )


def options_of_family() -> tuple[dict[str, Any], ...]:
    """The rows of the paper's ablation table, and the other kinds of weights."""
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
        {"query": "input", "query_from": "read", "query_init": 0.1, "score": "torch.linalg:vecdot"},
        {"heads": 2, "mixing": "linear", "kernel": "torch:exp", "query": "input", "query_from": "sum"},
    )


class SourceAttention(DepthMixer):
    """Weights over a list of sources, and the mixture; subclasses define the sources."""

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
        sources = self.expects.essential  # for learned scalars, which carry no read
        static = config.mixing == "static"
        shape = (dim,) if heads == 1 else (heads, dim // heads)
        scalars = (sources,) if heads == 1 else (heads, sources)
        self.add_parameter("query", *shape, exists=attends and not static and config.query == "static")
        self.add_parameter("query_proj", dim, dim, exists=attends and not static and config.query == "input")
        self.add_parameter("key_weight", dim, exists=attends and config.has_key_weight)
        self.add_parameter("logits", *scalars, exists=attends and static)
        self.kernel, self.score = kernel_function(config.kernel), score_function(config.score)
        self.has_read = self.holds_read(site)
        self.hands_on_read = not site.is_out and self.holds_read(dataclasses.replace(site, index=site.index + 1))

    def holds_read(self, site: Site) -> bool:
        """Whether the state before `site` ends with the previous read; at site 1 that is the embedding itself."""
        return bool(self.config.carries_read and site.index > 1 and self.attends(site))

    def spec_of(self, site: Site, sources: int, sealed: int) -> StateSpec:
        """Specification of a state with this many sources, followed by the previous read."""
        count = sources + self.holds_read(site)
        return StateSpec(((site.dim,),) * count, essential=count, sealed=sealed)

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            if name in ("query", "query_proj") and self.config.query_init:
                nn.init.normal_(parameter, std=self.config.query_init)
            else:
                nn.init.constant_(parameter, 1.0 if name == "key_weight" else 0.0)

    @property
    def groups(self) -> int:
        return int(self.config.heads)

    def sources_in(self, state: State) -> State:
        return state[:-1] if self.has_read else state

    def weights(self, state: State) -> Tensor:
        """α [..., H, S]."""
        config, sources = self.config, self.sources_in(state)
        if self.logits is not None:
            weights = torch.softmax(ops.wide(self.logits).view(config.heads, -1), -1)
            return weights * len(sources) if config.counts_sources else weights
        query, heads = self.query_of(state), (config.heads, -1)  # [..., H, D/H] once it is unflattened
        if config.mixing == "linear" or config.score is not None:
            keys = [ops.key_of(v, self.key_weight, config.key_norm, config.eps) for v in sources]  # (1)
            keys = [k.unflatten(-1, heads) for k in keys]
        if config.mixing == "linear":
            features = self.kernel(query.unflatten(-1, heads))
            products = torch.stack([(self.kernel(k) * features).sum(-1) for k in keys], -1)
            return products / products.sum(-1, keepdim=True)
        if config.score is not None:
            scores = torch.stack([self.score(query.unflatten(-1, heads), k) for k in keys], -1)
        else:  # γ in the query, 1/rms in the logit: no key is materialised
            query = query if self.key_weight is None else query * self.key_weight  # (1)
            scores = ops.normed_scores(sources, query.unflatten(-1, heads), config.key_norm, config.eps)  # (1)
        scores = config.scale * scores  # (2)
        if config.mixing == "sigmoid":
            return torch.sigmoid(scores)
        weights = torch.softmax(scores, -1)  # (3)
        return weights * len(sources) if config.counts_sources else weights

    def query_of(self, state: State) -> Tensor:
        """w [D], or [..., D] if it depends on the input."""
        if self.query_proj is None:
            assert self.query is not None
            return ops.wide(self.query).flatten()
        if self.config.query_from == "sum":
            origin = ops.weighted_sum(state, [None] * len(state))
        else:  # the previous read follows the sources; at site 1 it is the embedding
            origin = state[0] if self.config.carries_read and not self.has_read else state[-1]
        return ops.linear(ops.rms_norm(origin, self.config.eps), self.query_proj)

    def coeff(self, state: State) -> Coeff:
        return self.weights(state) if self.attends(self.site) else None

    def combine(self, state: State, c: Coeff) -> Tensor:
        return state[0] if c is None else ops.weighted_mixture(self.sources_in(state), c)  # (4)

    def grow(self, sources: State, v: Tensor) -> State:
        """The sources after v is written."""
        raise NotImplementedError("a subclass must implement `grow`")

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        grown = self.grow(self.sources_in(state), v)
        return (*grown, self.combine(state, c)) if self.hands_on_read else grown

    def source_names(self) -> tuple[str, ...]:
        """Names of the sources that this site reads, oldest first; empty if a subclass does not name them."""
        return ()

    def source_weights(self, c: Coeff) -> SourceWeights | None:
        """α as in (3), without the factor of `scale_by_count`; sigmoids do not sum to 1."""
        names = self.source_names()
        if not names:
            return None
        weights = torch.ones(()) if c is None else c / len(names) if self.config.counts_sources else c
        return SourceWeights(weights, names, self.reads_partial)

    @property
    def weights_sum_to_one(self) -> bool:
        return bool(self.config.mixing != "sigmoid")

    def with_weights(self, c: Coeff, weights: Tensor) -> Coeff:
        if c is None:  # a single source is read as it is
            return None
        return weights * weights.shape[-1] if self.config.counts_sources else weights
