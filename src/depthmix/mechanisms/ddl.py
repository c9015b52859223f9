"""Deep Delta Learning: the stream rewritten by the delta rule, with the sublayer's output as the key.

Axes: ... any leading shape, V value column, D channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms import arithmetic
from depthmix.mechanisms.base import Coeff, DepthMixer, Facts, MixerConfig, Site, State, StateSpec, option
from depthmix.support.checks import check_positive, check_range


@dataclass(frozen=True, kw_only=True)
class DeepDeltaConfig(MixerConfig):
    starts: ClassVar = frozenset({"beta"})

    value_width: int = option(1, "number of value columns V of the state")
    beta: float = option(1.0, "initial β, between 0 and 2")
    key_norm: ops.KeyNorm = option("l2", "norm of the key; l2_squared: released code; rms: depthmix 0.1.0")
    key_eps: float = option(1e-10, "eps of the key's norm; released code: 1e-5")
    target_input: Literal["normed", "read"] = option("normed", "input of the target's projection; released code: read")
    target_bias: bool = option(False, "bias in the target's projection; released code: True")
    target_bound: float | None = option(None, "bound of the target, which becomes a scaled sigmoid; released code: 4")
    eps: float = option(1e-6, "eps of the norm of the read vector")

    def check(self, *, dim: int, depth: int) -> None:
        check_range("value_width", self.value_width, 1)
        check_positive("eps", self.eps)
        check_positive("key_eps", self.key_eps)
        if self.target_bound is not None:
            check_positive("target_bound", self.target_bound)
        if not 0 < self.beta < 2:
            raise ValueError(f"beta={self.beta}; expected a number between 0 (skip) and 2 (reflect), both excluded")


class DeltaCoeff(NamedTuple):
    read: Tensor  # [V]
    beta: Tensor | None  # [..., 1]
    target: Tensor | None  # [..., V]
    key: Tensor | None  # [..., D]


class DeepDelta(DepthMixer):
    """Deep Delta Learning (arXiv 2601.00417); X has V value columns, stored as rows.

    (1) h_l = Σ_j r[j] X[j]
    (2) β = 2 σ(⟨w, norm(h_l)⟩ + b)
    (3) val = W norm(h_l)
    (4) k = y / (‖y‖ + key_eps),  y the sublayer's output
    (5) X[j] ← X[j] + β (val[j] − ⟨X[j], k⟩) k

    Options give (3) and (4) as in the released code. State: X [V, D], V copies of the embedding at first. β starts at
    `beta` (1: overwrite along the key), r as the mean. Every later I − β k kᵀ acts on what a source added: the
    mixing is operator-valued.
    """

    Config = DeepDeltaConfig
    paper = "arXiv 2601.00417"
    holds = "V columns"
    rank_formula = "operator-valued"
    parameters_formula = "L(D+1+V·D), + L·V for V ≥ 2, + L·V with a bias"
    operator_valued = True
    takes_decay = frozenset({"beta_weight", "value_weight"})
    variants = (
        {},
        {"value_width": 3, "key_eps": 0.1},
        {"beta": 0.5, "key_norm": "rms", "key_eps": 1e-5, "target_bias": True},
        {"value_width": 2, "key_norm": "l2_squared", "key_eps": 0.1, "target_input": "read", "target_bound": 4.0},
    )

    beta_weight: Tensor | None
    beta_bias: Tensor | None
    value_weight: Tensor | None
    value_bias: Tensor | None
    readout: Tensor | None

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        m = config.value_width
        return Facts(
            preserves_prenorm="no",
            rank=None,
            parameters=depth * (dim + 1 + m * dim + m * (m > 1) + m * config.target_bias),
            reads=(2 * m + 1) * dim,
            writes=(m + 1) * dim,
            flops=(depth + 1) * arithmetic.mixture(m, dim) + depth * cls.write_flops(config, dim),
        )

    @classmethod
    def write_flops(cls, config: Any, dim: int) -> int:
        """FLOPs of a sublayer's gates, key, recalled values and rewritten rows."""
        m = config.value_width
        if config.target_input == "normed":
            gates = arithmetic.normed_linear(dim, 1 + m, bias=False)
        else:
            gates = arithmetic.normed_linear(dim, 1, bias=False) + arithmetic.linear(dim, m)
        gates += 3 + m * config.target_bias + 2 * m * (config.target_bound is not None)
        key = arithmetic.rms_norm(dim) + 1
        return gates + key + 4 * m * dim + 2 * m

    def __init__(self, site: Site, config: DeepDeltaConfig) -> None:
        super().__init__(site, config)
        m, dim = config.value_width, site.dim
        self.add_parameter("beta_weight", dim, exists=not site.is_out)
        self.add_parameter("beta_bias", 1, exists=not site.is_out)
        self.add_parameter("value_weight", m, dim, exists=not site.is_out)
        self.add_parameter("value_bias", m, exists=config.target_bias and not site.is_out)
        self.add_parameter("readout", m, exists=m > 1 and not site.is_first)

    def reset_parameters(self) -> None:
        if self.beta_weight is not None and self.beta_bias is not None and self.value_weight is not None:
            nn.init.zeros_(self.beta_weight)
            nn.init.constant_(self.beta_bias, math.log(self.config.beta / (2 - self.config.beta)))
            nn.init.normal_(self.value_weight, std=self.site.dim**-0.5)
        if self.value_bias is not None:
            nn.init.zeros_(self.value_bias)
        if self.readout is not None:
            nn.init.constant_(self.readout, 1 / self.config.value_width)

    def spec(self, site: Site) -> StateSpec:
        return StateSpec(((self.config.value_width, site.dim),), essential=1, sealed=0)

    def begin(self, x: Tensor) -> State:
        return (x.unsqueeze(-2).repeat_interleave(self.config.value_width, -2),)

    def coeff(self, state: State) -> Coeff:
        read = self.read_weights(state[0])
        return self.gates(ops.read_streams(state[0], read), read)

    def read_weights(self, state: Tensor) -> Tensor:
        if self.readout is not None:
            return ops.wide(self.readout)
        m = self.config.value_width
        return state.new_full((m,), 1 / m, dtype=ops.accumulator(state.dtype))

    def gates(self, h: Tensor, read: Tensor) -> DeltaCoeff:
        if self.beta_weight is None or self.beta_bias is None or self.value_weight is None:
            return DeltaCoeff(read, None, None, None)
        if self.config.target_input == "normed":  # one product gives both
            both = ops.normed_linear(h, torch.cat([self.beta_weight[None], self.value_weight]), eps=self.config.eps)
            logit, target = both.split([1, len(self.value_weight)], -1)  # (3)
        else:
            logit = ops.normed_linear(h, self.beta_weight[None], eps=self.config.eps)
            target = ops.linear(h, self.value_weight)
        if self.value_bias is not None:
            target = target + self.value_bias
        if self.config.target_bound is not None:
            target = self.config.target_bound * torch.sigmoid(target)
        return DeltaCoeff(read, 2 * torch.sigmoid(logit + self.beta_bias), target, None)  # (2)

    def combine(self, state: State, c: Coeff) -> Tensor:
        return ops.read_streams(state[0], c.read)  # (1)

    def value(self, state: State, c: Coeff, y: Tensor) -> tuple[Coeff, Tensor]:
        key = ops.unit_key(y, self.config.key_eps, self.config.key_norm)  # (4)
        return c._replace(key=key), key

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        return (ops.delta_rule(state[0], c.key, v, c.beta, c.target),)  # (5)

    def read(self, state: State) -> tuple[Tensor, Any]:
        """The gates depend on the read vector too: it is computed once for both."""
        self.check_state(state)
        read = self.read_weights(state[0])
        h = ops.read_streams(state[0], read)
        return h, self.gates(h, read)

    def write(self, state: State, carry: Any, y: Tensor) -> State:
        """The same as `value` and `update`, without materialising the key."""
        y = self.checked_output(state, y)
        options = {"eps": self.config.key_eps, "norm": self.config.key_norm}
        return (ops.normed_delta(state[0], y, carry.beta, carry.target, **options),)


def readout_matrix(coeffs: Sequence[DeltaCoeff]) -> Tensor:
    """k_lᵀ T_{i→l} k_i for 1 ≤ i < l, as [..., L, L+1] (column 0, the embedding, has no key and is 0).

    Times β_i val_iᵀ it is what sublayer l recalls of the writes below it: DeltaNet's attention, over depth.
    `coeffs` are those of the L sublayers, as a trace records them.
    """
    keys = torch.stack([c.key for c in coeffs if c.key is not None], -2)  # [..., L, D]
    beta = torch.stack([c.beta for c in coeffs if c.beta is not None], -2)  # [..., L, 1]
    gram = keys @ keys.mT
    unit = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    # T_{i→l} k_i unrolls to a unit lower-triangular solve: R (I + diag(β) strict_tril(K Kᵀ)) = strict_tril(K Kᵀ).
    strict = gram.tril(-1)
    recalled = torch.linalg.solve_triangular((unit + beta * strict).mT, strict.mT, upper=True).mT
    return torch.nn.functional.pad(recalled, (1, 0))
