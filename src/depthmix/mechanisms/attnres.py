"""Attention Residuals, full: every sublayer attends over the outputs of all sublayers below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from depthmix.mechanisms.base import Facts, Site, State, StateSpec, option, output_names, rank_cap
from depthmix.mechanisms.source_attention import SourceAttentionConfig, check_count, options_of_family
from depthmix.mechanisms.two_phase import TwoPhaseAttention
from depthmix.support.checks import check_range


@dataclass(frozen=True, kw_only=True)
class AttnResConfig(SourceAttentionConfig):
    rounding: ClassVar = frozenset({"group_sublayers"})
    retrofit: ClassVar = {"scale_by_count": True}

    window: int | None = option(None, "number of newest outputs that are read, besides the embedding; None: all")
    scale_by_count: bool = option(False, "multiplication by the number of sources: exactly PreNorm at the start")
    group_sublayers: int | None = option(None, "number of sublayers that share phase 1 of a read; None: about √L")

    def check(self, *, dim: int, depth: int) -> None:
        super().check(dim=dim, depth=depth)
        if self.window is not None:
            check_range("window", self.window, 1)
            if self.query_from == "sum" and self.window < depth:
                raise ValueError(
                    f"query_from='sum' with window={self.window}; the sum needs all {depth} outputs, but a window "
                    "keeps only the newest: set only one of the two, or choose query_from='read'"
                )
        check_count(self.scale_by_count, self.mixing)
        if self.group_sublayers is not None:
            check_range("group_sublayers", self.group_sublayers, 1)
            if not self.single_softmax:
                raise ValueError(
                    f"group_sublayers={self.group_sublayers}; expected mixing='softmax', query='static', heads=1 and "
                    "no window: other reads share no pass"
                )

    def resolved(self, *, dim: int, depth: int) -> dict[str, Any]:
        size = self.group_size(depth) if self.single_softmax else None
        return {**super().resolved(dim=dim, depth=depth), "group_sublayers": size}

    def group_size(self, depth: int) -> int:
        """Number of sites that share phase 1; about √L needs the least traffic, if it divides L."""
        return max(1, round(depth**0.5)) if self.group_sublayers is None else min(depth, self.group_sublayers)

    @property
    def counts_sources(self) -> bool:
        return self.scale_by_count

    @property
    def single_softmax(self) -> bool:
        return super().single_softmax and self.window is None

    def sources(self, index: int) -> int:
        """Number of sources that the row of site `index` reads: the embedding and the newest outputs."""
        return 1 + (index if self.window is None else min(index, self.window))


class AttnRes(TwoPhaseAttention):
    """Full Attention Residuals (arXiv 2603.15031, eq. 2–4): row l reads v_0 … v_{l−1}.

    (1) k_i = γ_l ⊙ norm(v_i)
    (2) s_i = scale · ⟨w_l, k_i⟩
    (3) α = softmax(s)
    (4) h_l = Σ_i α_i v_i
    (5) the sources grow by v_l

    Traffic is counted as in the paper's appendix B, for groups of about √L sublayers that share phase 1; the paper's
    24·D at L = 128 is for `group_sublayers=16`.

    State: the sources, oldest first; with query_from="read" h_{l−1} after them. w starts at 0, as the paper requires:
    uniform weights, the PreNorm network up to the scale that each reader's norm removes.
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
        {"window": 2, "query": "input", "query_from": "read"},
        {"scale_by_count": True},
        {"scale_by_count": True, "mixing": "static"},
        {"group_sublayers": 3},
    )

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        window = config.window if config.window is not None and config.window < depth else None
        rows = [config.sources(index) for index in range(depth + 1)]
        sums = {"softmax": 1, "static": 1, "linear": 1}.get(config.mixing)
        shares, size = cls.in_two_phases(config, depth), config.group_size(depth)
        reads, writes = two_phase_traffic(depth, size) if shares else (config.direct_reads(rows[:-1]) / depth, 1.0)
        writes += config.carried_reads(depth + 1) / depth
        return Facts(
            preserves_prenorm=config.prenorm(dim) if window is None else "no",
            rank=config.rank(dim, rank_cap(depth) if window is None else min(window + 1, rank_cap(depth))),
            parameters=sum(config.parameters(dim, n) for n in rows[1:]),
            reads=reads * dim,
            writes=writes * dim,
            two_phase=shares,
            row_sums=None if sums is None else tuple(float(n if config.scale_by_count else 1) for n in rows),
            flops=sum(config.read_flops(dim, n) for n in rows[1:]) + config.carried_flops(dim, rows[1:-1]),
            flops_two_phase=cls.two_phase_flops(config, dim, rows) if shares else None,
            note=f"groups of {size} sublayers share one pass over the sources below the group" if shares else "",
        )

    @classmethod
    def group_size(cls, config: Any, depth: int) -> int:
        return int(config.group_size(depth))

    @classmethod
    def finished(cls, config: Any, site: Site) -> int:
        return 1 + site.index - site.index % int(config.group_size(site.depth))

    def spec(self, site: Site) -> StateSpec:
        count = self.config.sources(site.index)
        sealed = 1 if self.config.window is not None and self.config.window < site.depth else count
        return self.with_derived(self.spec_of(site, count, sealed), site)

    def __init__(self, site: Site, config: AttnResConfig) -> None:
        super().__init__(site, config)
        self.kept = config.sources(site.index + 1) - 1  # outputs that the next site reads

    def grow(self, sources: State, v: Tensor) -> State:
        return (*sources[:1], *(*sources[1:], v)[-self.kept :])  # (5)

    def source_names(self) -> tuple[str, ...]:
        newest = self.site.index
        return output_names(newest + 2 - self.config.sources(newest), newest)


def two_phase_traffic(depth: int, group: int) -> tuple[float, float]:
    """Reads and writes of full AttnRes per sublayer, in widths, counted as the paper's appendix B does.

    Keys and values count separately; the embedding, and reading the results of phase 1, do not count.
    """
    ahead = sum(2 * start for start in range(0, depth, group))  # phase 1, once per group
    recent = sum(2 * (index % group) for index in range(depth))  # phase 2, at every site
    return (ahead + recent) / depth, 2.0
