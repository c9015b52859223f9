"""The optimiser and weight decay of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.mechanisms import param_groups
from depthmix.models.roles import HasRoles
from depthmix.training.config import OptimizerConfig
from depthmix.training.muon import Muon

# State of one parameter by optimiser: True if a tensor has the parameter's shape, False if it is a single number.
STATE = {"AdamW": {"step": False, "exp_avg": True, "exp_avg_sq": True}, "Muon": {"momentum_buffer": True}}


def parameter_groups(model: HasRoles, config: OptimizerConfig) -> list[dict[str, Any]]:
    """All parameters of a model, or of a part of one: groups of {"params", "names", "weight_decay", "muon"}.

    - Depth mixers: by `param_groups`, the rules of their mechanism. KV mixers: AdamW without decay.
    - Matrices of sublayers: decay; Muon if it is chosen. The router: decay, but AdamW, since each of its rows is the
      vector of one expert. Expert weights [E, F, D] are stacks of matrices, which Muon does not support: AdamW.
    - Short convolutions [P, W]: AdamW without decay, since they are vectors of one channel each, no matrices.
    - Embedding and head: AdamW with decay. Norms and other vectors: AdamW without decay.

    The model says which parameter is what. Frozen ones are in no group.
    """
    names = model.mixer_names()
    mixers = [
        {**g, "names": [names[p] for p in g["params"]]}
        for g in param_groups(model.depth, weight_decay=config.weight_decay)
    ]
    rest: dict[str, dict[str, Any]] = {}
    for name, parameter, role in model.parameter_roles():
        if parameter.requires_grad:
            decay = 0.0 if role == "vector" else config.weight_decay
            new = {"params": [], "names": [], "weight_decay": decay, "muon": role == "matrix"}
            group = rest.setdefault(role, new)
            group["params"].append(parameter)
            group["names"].append(name)
    return [*rest.values(), *mixers]


class Optimizers:
    """AdamW, and Muon if it is chosen, behind one interface; state by parameter name."""

    def __init__(self, parts: Iterable[HasRoles], config: OptimizerConfig) -> None:
        """`parts` are those of this process; a parameter of several of them is updated once."""
        groups = without_repeats(group for part in parts for group in parameter_groups(part, config))
        self.lr = config.lr
        self.names: dict[Tensor, str] = {p: n for g in groups for p, n in zip(g["params"], g["names"], strict=True)}
        muon = [g for g in groups if g["muon"] and config.name == "muon"]
        adamw = [g for g in groups if not any(g is m for m in muon)]
        self.inner: list[torch.optim.Optimizer] = []
        if adamw:
            # Fused: the plain form makes several passes over each parameter, and one call per parameter.
            betas = (config.betas[0], config.betas[1])
            self.inner.append(
                torch.optim.AdamW(torch_groups(adamw), lr=config.lr, betas=betas, eps=config.eps, fused=True)
            )
        if muon:
            self.inner.append(Muon(torch_groups(muon), lr=config.lr, momentum=config.momentum))

    def step(self, factor: float) -> None:
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                group["lr"] = factor * self.lr
            optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """All state tensors by "parameter/key", created if missing, so that a checkpoint can be loaded in place."""
        tensors: dict[str, Tensor] = {}
        for optimizer, parameter in self.parameters():
            state = optimizer.state[parameter]
            for key, shaped in STATE[type(optimizer).__name__].items():
                if key not in state:
                    state[key] = torch.zeros_like(parameter) if shaped else torch.zeros((), device=parameter.device)
                tensors[f"{self.names[parameter]}/{key}"] = state[key].detach()
        return tensors

    def parameters(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter]]:
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, parameter


def without_repeats(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each parameter in the first group that has it; empty groups are dropped."""
    seen: set[Tensor] = set()
    kept = []
    for group in groups:
        pairs = [(p, n) for p, n in zip(group["params"], group["names"], strict=True) if p not in seen]
        seen.update(p for p, _ in pairs)
        if pairs:
            kept.append({**group, "params": [p for p, _ in pairs], "names": [n for _, n in pairs]})
    return kept


def torch_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with only the keys that torch's optimisers accept."""
    return [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups]
