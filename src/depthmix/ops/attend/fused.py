"""Single reads on a GPU by the fused Triton kernel of fla-core, if it is installed.

A single read has one query, no prior and no log-sum-exp in its result, which the kernel does not return. fla-core is
imported only at the first such read on a GPU; if it is missing or broken, `why_not()` gives the reason.

Axes: ... any leading shape, D channel.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.attend.options import ReadOptions
from depthmix.ops.reference import accumulator

MODULE = "fla.ops.attnres"
INSTALL = "pip install 'depthmix[kernels]'"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # it computes in float32: float64 would lose precision
PLAIN = (Tensor, torch.nn.Parameter)
MOST_SOURCES = 128  # backward passes two padded pointer tables as arguments: 256 sources would fill CUDA's 4 KB


@functools.cache
def load() -> tuple[Any, str]:
    """fla-core's function and "", or None and the reason."""
    try:
        return importlib.import_module(MODULE).fused_attnres, ""
    except Exception as error:  # whatever fails in there (Triton, a driver), torch operations still work
        if isinstance(error, ModuleNotFoundError) and error.name == "fla":
            return None, f"fla-core is not installed: {INSTALL}"
        why = f"{type(error).__name__}: {error}"
        return None, f"fla-core cannot be imported ({why}); its kernel needs Triton, which comes with PyTorch for CUDA"


def why_not() -> str:
    return load()[1]


def on_gpu(tensors: Sequence[Tensor]) -> bool:
    return all(t.is_cuda for t in tensors)


def unfit(dtype: torch.dtype) -> str:
    return "" if dtype in DTYPES else f"fla-core's kernel computes in float32, which is not enough for {dtype}"


def obstacle(sources: Sequence[Tensor], folded: Tensor, options: ReadOptions) -> str:
    """Why the kernel cannot compute this single read; "" if it can."""
    if not on_gpu([*sources, folded]):
        return f"it runs on CUDA devices; the sources are on {sources[0].device}, the query on {folded.device}"
    if why := unfit(sources[0].dtype):
        return why
    if not options.normalize:
        return "it always normalises keys; normalize=False needs another backend"
    if len(sources) > MOST_SOURCES:
        return f"it supports at most {MOST_SOURCES} sources; got {len(sources)}"
    if not sources[0].numel():
        return f"it needs at least one token and one channel; got sources of shape {list(sources[0].shape)}"
    for s, v in enumerate(sources):
        if type(v) not in PLAIN:
            return f"it needs plain tensors; sources[{s}] is a {type(v).__name__}"
        if not v.is_contiguous() or v.data_ptr() % 16:
            return f"it needs contiguous sources aligned to 16 bytes; sources[{s}] is not"
    return why_not()


def read_one(sources: Sequence[Tensor], folded: Tensor, options: ReadOptions) -> Tensor:
    """h [..., D] of one folded query [1, D], differentiable once, by the kernel's own backward pass."""
    query = folded.squeeze(0).to(accumulator(sources[0].dtype))
    ones = torch.ones_like(query)  # the key weight is already folded into the query
    h: Tensor = load()[0](query, tuple(sources), ones, rms_eps=options.eps, scale=options.scale)
    if h.requires_grad:
        h.register_hook(refuse_second_derivatives)
    return h


def refuse_second_derivatives(grad: Tensor) -> None:
    """Raise on double backward: the kernel's backward pass has no graph, so terms would be missing silently."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "second derivatives of a fused read are not supported (its kernel has none). "
            "Run the forward pass within depthmix.ops.using('reference')"
        )
