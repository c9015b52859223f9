"""Block Attention Residuals: attention over the sums of blocks of sublayers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from depthmix.mechanisms.base import Facts, Site, State, StateSpec, option
from depthmix.mechanisms.source_attention import SourceAttentionConfig, check_count, options_of_family
from depthmix.mechanisms.two_phase import TwoPhaseAttention
from depthmix.support.checks import check_range


@dataclass(frozen=True, kw_only=True)
class BlockAttnResConfig(SourceAttentionConfig):
    either: ClassVar = (("block_sublayers", "num_blocks"),)
    retrofit: ClassVar = {"scale_by_count": True}

    block_sublayers: int | None = option(None, "number of sublayers in a block; None: the even number nearest to L/8")
    num_blocks: int | None = option(None, "number of blocks N, of ⌈L/N⌉ sublayers each")
    scale_by_count: bool = option(False, "multiplication by the number of sources: exactly PreNorm at the start")

    def check(self, *, dim: int, depth: int) -> None:
        super().check(dim=dim, depth=depth)
        check_count(self.scale_by_count, self.mixing)
        if self.block_sublayers is not None and self.num_blocks is not None:
            raise ValueError(
                f"block_sublayers={self.block_sublayers} and num_blocks={self.num_blocks}; expected only one of them: "
                "each determines the other"
            )
        for name in ("block_sublayers", "num_blocks"):
            if (value := getattr(self, name)) is not None:
                check_range(name, value, 1, depth, remedy=f"The network has {depth} sublayers")

    def resolved(self, *, dim: int, depth: int) -> dict[str, Any]:
        size = None if self.num_blocks is not None else self.size(depth)
        return {**super().resolved(dim=dim, depth=depth), "block_sublayers": size}

    def canonical(self, *, dim: int, depth: int) -> dict[str, Any]:
        return {**super().canonical(dim=dim, depth=depth), "block_sublayers": self.size(depth), "num_blocks": None}

    def function(self, *, dim: int, depth: int) -> dict[str, Any]:
        return {**super().function(dim=dim, depth=depth), "num_blocks": -(-depth // self.size(depth))}

    @property
    def counts_sources(self) -> bool:
        return self.scale_by_count

    def size(self, depth: int) -> int:
        """Number of sublayers in a block."""
        if self.block_sublayers is not None:
            return self.block_sublayers
        if self.num_blocks is not None:
            return -(-depth // self.num_blocks)
        return min(depth, max(2, 2 * ((depth + 8) // 16)))  # even and nearest to depth / 8, ties upward

    def layout(self, depth: int) -> str:
        """The layout of the blocks, as text for users."""
        size = self.size(depth)
        blocks = -(-depth // size)
        asked = f" (num_blocks={self.num_blocks} was requested)" if self.num_blocks not in (None, blocks) else ""
        words = f"{blocks} blocks of {size} sublayers{asked}"
        if blocks > 1 and size == 1:
            words += ": full AttnRes"
        if blocks > 1 and size % 2:
            words += "; an odd block size is not a whole number of layers (attention and MLP)"
        return words


class BlockAttnRes(TwoPhaseAttention):
    """Block Attention Residuals (arXiv 2603.15031, eq. 5–6): blocks of S sublayers, a bank and a running partial p.

    (1) k_i = γ_l ⊙ norm(b_i)
    (2) s_i = scale · ⟨w_l, k_i⟩
    (3) α = softmax(s)
    (4) h_l = Σ_i α_i b_i over bank + [p]
    (5) first of a block: push p to the bank, p = v_l
    (6) otherwise: p ← p + v_l

    State: bank and partial, b_0 … b_{n−1}, p; with query_from="read" h_{l−1} after them. It starts with an empty bank
    and the embedding as the partial, which the first boundary pushes. w starts at 0: the PreNorm network up to the
    scale that each reader's norm removes.
    """

    Config = BlockAttnResConfig
    paper = "arXiv 2603.15031"
    holds = "block sums"
    rank_formula = "max_k min(1+⌈k/S⌉, L+1−k)"
    parameters_formula = "2·L·D"
    takes_decay = frozenset({"query_proj"})
    takes_muon = frozenset({"query_proj"})
    variants = (
        {"block_sublayers": 2},
        *({"block_sublayers": 3, **options} for options in options_of_family()),
        {"num_blocks": 2},
        {"block_sublayers": 1},
        {"scale_by_count": True, "num_blocks": 3},
        {"scale_by_count": True, "mixing": "static", "num_blocks": 3},
    )
    twins = (({"block_sublayers": 1}, "attnres", {}),)

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        size = config.size(depth)
        blocks = -(-depth // size)
        rows = [source_count(size, index) for index in range(depth + 1)]
        generic = max(min(1 + -(-k // size), depth + 1 - k) for k in range(depth + 1))
        shares, added = cls.in_two_phases(config, depth), depth - blocks  # sublayers that add to a partial
        if shares:  # the paper's Table 1
            reads, writes = blocks**2 / depth + 3, 2.0
        else:
            reads, writes = (config.direct_reads(rows[:-1]) + 2 * added) / depth, 1 + added / depth
        writes += config.carried_reads(depth + 1) / depth
        return Facts(
            preserves_prenorm=config.prenorm(dim),
            rank=config.rank(dim, generic, extra=1),  # the partial's key changes as it grows
            parameters=sum(config.parameters(dim, n) for n in rows[1:]),
            reads=reads * dim,
            writes=writes * dim,
            two_phase=shares,
            flops=sum(config.read_flops(dim, n) for n in rows[1:])
            + config.carried_flops(dim, rows[1:-1])
            + added * dim,
            flops_two_phase=cls.two_phase_flops(config, dim, rows) + added * dim if shares else None,
            note=config.layout(depth),
        )

    def __init__(self, site: Site, config: BlockAttnResConfig) -> None:
        super().__init__(site, config)
        self.opens_block = site.index % config.size(site.depth) == 0
        self.reads_partial = not self.opens_block

    @classmethod
    def group_size(cls, config: Any, depth: int) -> int:
        return int(config.size(depth))

    @classmethod
    def finished(cls, config: Any, site: Site) -> int:
        return 1 + site.index // int(config.size(site.depth))

    def spec(self, site: Site) -> StateSpec:
        size = self.config.size(site.depth)
        count = source_count(size, site.index)
        sealed = count if site.index % size == 0 else count - 1
        return self.with_derived(self.spec_of(site, count, sealed), site)

    def grow(self, sources: State, v: Tensor) -> State:
        if self.opens_block:
            return (*sources, v)  # (5)
        return (*sources[:-1], sources[-1] + v)  # (6)

    def source_names(self) -> tuple[str, ...]:
        count = source_count(self.config.size(self.site.depth), self.site.index)
        return ("embedding", *(f"block {n}" for n in range(1, count)))


def source_count(size: int, index: int) -> int:
    """Number of finished blocks before site `index`, including the embedding, plus the partial."""
    return -(-index // size) + 1
