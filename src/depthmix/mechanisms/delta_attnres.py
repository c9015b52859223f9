"""Delta Attention Residuals: attention over all outputs, added to the residual stream instead of replacing it."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from depthmix import ops
from depthmix.mechanisms.base import Coeff, Facts, Site, SourceWeights, State, StateSpec, output_names, rank_cap
from depthmix.mechanisms.source_attention import SourceAttention, SourceAttentionConfig, options_of_family


class DeltaAttnRes(SourceAttention):
    """Delta Attention Residuals (arXiv 2605.18855): α as in AttnRes over v_0 … v_{l−1}.

    (1) k_i = γ_l ⊙ norm(v_i)
    (2) s_i = scale · ⟨w_l, k_i⟩
    (3) α = softmax(s)
    (4) h_l = Σ_i (1 + α_i) v_i
    (5) the sources grow by v_l

    State: the sources, oldest first; with query_from="read" h_{l−1} after them; the stream is their sum. If a read is
    a single softmax with a static query, the sum of all but the newest source follows them; it can be recomputed.
    Row 1 and the output's row are plain sums. w starts at 0: rows are constant, the PreNorm network up to scale.
    """

    Config = SourceAttentionConfig
    paper = "arXiv 2605.18855"
    holds = "all outputs"
    rank_formula = "⌊(L+2)/2⌋"
    parameters_formula = "2·(L−1)·D"
    takes_decay = frozenset({"query_proj"})
    takes_muon = frozenset({"query_proj"})
    variants = options_of_family()

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        normalised = config.mixing != "sigmoid"
        summed = cls.sums(config) * (depth - 1)  # rows that advance the running sum and add their mixture to it
        rows = [float(row + 1 + (0 < row < depth)) for row in range(depth + 1)]
        return Facts(
            preserves_prenorm=config.prenorm(dim) if depth > 1 else "exact",  # one sublayer: no row attends
            rank=config.rank(dim, rank_cap(depth) if depth > 1 else 1, extra=1),
            parameters=sum(config.parameters(dim, index + 1) for index in range(1, depth)),
            reads=(config.direct_reads(range(1, depth + 1)) + 3 * summed) / depth * dim,
            writes=(1 + (summed + config.carried_reads(depth)) / depth) * dim,
            row_sums=tuple(rows) if normalised else None,
            flops=sum(config.read_flops(dim, n) + cls.sum_flops(config, dim, n) for n in range(2, depth + 1))
            + config.carried_flops(dim, range(2, depth))
            + (1 if cls.sums(config) and depth > 1 else depth) * dim,  # the output's sum
        )

    @classmethod
    def attends(cls, site: Site) -> bool:
        return not site.is_first and not site.is_out

    def spec(self, site: Site) -> StateSpec:
        count = site.index + 1
        needed = self.spec_of(site, count, sealed=count)
        derived = self.sums(self.config) and site.index > 1
        return dataclasses.replace(needed, shapes=needed.shapes + ((site.dim,),) * derived)

    @classmethod
    def sums(cls, config: Any) -> bool:
        """Whether a read is the running sum plus a mixture that saves only references and numbers per token."""
        return bool(config.single_softmax)

    @classmethod
    def sum_flops(cls, config: Any, dim: int, sources: int) -> int:
        """FLOPs of adding the running sum to a row's mixture, or 1 to each weight."""
        return 2 * dim if cls.sums(config) else config.heads * sources * (config.mixing != "static")

    def __init__(self, site: Site, config: Any) -> None:
        super().__init__(site, config)
        self.carries = self.sums(config) and not site.is_first

    def coeff(self, state: State) -> Coeff:
        return 1 + self.weights(state) if self.attends(self.site) else None

    def combine(self, state: State, c: Coeff) -> Tensor:
        if c is None:
            return ops.weighted_sum(state, [None] * len(state))
        return ops.weighted_mixture(self.sources_in(state), c)  # (4)

    def grow(self, sources: State, v: Tensor) -> State:
        return (*sources, v)  # (5)

    def source_weights(self, c: Coeff) -> SourceWeights | None:
        return None if c is None else SourceWeights(c - 1, output_names(1, self.site.index))

    def with_weights(self, c: Coeff, weights: Tensor) -> Coeff:
        return 1 + weights

    def streams(self, state: State) -> State:
        sources = state[:-1] if self.hands_on_read else state
        return (ops.weighted_sum(sources, [None] * len(sources)),)

    def read(self, state: State) -> tuple[Tensor, Any]:
        if not self.carries:
            return super().read(state)
        self.check_state(state)
        count = self.expects.essential
        sources, below = state[:count], state[count:]
        stream = below[0] + sources[-1] if below else ops.weighted_sum(sources, [None] * count)
        if self.query is None:
            return stream, None
        h = ops.read_one(sources, ops.fold(self.query, self.key_weight), self.config.read_options)
        return ops.weighted_sum([stream, h], [None, None]), stream

    def write(self, state: State, carry: Any, y: Tensor) -> State:
        if not self.carries:
            return super().write(state, carry, y)
        y = self.checked_output(state, y)
        return (*self.update(state[: self.expects.essential], None, y), carry)
