"""One read over depth, in units of one pass over its sources; and how it grows with their number."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix import ops
from depthmix.bench.timing import Ratio, measure, ratio


def sample(sources: int, tokens: int, dim: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(tokens, dim, generator=generator) for _ in range(sources)]
    query, gradient = torch.randn(dim, generator=generator) / dim**0.5, torch.randn(tokens, dim, generator=generator)
    return values, query, torch.ones(dim), gradient


def one_pass(values: Sequence[Tensor]) -> None:
    """The physical limit: every source is read once."""
    for v in values:
        v.sum()


def read_variants(sources: int, tokens: int, dim: int) -> dict[str, Callable[[], None]]:
    values, query, weight, gradient = sample(sources, tokens, dim)
    leaves = [t.clone().requires_grad_() for t in (query, weight, *values)]

    def forward(read: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                read(values, query, weight)

        return run

    def both(read: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            torch.autograd.grad(read(leaves[2:], leaves[0], leaves[1]), leaves, gradient)

        return run

    variants: dict[str, Callable[[], None]] = {"pass": lambda: one_pass(values)}
    for name, read in readers().items():
        variants[f"{name}, forward"] = forward(read)
        variants[f"{name}, forward and backward"] = both(read)
    return variants


def readers() -> dict[str, Callable[..., Tensor]]:
    """depthmix, its plain forms, and the peers that are installed."""

    def ours(values: Sequence[Tensor], query: Tensor, weight: Tensor) -> Tensor:
        h: Tensor = ops.attend(values, query, weight)[0]
        return h

    def forced(backend: Any) -> Callable[..., Tensor]:
        def read(values: Sequence[Tensor], query: Tensor, weight: Tensor) -> Tensor:
            with ops.using(backend):
                return ours(values, query, weight)

        return read

    found: dict[str, Callable[..., Tensor]] = {"ops.attend": ours, "its torch form": forced("torch")}
    if (naive := fla_naive()) is not None:
        found["fla-core naive"] = lambda values, query, weight: naive(query, list(values), weight)
    return found


def fla_naive() -> Any:
    """fla-core's plain function, loaded by itself: its package wants Triton. None where it is not installed."""
    try:
        path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/attnres/naive.py")
        spec = importlib.util.spec_from_file_location("fla_naive_attnres", str(path))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.naive_attnres
    except (importlib.metadata.PackageNotFoundError, ImportError, OSError):
        return None


def bench_read(rounds: int, sources: int, tokens: int, dim: int, progress: Any) -> dict[str, Ratio]:
    """Each variant in passes over the sources."""
    times = measure(read_variants(sources, tokens, dim), rounds=rounds, warmup=2, progress=progress)
    found = {name: ratio(times, name, "pass") for name in times if name != "pass"}
    if any(name.startswith("fla-core") for name in times):
        ours, naive = "ops.attend, forward and backward", "fla-core naive, forward and backward"
        found["ops.attend against fla-core naive, forward and backward"] = ratio(times, ours, naive)
    return found


def bench_growth(rounds: int, counts: Sequence[int], tokens: int, dim: int, progress: Any) -> dict[int, Ratio]:
    """Time of a read for each source, against that with the fewest sources."""
    variants: dict[str, Callable[[], None]] = {}
    for count in counts:
        variants[str(count)] = read_variants(count, tokens, dim)["ops.attend, forward and backward"]
    times = measure(variants, rounds=rounds, warmup=2, progress=progress)
    first = counts[0]
    return {count: ratio(times, str(count), str(first), scale=count / first) for count in counts}
