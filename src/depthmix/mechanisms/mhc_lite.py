"""mHC-lite: mHC whose stream mixing is exactly doubly stochastic, a mixture of all permutations.

Axes: ... any leading shape, m stream, P permutation.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from depthmix import ops
from depthmix.mechanisms import arithmetic
from depthmix.mechanisms.base import MixerConfig, Site, option
from depthmix.mechanisms.hyper_connections import Readout
from depthmix.mechanisms.mhc import ManifoldHyperConnections
from depthmix.mechanisms.stream_starts import WIDEST, check_output_scale, start_of
from depthmix.support.checks import check_positive, check_range


@dataclass(frozen=True, kw_only=True)
class LiteConfig(MixerConfig):
    starts: ClassVar = frozenset({"start", "output_scale"})
    retrofit: ClassVar = {"start": "parted"}

    streams: int = option(4, "number of streams m, 2 to 5")
    readout: Readout = option("mean", "combination of the streams that the head reads; learned: DeepSeek's head")
    transition: Literal["full", "identity"] = option("full", "mixing of the streams; identity: none")
    start: Literal["prenorm", "parted", "scaled", "lite", "hyper", "megatron", "paper"] = option(
        "lite", "initialisation; prenorm, hyper, parted keep PreNorm; parted: streams differ (for retrofits)"
    )
    output_scale: float | None = option(None, "initial mean of H_post; None: given by `start`")
    norm_eps: float = option(1e-6, "eps of the norm over all streams")

    def check(self, *, dim: int, depth: int) -> None:
        check_range("streams", self.streams, 2, 5, remedy="There are m! permutations; for more streams use 'mhc'")
        check_positive("norm_eps", self.norm_eps)
        check_output_scale(self, WIDEST)

    def canonical(self, *, dim: int, depth: int) -> dict[str, Any]:
        options = super().canonical(dim=dim, depth=depth)
        return {**options, "start": "paper" if self.start == "lite" else self.start}  # its name in 0.1.0

    def function(self, *, dim: int, depth: int) -> dict[str, Any]:
        """Without `transition`, which follows from the rows of `projection`: older state dicts still load."""
        options = super().function(dim=dim, depth=depth)
        return {name: value for name, value in options.items() if name != "transition"}

    @property
    def transition_size(self) -> int:
        return math.factorial(self.streams) if self.transition == "full" else 0

    @property
    def input_scale(self) -> float:
        return start_of(self).scale

    @property
    def eps(self) -> float:
        return 0.0


class LiteHyperConnections(ManifoldHyperConnections):
    """mHC-lite (arXiv 2601.05732): like mHC except for the transition, which is applied without transposing.

    (1) z = P u, in parts pre, post, res
    (2) H_pre = σ(a z + b)
    (3) H_post = 2 σ(a z + b)
    (4) H_res = Σ_r softmax(a z + b)_r Π_r,  Π_r[i, π_r(i)] = 1,  r in lexicographic order
    (h) h_l = Σ_j H_pre[j] H[j]
    (H) H[i] ← Σ_j H_res[i, j] H[j] + H_post[i] v_l

    State: H [m, D]. The starts are those of mHC; "lite" is this paper's.
    """

    Config = LiteConfig
    paper = "arXiv 2601.05732"
    parameters_formula = "L((m!+2m)(mD+1)+3) − m(mD+1) − 1"
    variants = (
        {},
        {"start": "paper"},
        {"start": "parted", "streams": 3, "readout": "learned"},
        {"start": "megatron", "streams": 2, "readout": "sum"},
        {"start": "hyper", "transition": "identity"},
        {"start": "lite", "streams": 2, "output_scale": 0.7},
        {"start": "scaled", "streams": 3},
        {"start": "prenorm"},
    )

    @classmethod
    def transition_flops(cls, config: Any) -> int:
        return arithmetic.softmax(config.transition_size) + arithmetic.linear(config.transition_size, config.streams**2)

    def __init__(self, site: Site, config: LiteConfig) -> None:
        super().__init__(site, config)
        self.permutations = list(itertools.permutations(range(config.streams)))

    def transition_start(self, apart: float | None) -> list[float]:
        return [0.0, *[-8.0 if apart is None else apart] * (self.config.transition_size - 1)]

    def transition(self, logits: Tensor) -> Tensor:
        m = self.config.streams
        places = [[float(order[i] == j) for order in self.permutations] for i in range(m) for j in range(m)]
        matrices = torch.tensor(places, dtype=logits.dtype, device=logits.device)  # [m·m, P]
        return ops.linear(torch.softmax(logits, -1), matrices).unflatten(-1, (m, m))  # (4)


def permute_rows(parameter: Tensor, streams: int) -> Tensor:
    """A `projection` or `bias` with the transition's rows in the authors' order; the same call converts back.

    The authors number the permutations in the same way but apply the transposed matrices: their row of π is our row
    of π⁻¹. The m! rows of the transition are the last ones; the rows before them are unchanged.
    """
    orders = list(itertools.permutations(range(streams)))
    before = len(parameter) - len(orders)
    if before < 0:
        raise ValueError(
            f"a parameter of {len(parameter)} rows with streams={streams}; expected at least {len(orders)} rows, one "
            f"for each permutation. Transpose the authors' weight, which is [m·D, m!]"
        )
    inverses = [orders.index(tuple(order.index(stream) for stream in range(streams))) for order in orders]
    return parameter[[*range(before), *(before + row for row in inverses)]]
