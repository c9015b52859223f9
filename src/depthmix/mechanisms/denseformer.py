"""DenseFormer: after a Transformer block, a learned weighted average of all block outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthmix import ops
from depthmix.mechanisms import arithmetic
from depthmix.mechanisms.base import Coeff, DepthMixer, Facts, MixerConfig, Site, State, StateSpec, option, rank_cap
from depthmix.support.checks import check_range


@dataclass(frozen=True, kw_only=True)
class DenseFormerConfig(MixerConfig):
    dilation: int = option(1, "distance between the blocks that an average reads")
    period: int = option(1, "number of blocks from one average to the next")
    block_sublayers: int = option(2, "number of sublayers in a Transformer block")

    def check(self, *, dim: int, depth: int) -> None:
        for name in ("dilation", "period", "block_sublayers"):
            check_range(name, getattr(self, name), 1)

    def blocks_before(self, index: int) -> int:
        """The number of complete blocks before site `index`."""
        return index // self.block_sublayers

    def averages(self, block: int) -> bool:
        return block > 0 and block % self.period == 0


class DenseFormer(DepthMixer):
    """DenseFormer (arXiv 2402.02622), depth-weighted averaging of block outputs X_0 = embedding, X_1, X_2, …

    (1) Y_j = Σ_{i ≤ j, (j−i) mod dilation = 0} α_{j,i} X_i     where j mod period = 0, otherwise X_j
    (2) X_{j+1} = Y_j + Σ v over block j+1
    (3) h = Y_j plus the outputs of block j+1 so far

    State: X_0 … X_j; inside a block also the running stream. α starts one-hot on X_j: the plain residual. The weights
    are plain parameters, not a Linear, so that initialisation hooks and weight decay do not apply to them.
    """

    Config = DenseFormerConfig
    paper = "arXiv 2402.02622"
    holds = "block outputs"
    rank_formula = "max over cuts of min(vectors held, averages still to come)"
    parameters_formula = "N(N+3)/2, N blocks"
    variants = ({}, {"dilation": 2}, {"period": 2}, {"dilation": 2, "period": 3}, {"block_sublayers": 1})

    weights: Tensor | None

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        blocks = -(-depth // config.block_sublayers)
        sizes = [j // config.dilation + 1 for j in range(1, blocks + 1) if config.averages(j)]
        return Facts(
            preserves_prenorm="exact",
            rank=min(rank_cap(depth), max(cut_rank(config, index, depth) for index in range(depth + 1))),
            parameters=sum(sizes),
            reads=(2 + sum(sizes) / depth) * dim,
            writes=(1 + len(sizes) / depth) * dim,
            flops=arithmetic.mixture(sum(sizes), dim) + depth * dim,
            note=f"{blocks} blocks of {config.block_sublayers} sublayers, an average after {len(sizes)} of them",
        )

    def __init__(self, site: Site, config: DenseFormerConfig) -> None:
        super().__init__(site, config)
        size = config.block_sublayers
        self.at_boundary = site.index % size == 0 or site.is_out
        block = -(-site.index // size) if site.is_out else config.blocks_before(site.index)
        self.reach = range(block % config.dilation, block + 1, config.dilation)  # the indices i of the averaged X_i
        averages = self.at_boundary and config.averages(block)
        self.add_parameter("weights", len(self.reach), exists=averages)

    def reset_parameters(self) -> None:
        if self.weights is not None:
            with torch.no_grad():
                self.weights.zero_()
                self.weights[-1] = 1

    def spec(self, site: Site) -> StateSpec:
        outputs = self.config.blocks_before(site.index) + 1
        running = site.index % self.config.block_sublayers != 0
        return StateSpec(((site.dim,),) * (outputs + running), essential=outputs + running, sealed=outputs)

    def coeff(self, state: State) -> Coeff:
        return None if self.weights is None else ops.wide(self.weights)

    def combine(self, state: State, c: Coeff) -> Tensor:
        if c is None:
            return state[-1]  # (3)
        return ops.weighted_sum([state[i] for i in self.reach], c.unbind())  # (1)

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        return self.write_to_bank(state, self.combine(state, c), v)

    def write_to_bank(self, state: State, h: Tensor, v: Tensor) -> State:
        bank = state if self.at_boundary else state[:-1]
        return (*bank, h + v)  # (2)

    def read(self, state: State) -> tuple[Tensor, Any]:
        h, _ = super().read(state)
        return h, h  # the stream continues from the average, so `write` needs it

    def write(self, state: State, carry: Any, y: Tensor) -> State:
        return self.write_to_bank(state, carry, self.checked_output(state, y))


def cut_rank(config: DenseFormerConfig, index: int, depth: int) -> int:
    """Bound of the rank across the cut before site `index`: vectors held, and distinct reads still to come.

    Exact at dilation 1; a larger dilation reads fewer vectors, and the rank can be lower.
    """
    size = config.block_sublayers
    inside = index % size != 0
    alive = config.blocks_before(index) + 1 + inside
    averages = sum(min(j * size, depth) >= index and config.averages(j) for j in range(1, -(-depth // size) + 1))
    stream = inside or not config.averages(config.blocks_before(index))  # the running stream is read directly
    return min(alive, averages + stream)
