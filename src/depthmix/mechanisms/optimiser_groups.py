"""Which parameters of a stack have weight decay, and which may be trained with Muon."""

from __future__ import annotations

from typing import Any

from depthmix.mechanisms.base import DepthMixer
from depthmix.mechanisms.stack import DepthStack


def param_groups(stack: DepthStack, *, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Parameter groups of a stack for `torch.optim`.

    Queries, key and norm weights, scales, biases and learned coefficients have no weight decay; projections of the
    stream to gates, keys or queries do. The entry "muon" of each group says whether its parameters may be trained with
    Muon: a query of shape [1, D] is a matrix by shape only.
    """
    if not isinstance(stack, DepthStack):
        raise TypeError(
            f"param_groups got a {type(stack).__name__}; expected a DepthStack: "
            "the groups contain only the mixers' parameters"
        )
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for prefix, mixer in stack.named_modules():
        if not isinstance(mixer, DepthMixer):
            continue
        for name, parameter in mixer.named_parameters():
            decays, muon = name in mixer.takes_decay, name in mixer.takes_muon
            group = groups.setdefault(
                (decays, muon),
                {"params": [], "names": [], "weight_decay": weight_decay if decays else 0.0, "muon": muon},
            )
            group["params"].append(parameter)
            group["names"].append(f"{prefix}.{name}")
    return list(groups.values())
