"""A training step of a pipeline: what depth mixing costs in it, and what the cache saves.

Two processes of one thread each, four stages on each, interleaved 1F1B. All variants share one set of sublayers. A step
is timed from one barrier to the next, so the slower process counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from depthmix import parallel
from depthmix.bench.mixing import cheap_sublayers, medians_of_turns, mixing_ratios, with_turns
from depthmix.bench.model import Size, build, tokens_for
from depthmix.bench.processes import Job, run_child
from depthmix.bench.report import BASELINE, CONTROL
from depthmix.bench.step import Options, with_control
from depthmix.bench.timing import measure, paired

RANKS, STAGES, MICROBATCHES = 2, 4, 4
NAIVE, INSIDE, AGAINST = " without the cache", " in a pipeline", ": cache against none"
PIPELINE, PIPELINE_MIXING, TRANSPORT = "pipeline step", "pipeline mixing", "pipeline transport"


def run(mixers: Mapping[str, Options], size: Mapping[str, int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Ratios of steps to the residual's in the same pipeline, the same by the mechanism's own time, and of the cache to
    the naive transport."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(RANKS) as pool:
        given = {"mixers": mixers, "size": size, "rounds": rounds, "folder": folder}
        jobs = [
            Job(label=f"rank {r}", target=f"{__name__}:run_rank", arguments={**given, "rank": r}) for r in range(RANKS)
        ]
        results: list[dict[str, dict[str, list[float]]]] = [*pool.map(run_child, jobs)]
    return results[0]


def run_rank(
    mixers: Mapping[str, Options], size: Mapping[str, int], rounds: int, folder: str, rank: int
) -> dict[str, dict[str, list[float]]]:
    torch.set_num_threads(1)
    meeting = Path(folder, "meeting").as_uri()
    dist.init_process_group("gloo", meeting, timedelta(minutes=5), rank=rank, world_size=RANKS)
    try:
        return measure_all(mixers, Size(**size), rounds)
    finally:
        dist.destroy_process_group()


def measure_all(mixers: Mapping[str, Options], size: Size, rounds: int) -> dict[str, dict[str, list[float]]]:
    plain = build(BASELINE, {}, size).sublayers
    steps = with_control(variants(mixers, size, plain))
    times = measure(steps, rounds=rounds)
    shown = [*(name for name in steps if name not in (BASELINE, CONTROL)), CONTROL]
    cheap = with_control(variants(mixers, size, cheap_sublayers(plain, size)))
    own = medians_of_turns(measure(with_turns(steps[BASELINE], cheap), rounds=rounds))  # type: ignore[arg-type]
    return {
        PIPELINE: {name: paired(times, name, BASELINE) for name in shown},
        PIPELINE_MIXING: {
            name if name == CONTROL else name + INSIDE: ratios for name, ratios in mixing_ratios(own).items()
        },
        TRANSPORT: {
            **{name + AGAINST: paired(times, name, name + NAIVE) for name in mixers},
            CONTROL: paired(times, CONTROL, BASELINE),
        },
    }


def variants(mixers: Mapping[str, Options], size: Size, sublayers: nn.ModuleList) -> dict[str, Callable[[], None]]:
    steps = {BASELINE: make_step(BASELINE, {}, size, sublayers, cache=True)}
    for name, options in mixers.items():
        steps[name] = make_step(name, options, size, sublayers, cache=True)
        steps[name + NAIVE] = make_step(name, options, size, sublayers, cache=False)
    return steps


def make_step(name: str, options: Options, size: Size, sublayers: nn.ModuleList, cache: bool) -> Callable[[], None]:
    """Forward and backward of all micro-batches, without an optimiser."""
    model = build(name, options, size, sublayers)
    plan = parallel.make_plan(model.depth, shape=(size.batch, size.tokens), ranks=RANKS, virtual=STAGES)
    pipeline = parallel.Pipeline(
        model.depth,
        model.sublayers,
        plan=plan,
        head=model.norm,
        loss=mean_square,
        cache=cache,
        schedule="Interleaved1F1B",
        microbatches=MICROBATCHES,
    )
    x = tokens_for(size).repeat(MICROBATCHES, 1, 1)

    def step() -> None:
        for parameter in pipeline.parameters():
            parameter.grad = None
        dist.barrier()
        pipeline.step(x, x)
        dist.barrier()

    return step


def mean_square(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()
