"""One read over depth, in units of one pass over its sources.

Axes: T token, D channel. A source is [T, D].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix import ops
from depthmix.bench.peers import Reader, installed
from depthmix.bench.processes import progress
from depthmix.bench.timing import measure, paired

FORWARD, BOTH = "forward", "forward and backward"
OURS, NAIVE = "ops.attend", "fla-core naive"
READ, READ_KEPT = "read", "read, freed memory kept"  # an ordinary process; one that keeps memory, which favours peers


def run(group: str, rounds: int, sources: int, tokens: int, dim: int) -> dict[str, dict[str, list[float]]]:
    """Ratios of each variant to one pass over the sources, round by round."""
    everyone = readers()
    for name, read in everyone.items():
        check_same_work(name, read)
    times = measure(read_variants(everyone, sources, tokens, dim), rounds=rounds, warmup=2, progress=progress("read"))
    ratios = {name: paired(times, name, "pass") for name in times if name != "pass"}
    if NAIVE in everyone:
        ratios[f"{OURS} against {NAIVE}, {BOTH}"] = paired(times, f"{OURS}, {BOTH}", f"{NAIVE}, {BOTH}")
    return {group: ratios}


def sample(sources: int, tokens: int, dim: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(tokens, dim, generator=generator) for _ in range(sources)]
    query, gradient = torch.randn(dim, generator=generator) / dim**0.5, torch.randn(tokens, dim, generator=generator)
    return values, query, torch.rand(dim, generator=generator) + 0.5, gradient


def one_pass(values: Sequence[Tensor]) -> None:
    """The physical limit: every source is read once."""
    for v in values:
        v.sum()


def read_variants(everyone: dict[str, Reader], sources: int, tokens: int, dim: int) -> dict[str, Callable[[], None]]:
    values, query, weight, gradient = sample(sources, tokens, dim)
    leaves = [t.clone().requires_grad_() for t in (query, weight, *values)]

    def forward(read: Reader) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                read(values, query, weight)

        return run

    def both(read: Reader) -> Callable[[], None]:
        def run() -> None:
            torch.autograd.grad(read(leaves[2:], leaves[0], leaves[1]), leaves, gradient)

        return run

    variants: dict[str, Callable[[], None]] = {"pass": lambda: one_pass(values)}
    for name, read in everyone.items():
        variants[f"{name}, {FORWARD}"] = forward(read)
        variants[f"{name}, {BOTH}"] = both(read)
    return variants


def attend(values: Sequence[Tensor], query: Tensor, weight: Tensor) -> Tensor:
    h: Tensor = ops.attend(values, query, weight)[0]
    return h


def forced(backend: Any) -> Reader:
    def read(values: Sequence[Tensor], query: Tensor, weight: Tensor) -> Tensor:
        with ops.using(backend):
            return attend(values, query, weight)

    return read


def readers() -> dict[str, Reader]:
    """depthmix, its torch form, and the peers that are installed."""
    return {OURS: attend, "its torch form": forced("torch"), **{k: read for k, (_, read) in installed()[0].items()}}


def check_same_work(name: str, read: Reader) -> None:
    """Times are compared only where results and gradients agree with the plain form."""
    values, query, weight, gradient = sample(3, 5, 16)

    def outcome(reader: Reader) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (query, weight, *values)]
        h = reader(leaves[2:], leaves[0], leaves[1])
        return [h, *torch.autograd.grad(h, leaves, gradient)]

    for ours, theirs in zip(outcome(forced("reference")), outcome(read), strict=True):
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
            worst = (ours - theirs).abs().max().item()
            raise ValueError(f"{name} computes something else (it differs by {worst:.1e}): its time is not comparable")
