"""The CPU kernel of `attend` and the memory it writes to: C++ with a plain C interface, compiled on demand and cached.

The cache folder is $DEPTHMIX_CACHE, or depthmix under $XDG_CACHE_HOME or ~/.cache. Without a compiler, or if compiling
fails, `library()` is None and torch operations are used instead; `why_not()` gives the reason.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from depthmix.ops.attend.native import pool
from depthmix.ops.attend.options import ReadOptions

SOURCES = [Path(__file__).with_name(name) for name in ("attend.cpp", "pool.cpp")]
# Not -ffast-math: a library linked with it makes the whole process flush denormals to zero as soon as it is loaded.
ARITHMETIC = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
FLAGS = ["-O3", "-march=native", *ARITHMETIC, "-std=c++17", "-shared", "-fPIC", "-pthread"]
DTYPES = {torch.float32: "float32", torch.float64: "float64"}
PLAIN = (Tensor, torch.nn.Parameter)


@functools.cache
def build() -> tuple[ctypes.CDLL | None, str]:
    """The library and "", or None and the reason."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None or not shutil.which(compiler):
        return None, "no C++ compiler found; install g++ or set CXX"
    try:
        loaded = ctypes.CDLL(str(cached_library(compiler)))
        loaded.pool_take.restype = ctypes.c_void_p
        return loaded, ""
    except subprocess.CalledProcessError as error:
        return None, f"{compiler} failed: {error.stderr.strip()[:500]}"
    except OSError as error:
        return None, f"the library could not be built or loaded: {error}"


def cached_library(compiler: str) -> Path:
    """Compile once per source, compiler and machine; concurrent processes write temporary files and rename them."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    key = "\n".join([*(source.read_text() for source in SOURCES), version, *FLAGS, platform.machine(), cpu_flags()])
    folder = cache_folder()
    target = folder / f"attend-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".so")
        os.close(handle)
        try:
            command = [compiler, *FLAGS, *map(str, SOURCES), "-o", temporary]
            subprocess.run(command, capture_output=True, text=True, check=True)
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return target


def cache_folder() -> Path:
    if folder := os.environ.get("DEPTHMIX_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "depthmix"


def cpu_flags() -> str:
    """The CPU's features: -march=native compiles for this CPU, and a shared home folder may serve several CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return platform.processor()


def library() -> ctypes.CDLL | None:
    return build()[0]


def why_not() -> str:
    return build()[1]


def fits(tensors: Sequence[Tensor]) -> bool:
    """Whether these are plain contiguous CPU tensors of one dtype that the kernel supports."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        return False
    for t in tensors:  # noqa: SIM110  # a generator would take half of the time of a decode step's read
        if type(t) not in PLAIN or not t.is_cpu or t.dtype != dtype or not t.is_contiguous():
            return False
    return True


def plain(gradient: Tensor | None) -> Tensor | None:
    """A gradient as a plain tensor, whose memory the kernel can read."""
    if gradient is None or type(gradient) is Tensor:
        return gradient
    copy = torch.empty(gradient.shape, dtype=gradient.dtype)
    copy.copy_(gradient)
    return copy


def empty_like(tensor: Tensor) -> Tensor:
    return pool.empty_like(library(), tensor)


def release() -> None:
    """Free the memory that is kept for the next read."""
    if build.cache_info().currsize and (loaded := library()) is not None:
        loaded.pool_release()


def pointer(tensor: Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def threads_for(source: Tensor, count: int) -> int:
    """The number of threads. Starting one costs about ten microseconds, as much as reading about 2^15 numbers."""
    return max(1, min(torch.get_num_threads(), source.numel() * count >> 15))


def forward(
    sources: Sequence[Tensor],
    folded: Tensor,
    prior: Tensor | None,
    prior_lse: Tensor | None,
    options: ReadOptions,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """h (one per query), lse [Q, ...], 1/rms [..., S], weights [..., Q, S]."""
    first, (queries, dim), count = sources[0], folded.shape, len(sources)
    lead = first.shape[:-1]
    h = [empty_like(first) for _ in range(queries)]
    lse = first.new_empty((queries, *lead))
    rstd, weights = first.new_empty((*lead, count)), first.new_empty((*lead, queries, count))
    call = getattr(library(), f"attend_forward_{DTYPES[first.dtype]}")
    call(
        ctypes.c_int64(lead.numel()),
        ctypes.c_int64(dim),
        count,
        queries,
        pointers(sources),
        pointer(folded),
        None if prior is None else pointers([prior]),
        pointer(prior_lse),
        ctypes.c_double(options.eps),
        ctypes.c_double(options.scale),
        int(options.normalize),
        pointers(h),
        pointer(lse),
        pointer(rstd),
        pointer(weights),
        threads_for(first, count),
    )
    return h, lse, rstd, weights


def backward(
    sources: Sequence[Tensor],
    folded: Tensor,
    h: Tensor | None,
    prior_lse: Tensor | None,
    rstd: Tensor,
    weights: Tensor,
    lse: Tensor,
    grad_h: Sequence[Tensor | None],
    grad_lse: Sequence[Tensor | None],
    options: ReadOptions,
) -> tuple[list[Tensor], Tensor, Tensor | None, Tensor | None]:
    """Gradients of the sources, of the folded queries, of the prior's mixture and of its log-sum-exp."""
    first, (queries, dim), count = sources[0], folded.shape, len(sources)
    threads = threads_for(first, count)
    grad_h, grad_lse = ([plain(g) for g in given] for given in (grad_h, grad_lse))
    grads = [empty_like(v) for v in sources]
    parts = folded.new_zeros((threads, queries, dim))
    grad_prior = None if prior_lse is None else empty_like(first)
    grad_prior_lse = None if prior_lse is None else torch.empty_like(prior_lse)
    call = getattr(library(), f"attend_backward_{DTYPES[first.dtype]}")
    call(
        ctypes.c_int64(first.shape[:-1].numel()),
        ctypes.c_int64(dim),
        count,
        queries,
        pointers(sources),
        pointer(folded),
        None if h is None else pointers([h]),
        pointer(prior_lse),
        ctypes.c_double(options.scale),
        int(options.normalize),
        pointer(rstd),
        pointer(weights),
        pointer(lse),
        pointers(grad_h),
        pointers(grad_lse),
        pointers(grads),
        pointer(parts),
        None if grad_prior is None else pointers([grad_prior]),
        pointer(grad_prior_lse),
        threads,
    )
    return grads, parts.sum(0), grad_prior, grad_prior_lse
