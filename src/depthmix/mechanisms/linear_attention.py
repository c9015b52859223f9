"""Linear attention over depth: a state of rank r, written with keys and read with learned queries.

Axes: ... any leading shape, R rank, D channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from depthmix import ops
from depthmix.mechanisms import arithmetic
from depthmix.mechanisms.base import Coeff, DepthMixer, Facts, MixerConfig, Site, State, StateSpec, option, rank_cap
from depthmix.support.checks import check_positive, check_range


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(MixerConfig):
    rank: int = option(4, "number of rows r of the state")
    rule: Literal["plain", "gated", "delta", "gated_delta"] = option(
        "plain", "update of the state: add; decay and add; overwrite along the key; decay and overwrite"
    )
    feature_map: Literal["identity", "elu1"] = option("identity", "feature map of queries and keys; elu1: positive")
    normalize: bool = option(False, "division by the sum of the weights; needs elu1")
    eps: float = option(1e-6, "eps of the keys' input norm")

    def check(self, *, dim: int, depth: int) -> None:
        check_range("rank", self.rank, 1)
        check_positive("eps", self.eps)
        if self.normalize and (self.feature_map != "elu1" or self.erases):
            raise ValueError(
                f"normalize=True with feature_map={self.feature_map!r} and rule={self.rule!r}; expected positive "
                "weights: set feature_map='elu1' and rule 'plain' or 'gated'"
            )

    @property
    def erases(self) -> bool:
        """Whether a write first removes what the state recalls for its key."""
        return self.rule in ("delta", "gated_delta")


GATES = {"gated": "gate_proj", "gated_delta": "gate_weight"}  # one gate per row of the state; one for the whole state


class Written(NamedTuple):
    """How a source enters the state: S ← transition S + gain vᵀ."""

    transition: Tensor | None  # [..., R, R], or [..., R] if it is diagonal; None: the identity
    gain: Tensor  # [..., R]


class LinearCoeff(NamedTuple):
    read: Tensor | None  # [..., R]; None: reads only the embedding
    embedding: Written | None  # at the first site, where the embedding gets its key
    written: Written | None


class LinearAttention(DepthMixer):
    """Linear attention over depth; plain, gated (arXiv 2312.06635), by the delta rule (2406.06484), both (2412.06464).

    (1) k_s = ψ(K_s norm(v_s) + b_s)
    (2) plain: S ← S + k vᵀ
    (3) gated: S ← diag(g) S + k vᵀ,  g = σ(G norm(v) + c)
    (4) delta: S ← S + β k (v − Sᵀk)ᵀ,  |k| = 1,  β = 2 σ(⟨w, norm(v)⟩ + d)
    (5) gated_delta: S ← g S + β k (v − g Sᵀk)ᵀ,  k and β as in delta,  g = σ(⟨u, norm(v)⟩ + c), one number
    (6) h_l = ψ(q_l)ᵀ S, normalised: divided by ψ(q_l)ᵀ z, z written as S is with v = 1

    State: S [R, D] (and z [R]); before sublayer 1 only the embedding. With the identity as ψ, q and b start at
    (1, 0, …) and the first row of K at 0: the plain residual, with random keys in the other components.
    """

    Config = LinearAttentionConfig
    paper = "arXiv 2006.16236"
    holds = "r rows"
    rank_formula = "r"
    parameters_formula = "(L+1)r(D+1) + L·r"
    takes_decay = frozenset(
        {"key_proj", "embedding_key_proj", "gate_proj", "gate_weight", "beta_weight", "embedding_beta_weight"}
    )
    variants = (
        {},
        {"rank": 1},
        {"rule": "gated", "rank": 2},
        {"rule": "delta", "rank": 3},
        {"feature_map": "elu1"},
        {"feature_map": "elu1", "normalize": True},
        {"feature_map": "elu1", "normalize": True, "rule": "gated"},
        {"feature_map": "elu1", "rule": "delta"},
        {"rule": "gated_delta", "rank": 3},
        {"feature_map": "elu1", "rule": "gated_delta"},
    )

    query: Tensor | None

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        r, rule = config.rank, config.rule
        betas = (depth + 1) * (dim + 1) if config.erases else 0
        gates = depth * (dim + 1) * {"gated": r, "gated_delta": 1}.get(rule, 0)
        return Facts(
            preserves_prenorm="exact" if rule == "plain" and config.feature_map == "identity" else "no",
            rank=min(r, rank_cap(depth)),
            parameters=(depth + 1) * r * (dim + 1) + depth * r + betas + gates,
            reads=(r + 1) * dim,
            writes=(r + 1) * dim,
            row_sums=(1.0,) * (depth + 1) if config.normalize else None,
            flops=depth * (cls.key_flops(config, dim, rule) + cls.update_flops(config, dim))
            + cls.key_flops(config, dim, {"gated": "plain", "gated_delta": "delta"}.get(rule, rule))
            + r * dim  # the embedding as the first row
            + depth * (arithmetic.mixture(r, dim) + 3 * r * config.normalize),
        )

    @classmethod
    def key_flops(cls, config: Any, dim: int, rule: str) -> int:
        """FLOPs of the coefficients with which a source is written: the key, with its gate or its β and transition."""
        r = config.rank
        rows = r + {"plain": 0, "gated": r, "delta": 1, "gated_delta": 2}[rule]
        flops = arithmetic.normed_linear(dim, rows) + arithmetic.elu1(r) * (config.feature_map == "elu1")
        delta = arithmetic.rms_norm(r) + 2 + 3 * r + 2 * r * r
        return flops + {"plain": 0, "gated": r, "delta": delta, "gated_delta": delta + 1 + r * r}[rule]

    @classmethod
    def update_flops(cls, config: Any, dim: int) -> int:
        r = config.rank
        kept = {"plain": 0, "gated": r}.get(config.rule, 2 * r * r)
        return int((kept + 2 * r) * (dim + config.normalize))

    def __init__(self, site: Site, config: LinearAttentionConfig) -> None:
        super().__init__(site, config)
        r, dim, rule = config.rank, site.dim, config.rule
        shapes: dict[str, tuple[int, ...]] = {"key_proj": (r, dim), "key_bias": (r,)}
        if config.erases:
            shapes |= {"beta_weight": (dim,), "beta_bias": (1,)}
        if rule in GATES:
            by_row = rule == "gated"
            shapes |= {GATES[rule]: (r, dim) if by_row else (dim,), "gate_bias": (r if by_row else 1,)}
        self.add_parameter("query", r, exists=not site.is_first)
        for name, shape in {} if site.is_out else shapes.items():
            self.add_parameter(name, *shape)
            if site.is_first and not name.startswith("gate"):
                self.add_parameter(f"embedding_{name}", *shape)

    def reset_parameters(self) -> None:
        identity = self.config.feature_map == "identity"
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if name.endswith("key_proj"):
                    parameter.normal_(std=self.site.dim**-0.5)
                    parameter[:1] *= not identity
                else:
                    parameter.fill_(4.0 if name == "gate_bias" else 0.0)
                    if identity and (name == "query" or name.endswith("key_bias")):
                        parameter[0] = 1

    def spec(self, site: Site) -> StateSpec:
        if site.is_first:
            return StateSpec(((site.dim,),), essential=1, sealed=0)
        shapes: tuple[tuple[int, ...], ...] = ((self.config.rank, site.dim),)
        shapes += ((self.config.rank,),) * self.config.normalize
        return StateSpec(shapes, essential=len(shapes), sealed=0)

    def feature(self, x: Tensor) -> Tensor:
        return x if self.config.feature_map == "identity" else ops.elu1(x)

    def project(self, v: Tensor, *names: tuple[str, str]) -> tuple[Tensor, ...]:
        """Projections of norm(v) with several weights and biases, in one product."""
        weights = [torch.atleast_2d(getattr(self, weight)) for weight, _ in names]
        bias = torch.cat([getattr(self, bias) for _, bias in names])
        return ops.normed_linear(v, torch.cat(weights), bias, eps=self.config.eps).split([len(w) for w in weights], -1)

    def written(self, v: Tensor, prefix: str = "") -> Written:
        names = [("key_proj", "key_bias")]
        names += [("beta_weight", "beta_bias")] * self.config.erases
        if not prefix and (gate := GATES.get(self.config.rule)):  # nothing precedes the embedding, so nothing decays
            names += [(gate, "gate_bias")]
        key, *rest = self.project(v, *((prefix + weight, prefix + bias) for weight, bias in names))
        key = self.feature(key)  # (1)
        if not self.config.erases:
            return Written(torch.sigmoid(rest[0]) if rest else None, key)  # (2) (3)
        rank = self.config.rank
        key = ops.rms_norm(key, self.config.eps / rank) * rank**-0.5  # of length 1
        beta = 2 * torch.sigmoid(rest[0])
        erased = beta.unsqueeze(-1) * key.unsqueeze(-1) * key.unsqueeze(-2)
        transition = torch.eye(rank, dtype=key.dtype, device=key.device) - erased  # (4)
        for logit in rest[1:]:
            transition = torch.sigmoid(logit).unsqueeze(-1) * transition  # (5)
        return Written(transition, beta * key)

    def coeff(self, state: State) -> Coeff:
        if self.query is None:
            return LinearCoeff(None, self.written(state[0], "embedding_"), None)
        read = self.feature(ops.wide(self.query))
        if self.config.normalize:
            read = read / (read * state[1]).sum(-1, keepdim=True)
        return LinearCoeff(read, None, None)

    def combine(self, state: State, c: Coeff) -> Tensor:
        return state[0] if c.read is None else ops.read_streams(state[0], c.read)  # (6)

    def value(self, state: State, c: Coeff, y: Tensor) -> tuple[Coeff, Tensor]:
        return (c if self.site.is_out else c._replace(written=self.written(y))), y

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        if c.embedding is not None:
            state = self.start(state[0], c.embedding)
        transition, gain = c.written
        rows = ops.write_streams(state[0], transition, gain, v)
        if not self.config.normalize:
            return (rows,)
        one = torch.ones_like(state[1][..., :1])
        return rows, ops.write_streams(state[1].unsqueeze(-1), transition, gain, one).squeeze(-1)

    def start(self, x: Tensor, written: Written) -> State:
        """The first state, in which only the embedding is written: there is nothing to decay or to erase."""
        rows = (written.gain.unsqueeze(-1) * x.unsqueeze(-2)).to(x.dtype)
        return (rows, written.gain.to(x.dtype)) if self.config.normalize else (rows,)

    def streams(self, state: State) -> State:
        return state[:1]  # without z
