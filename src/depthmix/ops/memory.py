"""Memory that is freed and asked for again with every step, and bytes of the tensors that are alive.

The C library hands large blocks back to the system as soon as they are free, and the system brings them back page by
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

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of mallopt in <malloc.h>
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next allocation. False where the C library has no such setting.

    It holds for the whole process, which stays as large as it once was. Made for programs that do one thing for long,
    such as training; a library must not decide it for its user.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(TRIM_THRESHOLD, NEVER)) and bool(mallopt(MMAP_THRESHOLD, NEVER))


def empty_cache() -> None:
    """Hand back what the native backend keeps of freed gradients and mixtures for its next read.

    It never keeps more than it had in use at once, and a system that runs short of memory may take it at any time.
    """
    native.release()


def status(field: str) -> int:
    """Bytes of a field of Linux's /proc/self/status, such as VmHWM, the most that was resident at once."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


class LiveBytes(TorchDispatchMode):
    """Counts, while it is entered, the bytes of tensors that operations make: `now` alive, and at most so far, `peak`.

    Views count with what they show. What a kernel needs inside itself, and gives back before it returns, is not seen.
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
