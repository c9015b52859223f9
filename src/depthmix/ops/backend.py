"""What every operation asks before it computes: which backend is forced, and whether torch is tracing."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

import torch

Backend = Literal["auto", "fused", "native", "torch", "reference"]
forced: ContextVar[Backend] = ContextVar("depthmix_backend", default="auto")  # set by `attend.dispatch.using`


def chosen() -> Backend:
    return forced.get()


def traced_by_torch() -> bool:
    """Compilers and functional transforms want plain operations: they make backward passes of their own."""
    return torch.compiler.is_compiling() or functional()


def functional() -> bool:
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def plain_wanted() -> bool:
    """Whether an operation with one faster form takes its plain form instead."""
    return traced_by_torch() or chosen() == "reference"
