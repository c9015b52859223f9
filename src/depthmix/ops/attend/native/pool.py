"""Tensors from pool.cpp: large outputs of the kernel in reused memory instead of fresh memory from the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

SMALLEST = 1 << 20  # bytes; the C library rarely returns smaller blocks to the system
CAPSULE = b"dltensor"  # the capsule holds a pointer to this name, which must outlive it

new_capsule: Callable[..., Any] = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object  # type: ignore[attr-defined]
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]  # type: ignore[attr-defined]


def empty_like(library: Any, tensor: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of the shape and dtype of a contiguous floating CPU tensor."""
    watched = torch._C._len_torch_dispatch_stack()  # dispatch modes would not see memory from the pool
    if watched or tensor.numel() * tensor.element_size() < SMALLEST:
        return torch.empty_like(tensor)
    shape = (ctypes.c_int64 * tensor.ndim)(*tensor.shape)
    handle = library.pool_take(tensor.ndim, shape, 8 * tensor.element_size())
    return torch.empty_like(tensor) if handle is None else from_dlpack(new_capsule(handle, CAPSULE, None))


def sizes(library: Any) -> tuple[int, int]:
    """Bytes of the blocks in use by tensors, and of the idle ones."""
    used, waiting = ctypes.c_int64(), ctypes.c_int64()
    library.pool_sizes(ctypes.byref(used), ctypes.byref(waiting))
    return used.value, waiting.value
