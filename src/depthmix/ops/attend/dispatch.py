"""Which backend computes a read over depth: chosen from the tensors, or forced with `using`.

fused      fla-core's Triton kernel on a GPU, for single reads (float32, bfloat16, float16); reads share no pass
native     C++ on the CPU, compiled on demand (float32, float64)
torch      closed forms in torch operations, any device and dtype (torch_form.py)
reference  the plain form with torch's own backward; slow, the ground truth

Code that torch traces uses compiled.py: the native read as a custom operator, or plain operations.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import get_args

import torch
from torch import Tensor

from depthmix.ops.attend import compiled, fused, native, reference, torch_form
from depthmix.ops.attend.autograd import Attend
from depthmix.ops.attend.options import DEFAULT, ReadOptions
from depthmix.ops.attend.reference import Reads
from depthmix.ops.backend import Backend, chosen, forced, functional, traced_by_torch
from depthmix.ops.reference import accumulator


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Force one backend within this block; "fused" and "native" raise an error where they cannot be used."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r}; expected one of {', '.join(map(repr, get_args(Backend)))}")
    why = native.why_not() if backend == "native" else fused.why_not() if backend == "fused" else ""
    if why:
        raise RuntimeError(f"the {backend} backend is not available: {why}")
    token = forced.set(backend)
    try:
        yield
    finally:
        forced.reset(token)


def read_one(sources: Sequence[Tensor], folded: Tensor, options: ReadOptions = DEFAULT) -> Tensor:
    """A single read: the mixture of one folded query [1, D], without its log-sum-exp.

    It is separate from `read_many` because kernels that return no log-sum-exp can compute it.
    """
    if not traced_by_torch() and takes_fused(sources, folded, options):
        return fused.read_one(sources, folded, options)
    (h,), _ = read_many(sources, folded, options=options)
    return h


def read_many(
    sources: Sequence[Tensor],
    folded: Tensor,
    prior: tuple[Tensor, Tensor] | None = None,
    options: ReadOptions = DEFAULT,
) -> Reads:
    """`attend` without its checks, for queries [Q, D] from `fold`: Q mixtures and their Q log-sum-exps.

    One query may also have a prior, the result (h, lse) over other sources: phase 2 of the two-phase computation.
    """
    folded = folded.to(accumulator(sources[0].dtype))  # logits use the precision of the sources' accumulator
    if traced_by_torch():
        by_operator = takes_operator([*sources, folded, *(prior or ())])
        form = compiled.attend_by_operator if by_operator else compiled.attend
        return form(sources, folded, prior, options)
    if chosen() == "reference":
        return reference.attend(sources, folded, prior, options)
    folded = folded.contiguous()
    backend = closed_form_for([*sources, folded, *(prior or ())])
    if not torch.is_grad_enabled():  # the autograd function would only add its own time
        h, lse, *_ = backend.forward(sources, folded, *(prior or (None, None)), options)
        return tuple(h), lse.unbind(0)
    out = Attend.apply(backend, options, folded, *(prior or (None, None)), *sources)
    return out[: len(folded)], out[len(folded) :]


def sharing_pays(sources: Sequence[Tensor], folded: Tensor, options: ReadOptions = DEFAULT) -> bool:
    """Whether several queries should share one pass over finished sources instead of each reading all sources.

    Sharing pays wherever the same backend does both: two phases move about half the memory of single reads, in torch
    operations too. On a GPU fla-core's kernel does only single reads, and moves a fraction of the memory that torch
    operations move.
    """
    return traced_by_torch() or not takes_fused(sources, folded, options)


def takes_fused(sources: Sequence[Tensor], folded: Tensor, options: ReadOptions) -> bool:
    """Whether this single read uses the fused kernel. If only its package is missing, a warning is given once."""
    choice = chosen()
    if choice not in ("auto", "fused") or (choice == "auto" and not fused.on_gpu(sources[:1])):
        return False
    why = fused.obstacle(sources, folded, options)
    if why and chosen() == "fused":
        raise RuntimeError(f"the fused backend cannot compute this read: {why}")
    if why and fused.on_gpu(sources) and why == fused.why_not():
        warn_of_missing_kernel(why)
    return not why


@functools.cache
def warn_of_missing_kernel(why: str) -> None:
    warnings.warn(
        "attention over depth runs in plain torch operations on this GPU, which move many times as much memory as a "
        f"fused kernel: {why}",
        stacklevel=2,
    )


def takes_operator(tensors: Sequence[Tensor]) -> bool:
    """Whether a compiler gets the native read as an operator; an exported program must run without depthmix."""
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting() or functional():
        return False
    return native_wanted() and native.fits(tensors)


def native_wanted() -> bool:
    return chosen() in ("auto", "native") and native.library() is not None


# Dynamo calls this without tracing it. `torch.compiler.assume_constant_result` does the same but imports all of Dynamo.
native_wanted._dynamo_marked_constant = True  # type: ignore[attr-defined]


def closed_form_for(tensors: Sequence[Tensor]) -> ModuleType:
    """The module whose `forward` and `backward` can compute with these tensors."""
    choice = chosen()
    if choice == "torch":
        return torch_form
    if choice == "fused":
        raise RuntimeError(
            "the fused backend computes single reads only (one query, no prior, no log-sum-exp: `ops.read_one`), and "
            "this is not a single read. Use backend 'auto', which takes the fused kernel wherever it applies"
        )
    if native.fits(tensors) and native.library() is not None:
        return native
    if choice == "native":
        kinds = sorted({f"{t.dtype} on {t.device}{'' if t.is_contiguous() else ', not contiguous'}" for t in tensors})
        raise RuntimeError(
            f"the native backend needs contiguous float32 or float64 tensors on a CPU; got {'; '.join(kinds)}"
        )
    return torch_form


def describe(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """The backend that `auto` chooses for this device and dtype, as text for users."""
    kind = torch.device(device).type
    if kind == "cpu":
        why = native.why_not() or ("" if dtype in native.DTYPES else f"the native kernel does not support {dtype}")
        return f"torch ({why})" if why else "native (C++, compiled for this CPU)"
    if kind == "cuda":
        why = fused.why_not() or fused.unfit(dtype)
        return f"torch ({why})" if why else "fused (fla-core's Triton kernel), each read separately"
    return f"torch (there is no kernel for {kind})"
