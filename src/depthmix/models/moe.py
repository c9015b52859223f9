"""A mixture of experts: every token is routed to a few of many small MLPs, and to the shared ones.

Axes: N token of the whole batch, K expert that a token chose, E expert, D channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms import State
from depthmix.models.config import DecoderConfig
from depthmix.models.context import Context
from depthmix.models.mlp import SwiGLU
from depthmix.models.norm import RMSNorm


class MixtureOfExperts(nn.Module):
    """The best `active` of `experts` SwiGLUs, weighted by a router, plus `shared` ones, instead of an MLP.

    s = softmax(W x) over all experts (Qwen3), or sigmoid(W x) (DeepSeek V3), in at least float32
    chosen = the `active` experts of largest s + b;   w_e = scale · s_e / Σ s over the chosen
    y = Σ w_e expert_e(x) + shared(x)

    Balance, so that all experts are used:
        bias: b changes by `balance_rate` after each optimiser step (`update_balance`): up for an expert that received
            fewer tokens than the mean, down for one that received more. b affects the choice, never the weights.
        loss: there is no b; `balance_rate` · E · Σ f_e · P_e is added to the loss, with f the share of an expert in all
            choices and P the mean over tokens of s, normalised. The sum E · Σ f_e · P_e is 1 for equally used experts.

    Attributes:
        balance_bias: b [E], always float32, since a narrower dtype would lose its steps.
        load: [E], number of tokens routed to each expert since the last `update_balance`, counted only in training.
    """

    balance_bias: Tensor | None
    load: Tensor | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.moe is None:
            raise ValueError("moe=None; expected a MoEConfig (a decoder without one uses MLPs)")
        self.config = moe = config.moe
        dim, count, hidden = config.dim, moe.experts, moe.hidden
        self.norm = RMSNorm(dim, eps=config.norm_eps)
        self.router = nn.Linear(dim, count, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(count, hidden, dim))
        self.up_proj = nn.Parameter(torch.empty(count, hidden, dim))
        self.down_proj = nn.Parameter(torch.empty(count, dim, hidden))
        self.shared = SwiGLU(dim, moe.shared * hidden) if moe.shared else None
        biased = moe.balance == "bias"
        self.register_buffer("balance_bias", torch.zeros(count, dtype=torch.float32) if biased else None)
        self.register_buffer("load", torch.zeros(count, dtype=torch.int64) if biased else None, persistent=False)

    def forward(self, h: Tensor, kv: State, ctx: Context) -> tuple[Tensor, State, Tensor | None]:
        x = self.norm(h)
        y, aux = self.experts(x.flatten(0, -2))
        y = y.view(x.shape)
        if self.shared is not None:
            y = y + self.shared(x)
        return y.to(h.dtype), kv, aux

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output of each token's experts for x [N, D], in the accumulator's dtype, and the auxiliary loss."""
        scores = self.scores(x)
        chosen, weights = self.choose(scores)
        by_expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, torch.arange(self.config.experts, device=x.device), right=True)
        aux = self.balance(scores, ends) if self.training and torch.is_grad_enabled() else None
        # Copy first, sort second: both have a deterministic backward pass.
        copies = x.unsqueeze(1).expand(-1, self.config.active, -1).flatten(0, 1).index_select(0, order)
        gate, up = (ops.grouped_linear(copies, weight, ends) for weight in (self.gate_proj, self.up_proj))
        out = ops.grouped_linear(nn.functional.silu(gate) * up, self.down_proj, ends)
        out = out.index_select(0, order.argsort()).unflatten(0, weights.shape)  # [N, K, D]
        return (out * weights.unsqueeze(-1)).sum(1), aux

    def scores(self, x: Tensor) -> Tensor:
        """s [N, E], in at least float32."""
        logits = ops.linear(x, self.router.weight)
        return logits.softmax(-1) if self.config.scoring == "softmax" else logits.sigmoid()

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights, both [N, K]."""
        ranked = scores.detach()
        ranked = ranked if self.balance_bias is None else ranked + self.balance_bias
        chosen = ranked.topk(self.config.active).indices
        weights = scores.gather(-1, chosen)
        total = weights.sum(-1, keepdim=True)  # 0 if the bias chose experts whose scores all underflowed
        return chosen, self.config.scale * (weights / total.clamp(min=torch.finfo(total.dtype).tiny))

    def balance(self, scores: Tensor, ends: Tensor) -> Tensor | None:
        """Count the load, or return the auxiliary loss."""
        if self.load is not None:
            count_op(self.load, ends)
        if self.config.balance != "loss" or not len(scores):
            return None
        share = ends.diff(prepend=ends.new_zeros(1)).to(scores.dtype) / (len(scores) * self.config.active)
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        return self.config.balance_rate * self.config.experts * (share * mean).sum()

    @torch.no_grad()
    def update_balance(self) -> None:
        """One step of the bias, from the tokens counted since the last one. With several ranks, sum `load` first."""
        if self.balance_bias is not None and self.load is not None:
            below_mean = self.load.sum() - self.config.experts * self.load
            self.balance_bias += self.config.balance_rate * below_mean.sign()
            self.load.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MixtureOfExperts:
        before = self.balance_bias
        super()._apply(fn, recurse)
        if before is not None and self.balance_bias is not None and self.load is not None:
            if before.dtype != self.balance_bias.dtype:  # for example, the model was cast to bfloat16
                self.balance_bias = before.to(self.balance_bias.device)
            if before.is_meta and not self.balance_bias.is_meta:  # `to_empty`: uninitialised memory
                self.balance_bias.zero_()
                self.load.zero_()
        return self

    def extra_repr(self) -> str:
        return f"{self.config.active} of {self.config.experts} experts of width {self.config.hidden}"


def update_balance(model: nn.Module) -> None:
    """Call after an optimiser step: update the bias of every router of a model that balances by a bias."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.update_balance()


@torch.library.custom_op("depthmix::count_load", mutates_args=("load",))
def count_op(load: Tensor, ends: Tensor) -> None:
    """Add the rows of each group to `load`. An operator, so that its condition is evaluated at run time."""
    if torch._C._current_graph_task_id() == -1:  # otherwise checkpointing recomputes a forward pass
        load += ends.diff(prepend=ends.new_zeros(1))


@count_op.register_fake
def _(load: Tensor, ends: Tensor) -> Any:
    return None
