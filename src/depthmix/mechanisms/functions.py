"""User-defined functions, by the name `package.module:function` that a configuration stores.

Naming one imports its module, which runs that module's code; nothing is imported unless an option names it. A function
is tried on a few numbers when a configuration is checked, so that errors are reported before anything runs.

Axes: ... any leading shape, H head, d channel of a head, r feature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from depthmix import ops
from depthmix.ops.reference import full_precision
from depthmix.support.checks import import_function

ELU1 = "elu1"
ROWS = 5  # of the test input that a function is tried on


class OwnFunction:
    """A function by its name. It receives tensors of one dtype, at least float32, and runs without autocast."""

    def __init__(self, option: str, name: str, others: str = "") -> None:
        self.function = import_function(option, name, others)

    def __call__(self, *tensors: Tensor) -> Any:
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
        with full_precision(tensors[0].device):
            return self.function(*(t.to(dtype) for t in tensors))


def dot(query: Tensor, key: Tensor) -> Tensor:
    """The dot product that the papers use as score: [..., H] from [..., H, d]."""
    return (key * query).sum(-1)


def kernel_function(name: str) -> Callable[[Tensor], Tensor]:
    """The feature map φ: [..., d] to positive [..., r]."""
    return ops.elu1 if name == ELU1 else OwnFunction("kernel", name, f"{ELU1} or ")


def score_function(name: str | None) -> Callable[[Tensor, Tensor], Tensor]:
    """score(query, key): [..., H, d] or [H, d], and [..., H, d], to [..., H]."""
    return dot if name is None else OwnFunction("score", name)


@lru_cache(maxsize=256)
def count_features(name: str, width: int) -> int:
    """The number of features that a kernel computes from `width` channels."""
    if name == ELU1:
        return width
    x = numbers(ROWS, 2, width)
    features = try_function("kernel", name, kernel_function(name), x)
    if features.dim() != 3 or features.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"kernel={name!r} returned shape {list(features.shape)} for a tensor of shape {list(x.shape)}; expected "
            f"[{ROWS}, 2, r]: the features of each vector"
        )
    if not (features > 0).all():
        raise ValueError(
            f"kernel={name!r} returned {float(features.min()):.3g}; expected positive features, since weights "
            "are divided by their sum"
        )
    return features.shape[-1]


@lru_cache(maxsize=256)
def starts_uniform(name: str | None, heads: int, width: int) -> bool:
    """Whether a zero query gives every key the same score, so that all weights are equal at the start."""
    if name is None:
        return True
    score, keys, queries = score_function(name), numbers(ROWS, heads, width), numbers(heads, width)
    for query in (queries, queries.expand_as(keys), torch.zeros_like(queries)):  # learned and per token
        scores = try_function("score", name, score, query, keys)
        if scores.shape != keys.shape[:-1]:
            raise ValueError(
                f"score={name!r} returned shape {list(scores.shape)} for a query {list(query.shape)} and a key "
                f"{list(keys.shape)}; expected {list(keys.shape[:-1])}: one number per head"
            )
    return bool((scores == scores[:1]).all())


def numbers(*shape: int) -> Tensor:
    """Test input: numbers of both signs without a pattern, always on the CPU, even under a meta device."""
    count = torch.Size(shape).numel()
    return (torch.arange(1, count + 1, device="cpu", dtype=torch.float32) * 1.7).sin().mul(2).view(shape)


def try_function(option: str, name: str, function: Callable[..., Any], *arguments: Tensor) -> Tensor:
    shapes = " and ".join(str(list(a.shape)) for a in arguments)
    try:
        with torch.no_grad(), torch.device("cpu"):
            result = function(*arguments)
    except Exception as error:  # the message reports any error
        raise ValueError(
            f"{option}={name!r} failed on tensors {shapes} ({type(error).__name__}: {error}); see the page of attnres "
            "for its arguments"
        ) from error
    if not isinstance(result, Tensor) or not result.is_floating_point():
        got = str(result.dtype) if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise ValueError(f"{option}={name!r} returned {got} for tensors {shapes}; expected a floating-point tensor")
    return result
