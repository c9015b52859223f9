"""Memory of one training step: what the graph keeps for the backward pass, and the peak of the process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.bench.model import BenchModel, Size, build, tokens_for
from depthmix.ops.memory import status

CLEAR = Path("/proc/self/clear_refs")
UNAVAILABLE = "not available: peak memory is read from /proc/self, which only Linux has"


def run(mixer: str, options: Mapping[str, Any], size: Mapping[str, int]) -> dict[str, float | None]:
    """Bytes per token that the graph keeps, and bytes of peak memory; meant for a process of its own."""
    full = Size(**size)
    x = tokens_for(full)
    warm = build(mixer, options, replace(full, dim=64, hidden=64, tokens=2))  # loads libraries and kernels
    training_step(warm, tokens_for(replace(full, dim=64, tokens=2)))
    model = build(mixer, options, full)
    peak = peak_bytes(model, x)
    return {"kept": kept_bytes(model, x.requires_grad_()), "peak": peak}


def training_step(model: BenchModel, x: Tensor) -> None:
    model(x).square().mean().backward()


def peak_bytes(model: BenchModel, x: Tensor) -> float | None:
    """Peak of the resident memory during one training step, beyond what was resident before; None where unknown.

    Gradients are included: they are the same for every mechanism except for its own few parameters.
    """
    if not CLEAR.exists():
        return None
    model.zero_grad(set_to_none=True)
    gc.collect()
    try:
        give_back_free_memory()
        CLEAR.write_text("5")  # resets the high-water mark
        before = status("VmRSS")
        training_step(model, x)
        return float(max(status("VmHWM") - before, 0))
    except (OSError, KeyError):
        return None


def give_back_free_memory() -> None:
    """Otherwise the step would use memory that malloc had kept, and it would not be counted."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def kept_bytes_per_token(name: str, options: Mapping[str, Any], size: Size) -> float:
    """What the graph of one forward keeps for its backward pass, at this size."""
    return kept_bytes(build(name, options, size), tokens_for(size).requires_grad_())


def kept_bytes(model: nn.Module, x: Tensor, **inputs: Any) -> float:
    """Bytes per token of the storages that the graph of `model(x)` holds, each once; without parameters and x."""
    excluded = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        held = tensor.detach()  # an output that holds its own graph would never be freed
        if held.untyped_storage().data_ptr() not in excluded:
            storages[held.untyped_storage().data_ptr()] = held
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x, **inputs)
    kept = sum(t.untyped_storage().nbytes() for t in storages.values())
    del out
    return kept / x[..., 0].numel()
