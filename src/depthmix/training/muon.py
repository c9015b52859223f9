"""Muon: momentum with orthogonalised updates, for the matrices of hidden layers.

torch.optim.Muon does the same, but only in bfloat16, which rounds differently on every kind of CPU and causes an
illegal instruction on some. Here the products keep the gradient's dtype on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Keller Jordan's quintic iteration: singular values end in 0.7 … 1.2
ITERATIONS = 5
EPS = 1e-7  # a gradient of zeros stays zero


class Muon(torch.optim.Optimizer):
    """For each matrix W [A, B] with gradient g, as torch.optim.Muon with adjust_lr_fn="match_rms_adamw":

    (1) m ← μ m + (1 − μ) g
    (2) O = orthogonal((1 − μ) g + μ m)
    (3) W ← (1 − lr · decay) W − lr · 0.2 √max(A, B) · O

    The factor in (3) gives updates the size of AdamW's, so that one learning rate and one decay suit both.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ValueError(f"Muon got a parameter of shape {list(parameter.shape)}; expected a matrix")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = orthogonal_of_whole(self.momentum(parameter, group["momentum"]))  # (2)
                rate = group["lr"] * 0.2 * max(parameter.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-rate)  # (3)
        return loss

    def momentum(self, parameter: Tensor, share: float) -> Tensor:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        return grad.lerp(state["momentum_buffer"].lerp_(grad, 1 - share), share)  # (1)


def orthogonal_of_whole(matrix: Tensor) -> Tensor:
    """`orthogonal` of a matrix that may be sharded, sharded likewise.

    Every rank gathers the matrix and computes all of it: one message, where sharded products would send one each.
    """
    if not hasattr(matrix, "full_tensor"):
        return orthogonal(matrix)
    from torch.distributed.tensor import DTensor, Replicate

    mesh = matrix.device_mesh  # type: ignore[attr-defined]
    whole = DTensor.from_local(orthogonal(matrix.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=matrix.placements)  # type: ignore[attr-defined]


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with singular values near 1: Newton–Schulz, in bfloat16 on a GPU."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x.bfloat16() if x.is_cuda else x
    x = x / x.norm().clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)
