"""Which code computes an operation: chosen by the tensors, or forced with `using`.

native     C++ on the CPU, compiled on demand (float32, float64)
torch      closed forms in torch operations, any device and dtype
reference  the plain form with torch's own backward; slow, the ground truth
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from depthmix.ops import closed, native

Backend = Literal["auto", "native", "torch", "reference"]
_chosen: ContextVar[Backend] = ContextVar("depthmix_backend", default="auto")


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Within this block, take one backend and no other; "native" is an error where it cannot serve."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r}; expected one of {', '.join(map(repr, get_args(Backend)))}")
    if backend == "native" and native.library() is None:
        raise RuntimeError(f"the native backend is not available: {native.why_not()}")
    token = _chosen.set(backend)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen() -> Backend:
    return _chosen.get()


def traced_by_torch() -> bool:
    """Compilers and functional transforms want plain operations: they make backward passes of their own."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def backend_for(tensors: Sequence[Tensor]) -> ModuleType:
    """The module whose `forward` and `backward` serve these tensors."""
    choice = chosen()
    if choice == "torch":
        return closed
    if native.fits(tensors) and native.library() is not None:
        return native
    if choice == "native":
        kinds = sorted({f"{t.dtype} on {t.device}{'' if t.is_contiguous() else ', not contiguous'}" for t in tensors})
        raise RuntimeError(f"the native backend takes contiguous float32 or float64 on a CPU; got {'; '.join(kinds)}")
    return closed


def describe() -> str:
    """What `auto` takes on the CPU here, for people to read."""
    if native.library() is not None:
        return "native (C++, compiled for this CPU)"
    return f"torch ({native.why_not()})"
