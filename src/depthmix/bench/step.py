"""A training step and a forward of a decoder-shaped network for every mechanism, against the plain residual."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from depthmix.bench.model import BenchModel, Size, build, tokens_for
from depthmix.bench.processes import progress, stopwatch
from depthmix.bench.report import BASELINE, CONTROL
from depthmix.bench.timing import measure, paired
from depthmix.support.terminal import format_duration, say

Options = Mapping[str, Any]


def run(
    mixers: Mapping[str, Options], size: Mapping[str, int], rounds: int, compiled: bool = False
) -> dict[str, dict[str, list[float]]]:
    """Ratios of the step and of the forward alone, to those of the residual."""
    steps, forwards = variants(mixers, Size(**size), compiled)
    how = "compiled " if compiled else ""
    return {
        f"{how}step": ratios(steps, rounds, f"{how}step"),
        f"{how}forward": ratios(forwards, rounds, f"{how}forward"),
    }


def ratios(timed: Mapping[str, Callable[[], None]], rounds: int, label: str) -> dict[str, list[float]]:
    times = measure(timed, rounds=rounds, progress=progress(label))
    shown = [*(name for name in timed if name not in (BASELINE, CONTROL)), CONTROL]
    return {name: paired(times, name, BASELINE) for name in shown}


def variants(
    mixers: Mapping[str, Options], size: Size, compiled: bool = False
) -> tuple[dict[str, Callable[[], None]], dict[str, Callable[[], None]]]:
    """Step and forward of each. All share one set of sublayers: they differ in the mechanism only.

    The residual runs twice per round: this control shows how far the other ratios can be trusted.
    """
    x = tokens_for(size)
    plain = build(BASELINE, {}, size)
    steps: dict[str, Callable[[], None]] = {}
    forwards: dict[str, Callable[[], None]] = {}
    for name, options in {BASELINE: {}, **mixers}.items():
        model = plain if name == BASELINE else build(name, options, size, plain.sublayers)
        call = compile_now(name, model, x) if compiled else model
        steps[name], forwards[name] = make_step(model, call, x), make_forward(call, x)
    return with_control(steps), with_control(forwards)


def with_control(timed: Mapping[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
    """The residual a second time, half a round later: directly after itself it would find its memory in the caches."""
    names = list(timed)
    middle = 1 + len(names) // 2
    order = [*names[:middle], CONTROL, *names[middle:]]
    return {name: timed[BASELINE if name == CONTROL else name] for name in order}


def compile_now(name: str, model: BenchModel, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Compiled for training and for a forward without gradients, before anything is timed."""
    say(f"  compiling {name} …")
    call: Callable[[Tensor], Tensor] = torch.compile(model, fullgraph=True, dynamic=False, **compiler_options())
    with stopwatch() as took:
        make_step(model, call, x)()
        make_forward(call, x)()
    say(f"  compiled {name} in {format_duration(took())}")
    return call


def compiler_options() -> dict[str, Any]:
    """All models run the same code: without separate caches, one would pay for the guards of the others."""
    known = inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if "isolate_recompiles" in known else {}


def make_step(model: BenchModel, call: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    """Forward and backward, without an optimiser."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        call(x).square().mean().backward()

    return step


def make_forward(call: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            call(x)

    return forward
