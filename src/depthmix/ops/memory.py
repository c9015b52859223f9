"""Memory that is freed and asked for again with every step.

The C library hands large blocks back to the system as soon as they are free, and the system brings them back page by
page, filled with zeros: for gradients of many megabytes that costs more than the arithmetic.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

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
