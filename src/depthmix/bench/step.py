"""A training step and a forward of a decoder-shaped network for every mechanism, against the plain residual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.bench.model import BenchModel, off_their_start
from depthmix.bench.timing import Ratio, measure, ratio

BASELINE, CONTROL = "residual", "residual again"


@dataclass(frozen=True)
class Size:
    dim: int = 768
    depth: int = 24
    hidden: int = 2048
    tokens: int = 1024
    batch: int = 1


def build(name: str, options: Mapping[str, Any], size: Size) -> BenchModel:
    torch.manual_seed(0)
    return off_their_start(BenchModel(name, dim=size.dim, depth=size.depth, hidden=size.hidden, **options))


def bench_step(
    mixers: Mapping[str, tuple[str, Mapping[str, Any]]], size: Size, *, rounds: int, compiled: bool, progress: Any
) -> tuple[dict[str, Ratio], dict[str, Ratio]]:
    """Ratios of the step and of the forward alone. The residual runs twice: the control says how far to trust them."""
    x = torch.randn(size.batch, size.tokens, size.dim, generator=torch.Generator().manual_seed(0))
    entries = {BASELINE: ("residual", {}), CONTROL: ("residual", {}), **mixers}
    steps: dict[str, Callable[[], None]] = {}
    forwards: dict[str, Callable[[], None]] = {}
    for label, (name, options) in entries.items():
        model = build(name, options, size)
        run = torch.compile(model, fullgraph=True) if compiled else model
        steps[label] = make_step(model, run, x)
        forwards[label] = make_forward(run, x)
    by_step = measure(steps, rounds=rounds, progress=progress)
    by_forward = measure(forwards, rounds=rounds, progress=progress)
    return tuple({label: ratio(t, label, BASELINE) for label in entries} for t in (by_step, by_forward))  # type: ignore[return-value]


def make_step(model: BenchModel, run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        run(x).square().mean().backward()

    return step


def make_forward(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            run(x)

    return forward


def kept_bytes_per_token(name: str, options: Mapping[str, Any], size: Size) -> float:
    """What the graph of one forward keeps for its backward pass, at this size."""
    x = torch.randn(size.batch, size.tokens, size.dim, requires_grad=True)
    return kept_bytes(build(name, options, size), x)


def kept_bytes(model: nn.Module, x: Tensor, **inputs: Any) -> float:
    """Bytes a token of the storages that the graph of `model(x)` holds, each counted once; not parameters, not x."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        held = tensor.detach()  # an output that holds its own graph would never be freed
        if held.untyped_storage().data_ptr() not in own:
            storages[held.untyped_storage().data_ptr()] = held
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x, **inputs)
    kept = sum(t.untyped_storage().nbytes() for t in storages.values())
    del out
    return kept / x[..., 0].numel()
