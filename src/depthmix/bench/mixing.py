"""The time that a mechanism itself takes in a training step, without the time of the sublayers.

The stack runs forward and backward with `CheapSublayer`s, and so does the plain residual. Their difference, divided by
the residual's real step, is what the mechanism adds: noise of 8 % in an effect of 4 % is 0.3 % of a step; in a whole
step it would be 8 %.

Axes: B batch, T token, D channel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from depthmix.bench.model import Size, build, tokens_for
from depthmix.bench.processes import progress
from depthmix.bench.report import BASELINE, CONTROL
from depthmix.bench.step import Options, make_step, with_control
from depthmix.bench.timing import measure_clocks

REAL = "residual, whole step"
MIXING, MIXING_CPU = "mixing", "mixing by processor time"  # 1 + (mechanism − residual) / real step
MIXING_MS, MIXING_CPU_MS = "mixing, milliseconds", "mixing, milliseconds of processor time"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
TURNS = 3  # of each stack per round, of which the median counts; they are cheap compared with the real step
Times = Mapping[str, Sequence[float]]


class ReplacedSublayer(torch.autograd.Function):
    """A node of the graph that saves its input, as a PreNorm does, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, anchor: Tensor, stored: Tensor, weights: Sequence[Tensor]) -> Tensor:
        ctx.save_for_backward(h)
        ctx.stored, ctx.weights = stored, weights
        walk(weights)
        return stored.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        walk(ctx.weights)
        return ctx.stored.clone() if ctx.needs_input_grad[0] else None, None, None, None


class CheapSublayer(nn.Module):
    """Replaces `sublayer`: a fresh output of its size and a fresh gradient of its input, both copies of stored tensors.

    Outputs are new tensors that nothing else refers to, as the result of a product is. The weights of the real sublayer
    are read once in each direction: sources leave the processor's caches between reads, as they do in a network.
    """

    def __init__(self, sublayer: nn.Module, stored: Tensor) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(()))  # outputs require gradients where the embedding does not
        self.stored = stored
        self.weights = tuple(p.detach() for p in sublayer.parameters())  # a tuple: not parameters of this module

    def forward(self, h: Tensor) -> Tensor:
        output: Tensor = ReplacedSublayer.apply(h, self.anchor, self.stored, self.weights)
        return output


def walk(weights: Sequence[Tensor]) -> None:
    for weight in weights:
        weight.sum()


def cheap_sublayers(sublayers: nn.ModuleList, size: Size) -> nn.ModuleList:
    generator = torch.Generator().manual_seed(1)
    shape = (size.batch, size.tokens, size.dim)
    return nn.ModuleList(CheapSublayer(each, torch.randn(shape, generator=generator)) for each in sublayers)


def run(mixers: Mapping[str, Options], size: Mapping[str, int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Ratios and milliseconds of each mechanism, by wall-clock time and by processor time."""
    variants = with_turns(*stacks(mixers, Size(**size)))
    clocks = measure_clocks(variants, CLOCKS, rounds=rounds, progress=progress(MIXING))
    wall, processor = (medians_of_turns(clocks[clock]) for clock in CLOCKS)
    return {
        MIXING: mixing_ratios(wall),
        MIXING_CPU: mixing_ratios(processor),
        MIXING_MS: milliseconds(wall),
        MIXING_CPU_MS: milliseconds(processor),
    }


def stacks(mixers: Mapping[str, Options], size: Size) -> tuple[Callable[[], None], dict[str, Callable[[], None]]]:
    """The residual's real step, and a step of every mechanism with cheap sublayers, the residual twice."""
    x = tokens_for(size)
    real = build(BASELINE, {}, size)
    sublayers = cheap_sublayers(real.sublayers, size)
    steps = {}
    for name, options in {BASELINE: {}, **mixers}.items():
        model = build(name, options, size, sublayers)
        steps[name] = make_step(model, model, x)
    return make_step(real, real, x), with_control(steps)


def with_turns(
    real: Callable[[], None], steps: Mapping[str, Callable[[], None]]
) -> dict[tuple[str, int], Callable[[], None]]:
    """The variants of one round: the real step once, every stack `TURNS` times, never two turns in a row."""
    turns = {(name, turn): step for turn in range(TURNS) for name, step in steps.items()}
    return {(REAL, 0): real, **turns}


def medians_of_turns(times: Mapping[tuple[str, int], Sequence[float]]) -> dict[str, list[float]]:
    """Seconds of each variant in each round."""
    turns: dict[str, list[Sequence[float]]] = {}
    for (name, _), seconds in times.items():
        turns.setdefault(name, []).append(seconds)
    return {name: [statistics.median(each) for each in zip(*all_, strict=True)] for name, all_ in turns.items()}


def mixing_ratios(times: Times) -> dict[str, list[float]]:
    """1 + (mechanism − residual) / real step, round by round; for the control, last, the mechanism is the residual."""
    shown = [*(name for name in times if name not in (REAL, BASELINE, CONTROL)), CONTROL]
    return {
        name: [1 + (a - b) / c for a, b, c in zip(times[name], times[BASELINE], times[REAL], strict=True)]
        for name in shown
    }


def milliseconds(times: Times) -> dict[str, list[float]]:
    return {name: [1000 * seconds for seconds in each] for name, each in times.items()}
