"""The plain residual stream, the baseline of every comparison."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from depthmix.mechanisms.base import Coeff, DepthMixer, Facts, State


class Residual(DepthMixer):
    """The residual stream (arXiv 1512.03385, 2002.04745 for PreNorm).

    (1) h_l = x
    (2) x ← x + v_l

    State: the stream x [D]. No parameters.
    """

    paper = "arXiv 1512.03385"
    holds = "1 stream"
    rank_formula = "1"
    parameters_formula = "0"

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        row_sums = tuple(float(row + 1) for row in range(depth + 1))
        return Facts(
            preserves_prenorm="exact",
            rank=1,
            parameters=0,
            reads=2 * dim,
            writes=dim,
            row_sums=row_sums,
            flops=depth * dim,
        )

    def combine(self, state: State, c: Coeff) -> Tensor:
        return state[0]  # (1)

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        return (state[0] + v,)  # (2)
