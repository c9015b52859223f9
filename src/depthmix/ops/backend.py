"""Which backend is forced, and whether torch is tracing: every operation checks both before it computes."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

import torch

Backend = Literal["auto", "fused", "native", "torch", "reference"]
forced: ContextVar[Backend] = ContextVar("depthmix_backend", default="auto")  # set by `attend.dispatch.using`


def chosen() -> Backend:
    return forced.get()


def traced_by_torch() -> bool:
    """Whether a compiler or functional transform is active: it derives its own backward pass from plain operations."""
    return torch.compiler.is_compiling() or functional()


def functional() -> bool:
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def plain_wanted() -> bool:
    """Whether an operation must use its plain form instead of its faster one."""
    return traced_by_torch() or chosen() == "reference"
