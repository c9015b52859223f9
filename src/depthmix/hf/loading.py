"""What both kinds of models ask of transformers: safetensors only, a start for what is missing, no reentry."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn


def check_loading(use_safetensors: Any) -> None:
    if not use_safetensors:
        raise ValueError(f"use_safetensors={use_safetensors}; expected True: depthmix reads no pickled weights")


def check_reentry(function: Any) -> None:
    """Refuse a checkpointing function that is reentrant: it would return no gradients to the mixers."""
    options = function.keywords if isinstance(function, functools.partial) else {}
    if options.get("use_reentrant"):
        raise ValueError(
            "use_reentrant=True; expected False: reentrant checkpointing would drop gradients of the mixers. Pass "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )


def is_missing(tensor: Tensor) -> bool:
    """Whether a checkpoint did not contain this tensor: transformers marks those that it loaded."""
    return not getattr(tensor, "_is_hf_initialized", False)


@torch.no_grad()
def reset_missing(module: nn.Module) -> None:
    """Give a mixer's missing tensors their start; what was loaded stays."""
    tensors = [*module.parameters(), *module.buffers()]
    kept = [(tensor, tensor.clone()) for tensor in tensors if not is_missing(tensor)]
    if len(kept) == len(tensors):
        return
    module.reset_parameters()  # type: ignore[operator]
    for tensor, value in kept:
        tensor.copy_(value)
