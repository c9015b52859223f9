"""How cost grows: that of a read with the number of its sources, that of a training step with depth and width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from depthmix.bench.model import Size, options_for
from depthmix.bench.processes import progress
from depthmix.bench.read import BOTH, OURS, attend, read_variants
from depthmix.bench.report import SOURCES
from depthmix.bench.step import ratios, variants
from depthmix.bench.timing import measure, paired


def run_sources(rounds: int, counts: Sequence[int], tokens: int, dim: int) -> dict[str, dict[str, list[float]]]:
    """Time of a read per source, forward and backward, relative to that with the fewest sources.

    The read with the fewest is timed twice: its row, the second time over the first, is the control of the others.
    """
    timed: dict[str, Callable[[], None]] = {}
    for count in counts:
        timed[str(count)] = read_variants({OURS: attend}, count, tokens, dim)[f"{OURS}, {BOTH}"]
    first = counts[0]
    timed["baseline"] = timed[str(first)]
    times = measure(timed, rounds=rounds, warmup=2, progress=progress(SOURCES))
    return {
        f"{SOURCES} {n}": {f"{n} sources, time of each": paired(times, str(n), "baseline", scale=n / first)}
        for n in counts
    }


def run_sizes(
    axis: str, mixers: Sequence[str], sizes: Sequence[Mapping[str, int]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Ratios of the step to the residual's at each size; `axis` is the field of Size that differs between them."""
    samples = {}
    for values in sizes:
        size, at = Size(**values), values["dim" if axis == "width" else axis]
        steps, _ = variants({name: options_for(name, size.depth) for name in mixers}, size)
        samples[f"{axis} {at}"] = ratios(steps, rounds, f"{axis} {at}")
    return samples
