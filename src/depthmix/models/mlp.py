"""SwiGLU."""

from __future__ import annotations

from torch import Tensor, nn

from depthmix.mechanisms import State
from depthmix.models.config import DecoderConfig
from depthmix.models.context import Context
from depthmix.models.norm import RMSNorm


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MLP(SwiGLU):
    """SwiGLU with its PreNorm, as a sublayer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.dim, config.hidden)
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, h: Tensor, kv: State, ctx: Context) -> tuple[Tensor, State, None]:  # type: ignore[override]
        return super().forward(self.norm(h)), kv, None
