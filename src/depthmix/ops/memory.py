"""Reuse of memory that every step frees and allocates again, and the bytes of live tensors.

The C library returns large blocks to the system as soon as they are freed, and the system maps them again page by
page, filled with zeros: for gradients of many megabytes that costs more than the arithmetic.
"""

from __future__ import annotations

import ctypes
import platform
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from depthmix.ops.attend import native

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of mallopt, from <malloc.h>
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next allocation. False where the C library has no such setting.

    This affects the whole process, whose memory then never shrinks. It is meant for long-running programs such as
    training; a library should not decide it for its user.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(TRIM_THRESHOLD, NEVER)) and bool(mallopt(MMAP_THRESHOLD, NEVER))


def empty_cache() -> None:
    """Free the memory that the native backend keeps from freed gradients and mixtures for its next read.

    It never keeps more than its peak use, and a system that runs short of memory may reclaim it at any time.
    """
    native.release()


def status(field: str) -> int:
    """Bytes of a field of Linux's /proc/self/status, such as VmHWM, the peak resident memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes of tensors that operations create: `now` (alive) and `peak` (maximum so far).

    A view counts as part of its base. Memory that a kernel allocates and frees internally is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.count(tensor.untyped_storage(), given)
        return out

    def count(self, storage: Any, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self.storages:
            return
        self.storages[key] = weakref.ref(storage, lambda _: self.forget(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def forget(self, key: int, size: int) -> None:
        del self.storages[key]
        self.now -= size
