"""ReZero and LayerScale: the residual stream with a learned scale on each output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms.base import Coeff, DepthMixer, Facts, MixerConfig, Site, State, option


@dataclass(frozen=True, kw_only=True)
class ScaledResidualConfig(MixerConfig):
    starts: ClassVar = frozenset({"init"})
    retrofit: ClassVar = {"init": 1.0}

    gate: Literal["scalar", "channel"] = option("scalar", "one scale per sublayer (ReZero) or per channel (LayerScale)")
    init: float | None = option(None, "initial value of every scale; None: 0, or LayerScale's table by depth")

    def resolved(self, *, dim: int, depth: int) -> dict[str, Any]:
        return {**super().resolved(dim=dim, depth=depth), "init": self.start(depth)}

    def start(self, depth: int) -> float:
        """0 for ReZero; for LayerScale its table by the number of Transformer blocks."""
        if self.init is not None or self.gate == "scalar":
            return self.init or 0.0
        blocks = (depth + 1) // 2
        return 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6


class ScaledResidual(DepthMixer):
    """ReZero (arXiv 2003.04887), LayerScale (arXiv 2103.17239).

    (1) h_l = x
    (2) x ← x + a_l ⊙ v_l

    State: the stream x [D]. a_l starts at 0 (ReZero) or small (LayerScale), so that a deep network starts near the
    identity.
    """

    Config = ScaledResidualConfig
    paper = "arXiv 2003.04887, 2103.17239"
    holds = "1 stream"
    rank_formula = "1"
    parameters_formula = "L or L·D"
    variants = ({}, {"gate": "channel"}, {"init": 1.0})

    scale: Tensor | None

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> Facts:
        return Facts(
            preserves_prenorm="exact" if config.start(depth) == 1 else "no",
            rank=1,
            parameters=depth * (1 if config.gate == "scalar" else dim),
            reads=2 * dim,
            writes=dim,
            flops=depth * 2 * dim,
        )

    def __init__(self, site: Site, config: ScaledResidualConfig) -> None:
        super().__init__(site, config)
        width = 1 if config.gate == "scalar" else site.dim
        self.add_parameter("scale", width, exists=not site.is_out)

    def reset_parameters(self) -> None:
        if self.scale is not None:
            nn.init.constant_(self.scale, self.config.start(self.site.depth))

    @property
    def groups(self) -> int:
        return 1 if self.config.gate == "scalar" else self.site.dim

    def coeff(self, state: State) -> Coeff:
        return None if self.scale is None else ops.wide(self.scale)

    def combine(self, state: State, c: Coeff) -> Tensor:
        return state[0]  # (1)

    def update(self, state: State, c: Coeff, v: Tensor) -> State:
        return (ops.weighted_sum([state[0], v], [None, c]),)  # (2)
