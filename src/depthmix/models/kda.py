"""Kimi Delta Attention as a sublayer (arXiv 2510.26692): attention over tokens with a state of constant size.

Axes: B batch, T token, D channel, H head, d channel of a head (of keys and of values), P = H·d, W width of a
convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms import KVMixer, State
from depthmix.models.context import Context
from depthmix.models.kinds import WIDE, KDAConfig
from depthmix.models.norm import RMSNorm

STEPS = (1e-3, 0.1)  # dt, softplus(dt_bias) at the start, lies between these
RATES = (1.0, 16.0)  # exp(A_log) at the start lies between these


class KDAState(NamedTuple):
    """What later tokens need; its size does not depend on the number of tokens."""

    memory: Tensor  # S [B, H, d, d], float32 at least
    history: Tensor  # [B, W − 1, 3·P], the last inputs of the convolutions of q, k and v


class KDA(nn.Module):
    """Projections → short convolutions → norms of queries and keys → KDA → norm and gate → projection.

    (1) q, k, v = SiLU(conv(W x)), x = PreNorm(h);  q and k are then normalised per head to length 1
    (2) g = −exp(A) softplus(f_b f_a x + dt_bias), per channel, or the bounded form of `ops.log_decay`
    (3) β = σ(b x), per head
    (4) o = KDA(q, k, v, g, β), see `ops.kda`
    (5) y = W_o (norm(o) ⊙ σ(g_b g_a x)), the norm per head with one weight for all heads

    (2) to (5) up to the last product are computed in float32 at least. A_log and dt_bias stay float32 in a model that
    is cast to a narrower dtype.
    """

    def __init__(self, dim: int, config: KDAConfig, norm_eps: float) -> None:
        super().__init__()
        self.config = config
        heads, d, inner = config.heads, config.head_dim, config.heads * config.head_dim
        self.norm = RMSNorm(dim, eps=norm_eps)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, inner, bias=False) for _ in range(3))
        self.q_conv, self.k_conv, self.v_conv = (nn.Parameter(torch.empty(inner, config.conv)) for _ in range(3))
        self.f_a_proj, self.f_b_proj = nn.Linear(dim, d, bias=False), nn.Linear(d, inner, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=torch.float32))
        self.b_proj = nn.Linear(dim, heads, bias=False)
        self.g_a_proj, self.g_b_proj = nn.Linear(dim, d, bias=False), nn.Linear(d, inner, bias=False)
        self.o_norm = RMSNorm(d, eps=norm_eps)
        self.o_proj = nn.Linear(inner, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """The starts that are not those of a linear layer or a norm."""
        for weight in (self.q_conv, self.k_conv, self.v_conv):
            start_conv(weight, generator)
        start_steps(self.dt_bias, generator)
        if self.config.bound is None:
            start_rates(self.A_log, generator)
        else:
            nn.init.zeros_(self.A_log)

    def forward(
        self, h: Tensor, kv: State, ctx: Context, mixer: KVMixer | None, slot: int
    ) -> tuple[Tensor, State, None]:
        """As a sublayer of a decoder, which has no mixer of values here; `slot` belongs to this execution."""
        kept = None if ctx.cache is None else ctx.cache.state(slot)
        y, state = self.scan(h, None if kept is None else KDAState(*kept), documents=ctx.documents, order=ctx.order)
        if ctx.cache is not None:
            ctx.cache.replace(slot, *state)
        return y, kv, None

    def scan(
        self,
        h: Tensor,
        state: KDAState | None = None,
        *,
        documents: Tensor | None = None,
        order: ops.ValidFirst | None = None,
    ) -> tuple[Tensor, KDAState]:
        """The output [B, T, D] and the state after the last valid token.

        Args:
            h: [B, T, D].
            state: the state before the first token; None at the start.
            documents: [B, T] indices of packed documents; the state belongs to that of the first token.
            order: of a batch with padding; the output at padding has no meaning.
        """
        x = self.norm(h)
        if order is not None:
            x = order.sort(x)
            documents = None if documents is None else order.sort_documents(documents)
        lengths = None if order is None else order.lengths
        (q, k, v), history = self.mixed(x, None if state is None else state.history, documents, lengths)
        g, beta = self.gates(x)
        if order is not None:
            g, beta = g * order.valid[:, None, :, None], beta * order.valid[:, None]
        o, memory = ops.kda(
            ops.unit_vectors(q),
            ops.unit_vectors(k),
            ops.wide(v),
            g,
            beta,
            state=None if state is None else state.memory,
            documents=documents,
        )
        y = self.out(o, x)
        return y if order is None else order.restore(y), KDAState(memory, history)

    def mixed(
        self, x: Tensor, history: Tensor | None, documents: Tensor | None, lengths: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        """(1) without the norms: q, k and v [B, H, T, d], and the new history."""
        pasts = (None,) * 3 if history is None else history.chunk(3, -1)
        outputs, kept = [], []
        for project, weight, past in zip(
            (self.q_proj, self.k_proj, self.v_proj), (self.q_conv, self.k_conv, self.v_conv), pasts, strict=True
        ):
            z, last = ops.causal_conv(project(x), weight, past, documents=documents, lengths=lengths)
            outputs.append(self.in_heads(z))
            kept.append(last)
        return outputs, torch.cat(kept, -1)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(2) and (3): g [B, H, T, d] and β [B, H, T]."""
        f = ops.wide(self.f_b_proj(self.f_a_proj(x))) + self.dt_bias
        g = ops.log_decay(f.unflatten(-1, (self.config.heads, -1)), self.A_log, self.config.bound)
        return g.transpose(1, 2), torch.sigmoid(ops.wide(self.b_proj(x))).transpose(1, 2)

    def out(self, o: Tensor, x: Tensor) -> Tensor:
        """(5)."""
        gate = self.in_heads(ops.wide(self.g_b_proj(self.g_a_proj(x))))
        o = self.o_norm(o) * torch.sigmoid(gate)
        return self.o_proj(o.transpose(1, 2).flatten(-2).to(x.dtype))

    def in_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.heads, -1)).transpose(1, 2)  # [B, H, T, d]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KDA:
        before = {name: getattr(self, name).data for name in WIDE}
        super()._apply(fn, recurse)
        for name, value in before.items():
            parameter = getattr(self, name)
            if parameter.dtype != ops.accumulator(parameter.dtype):  # for example, the model was cast to bfloat16
                parameter.data = value.to(parameter.device, torch.float32)
        return self

    def extra_repr(self) -> str:
        return f"{self.config.heads} heads of {self.config.head_dim}"


@torch.no_grad()
def start_conv(weight: Tensor, generator: torch.Generator | None = None) -> None:
    """Uniform in ±1/√W. Much smaller values would drown in the eps of the norm of o."""
    bound = weight.shape[-1] ** -0.5
    weight.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def start_steps(dt_bias: Tensor, generator: torch.Generator | None = None) -> None:
    """softplus(dt_bias) log-uniform: the inverse of softplus, in the form that loses no digits at small steps."""
    low, high = map(math.log, STEPS)
    step = dt_bias.uniform_(low, high, generator=generator).exp()
    dt_bias.copy_(step + (-torch.expm1(-step)).log())


@torch.no_grad()
def start_rates(a_log: Tensor, generator: torch.Generator | None = None) -> None:
    """exp(a_log) uniform."""
    a_log.uniform_(*RATES, generator=generator).log_()
