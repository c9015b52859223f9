"""What trained runs show about mechanisms: paired differences, speed-ups, crossings, and a verdict in one sentence.

Pure functions over the validation curves of finished runs. An arm is one way to train; runs of two arms with the same
seed are a pair (the same order of the data, the same initial weights where shapes agree), and only pairs are compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from depthmix.analysis.statistics import CONFIDENCE, POWER, Estimate, estimate, interpolate, ratio
from depthmix.support.checks import is_finite
from depthmix.support.files import format_of, read_lines, read_object

Axis = Literal["tokens", "seconds", "flops"]
AXES: dict[Axis, str] = {"tokens": "tokens", "seconds": "wall-clock", "flops": "compute"}
MARGIN = 0.03  # if a control's tokens/s differ from its baseline's by more, ratios of tokens/s are undecided
SPREAD = 1.1  # and so they are if the largest ratio of a seed is more than this many times the smallest
AGAIN = "Remove this run's folder; the same command then trains it again"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its validations, oldest first, and what it cost."""

    arm: str
    seed: int
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]  # of training work, without validation
    losses: tuple[float, ...]
    flops: float  # of the whole run
    tokens_per_second: float
    memory_bytes: float
    parameters: int
    lr: float
    folder: str = ""
    depth: Mapping[str, Any] = field(default_factory=dict)  # the last recording over depth, as the metrics hold it

    @property
    def final(self) -> float:
        return self.losses[-1]

    def axis(self, name: Axis) -> Sequence[float]:
        if name == "flops":
            return [self.flops * tokens / self.tokens[-1] for tokens in self.tokens]
        return self.tokens if name == "tokens" else self.seconds


def read_run(folder: Path, *, arm: str, seed: int, lr: float) -> Run:
    """From the files that a run leaves in its folder, `metrics.jsonl` and `result.json`."""
    costs = ("flops", "tokens_per_second", "peak_memory_bytes", "parameters")
    result = read_object(folder / "result.json", AGAIN, costs)
    format_of(result, folder / "result.json")
    check_numbers(folder / "result.json", result, costs, above_zero=True)
    path = folder / "metrics.jsonl"
    recorded = read_lines(path, AGAIN)
    lines = [line for line in recorded if line.get("kind") == "validation"]
    for line in lines:
        if missing := [name for name in ("tokens", "seconds", "loss") if name not in line]:
            raise ValueError(f"{path} is damaged: a validation line lacks {', '.join(missing)}. {AGAIN}")
        check_numbers(path, line, ("tokens", "seconds", "loss"))
    points = [line for line in lines if line["tokens"] > 0]
    if not points:
        raise ValueError(f"{path} has no validation; expected at least one, at the end of the run. {AGAIN}")
    return Run(
        arm=arm,
        seed=seed,
        tokens=tuple(float(p["tokens"]) for p in points),
        seconds=tuple(float(p["seconds"]) for p in points),
        losses=tuple(float(p["loss"]) for p in points),
        flops=float(result["flops"]),
        tokens_per_second=float(result["tokens_per_second"]),
        memory_bytes=float(result["peak_memory_bytes"]),
        parameters=int(result["parameters"]),
        lr=lr,
        folder=str(folder),
        depth=next((line for line in reversed(recorded) if line.get("kind") == "depth"), {}),
    )


def check_numbers(path: Path, content: Mapping[str, Any], names: Sequence[str], above_zero: bool = False) -> None:
    for name in names:
        value = content[name]
        if not is_finite(value) or (above_zero and value <= 0):
            expected = "a finite number above 0" if above_zero else "a finite number"
            raise ValueError(f"{path} is damaged: {name}={value!r}; expected {expected}. {AGAIN}")


@dataclass(frozen=True, kw_only=True)
class Crossing:
    at: float  # on the axis
    ahead: str  # the arm with the lower loss from here on


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm against its baseline. Ratios are the arm's over the baseline's, as geometric means over the pairs."""

    arm: str
    baseline: str
    seeds: tuple[int, ...]  # those that both have
    difference: Estimate | None = None  # of the final validation loss; below 0: the arm is better
    speed_ups: Mapping[Axis, Estimate | None] = field(default_factory=dict)
    unknown: str = ""  # why the curves do not show what a token, a second or a FLOP is worth
    needed: Mapping[Axis, float | None] = field(default_factory=dict)  # by the baseline, mean; None: beyond, or unknown
    crossings: Mapping[Axis, list[Crossing]] = field(default_factory=dict)
    tokens_per_second: Estimate | None = None
    control: float | None = None  # how far the tokens/s of the baseline's control are from 1; None: there is no control
    undecided: str = ""  # why tokens/s and wall-clock decide nothing here
    memory: Estimate | None = None
    parameters: float | None = None
    verdict: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    runs: list[Run]
    rows: list[Row]

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    def of(self, arm: str) -> dict[int, Run]:
        """The runs of an arm, by seed."""
        return {run.seed: run for run in self.runs if run.arm == arm}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(runs: Sequence[Run], baselines: Mapping[str, str], controls: Collection[str] = ()) -> Comparison:
    """Each arm of `baselines` against the arm that it names, over the seeds that both have finished.

    `controls` are arms that repeat their baseline: any difference in their speed is due to the machine.
    """
    by_arm: dict[str, dict[int, Run]] = {}
    for run in runs:
        if not all(map(math.isfinite, run.losses)):
            raise ValueError(f"{run.arm}, seed {run.seed}: a validation loss is not finite; exclude this run")
        if run.seed in by_arm.setdefault(run.arm, {}):
            raise ValueError(f"{run.arm} has two runs with seed {run.seed}; expected one")
        by_arm[run.arm][run.seed] = run
    pairs = {
        arm: [(run, by_arm[base][seed]) for seed, run in sorted(by_arm.get(arm, {}).items()) if seed in by_arm[base]]
        for arm, base in baselines.items()
        if base in by_arm
    }
    deviations: dict[str, float] = {}  # by baseline: how far its control is from it
    for arm in controls:
        if pairs.get(arm):
            deviations[baselines[arm]] = max(deviations.get(baselines[arm], 0.0), abs(speed_ratio(pairs[arm]).mean - 1))
    rows = [make_row(arm, base, pairs.get(arm, []), deviations.get(base)) for arm, base in baselines.items()]
    return Comparison(runs=list(runs), rows=rows)


def speed_ratio(pairs: Sequence[tuple[Run, Run]]) -> Estimate:
    return ratio([a.tokens_per_second for a, _ in pairs], [b.tokens_per_second for _, b in pairs])


def undecided_reason(speed: Estimate, deviation: float | None) -> str:
    """Runs are separate processes at different times, so tokens/s include what else the machine did."""
    if deviation is not None and deviation > MARGIN:
        return f"a control differs by {deviation:.2f}"
    low, high = min(speed.values), max(speed.values)
    return f"{low:.2f} to {high:.2f} across seeds" if high > SPREAD * low else ""


def make_row(arm: str, base: str, pairs: Sequence[tuple[Run, Run]], deviation: float | None) -> Row:
    if not pairs:
        verdict = f"{arm}: no statement, because it and {base} have no completed seed in common."
        return Row(arm=arm, baseline=base, seeds=(), verdict=verdict)
    difference = estimate([a.final - b.final for a, b in pairs])
    unknown = unknown_reason(pairs)
    speed_ups: dict[Axis, Estimate | None] = {axis: None if unknown else speed_up(pairs, axis) for axis in AXES}
    speed = speed_ratio(pairs)
    reason = undecided_reason(speed, deviation)
    memory = ratio([a.memory_bytes for a, _ in pairs], [b.memory_bytes for _, b in pairs])
    return Row(
        arm=arm,
        baseline=base,
        seeds=tuple(run.seed for run, _ in pairs),
        difference=difference,
        speed_ups=speed_ups,
        unknown=unknown,
        needed={axis: needed(pairs, axis) for axis in AXES},
        crossings={axis: crossings(pairs, axis) for axis in AXES},
        tokens_per_second=speed,
        control=deviation,
        undecided=reason,
        memory=memory,
        parameters=pairs[0][0].parameters / pairs[0][1].parameters,
        verdict=verdict_of(
            arm,
            base,
            difference,
            describe_worth(base, speed_ups["tokens"], unknown),
            describe_cost(base, speed, reason, memory),
        ),
    )


def unknown_reason(pairs: Sequence[tuple[Run, Run]]) -> str:
    """A run that has the other's final loss at its first validation reached it at a point that was not observed."""
    if any(min(len(arm.losses), len(base.losses)) == 1 for arm, base in pairs):
        return "a run was validated only once"
    if any(max(run.losses) <= max(arm.final, base.final) for arm, base in pairs for run in (arm, base)):
        return "a run had reached the other's final loss before its first validation"
    return ""


def reached(target: float, xs: Sequence[float], losses: Sequence[float]) -> float | None:
    """Where a curve falls to `target` and stays there, by linear interpolation; None: not within the run."""
    above = [i for i, loss in enumerate(losses) if loss > target]
    if not above:
        return xs[0]
    last = above[-1]
    if last == len(xs) - 1:
        return None
    share = (losses[last] - target) / (losses[last] - losses[last + 1])
    return xs[last] + share * (xs[last + 1] - xs[last])


def speed_up(pairs: Sequence[tuple[Run, Run]], axis: Axis) -> Estimate | None:
    """How much more of the baseline's tokens (seconds, FLOPs) one of the arm's is worth, at the worse final loss.

    The better run is followed to the point where it has the final loss of the other, so both ends lie inside the runs.
    """
    factors = []
    for arm, base in pairs:
        worse = max(arm.final, base.final)
        ends = [reached(worse, run.axis(axis), run.losses) for run in (base, arm)]
        if not (ends[0] and ends[1]):
            return None
        factors.append(math.log(ends[0] / ends[1]))
    return estimate(factors).mapped(math.exp)


def needed(pairs: Sequence[tuple[Run, Run]], axis: Axis) -> float | None:
    """What the baseline needs for the arm's final loss, the mean over pairs.

    None where one never gets there, or was there before its first validation.
    """
    ends = [reached(arm.final, base.axis(axis), base.losses) for arm, base in pairs]
    inside = [end for end in ends if end is not None]
    seen = all(max(base.losses) > arm.final for arm, base in pairs)
    return math.fsum(inside) / len(ends) if seen and len(inside) == len(ends) else None


def crossings(pairs: Sequence[tuple[Run, Run]], axis: Axis) -> list[Crossing]:
    """Where the mean curves cross.

    With several seeds a side counts only once the paired interval excludes 0, so noise around 0 is no crossing.
    """
    curves = [(run.axis(axis), run.losses) for pair in pairs for run in pair]
    begin, end = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    grid = sorted({x for xs, _ in curves for x in xs if begin <= x <= end})
    crossed: list[Crossing] = []
    means: list[tuple[float, float]] = []  # since the side was last certain
    side = 0
    for x in grid:
        at = [interpolate(x, xs, losses) for xs, losses in curves]
        here = estimate([arm - base for arm, base in zip(at[::2], at[1::2], strict=True)])
        means.append((x, here.mean))
        if here.mean == 0 or (here.low is not None and not here.excludes(0)):
            continue
        now = 1 if here.mean > 0 else -1
        if side and now != side:
            ahead = pairs[0][0 if now < 0 else 1].arm
            crossed.append(Crossing(at=zero_of(means), ahead=ahead))
        side, means = now, means[-1:]
    return crossed


def zero_of(points: Sequence[tuple[float, float]]) -> float:
    """The last sign change of a line through points whose first and last differ in sign."""
    for (x0, y0), (x1, y1) in zip(points[-2::-1], points[:0:-1], strict=True):
        if y0 * y1 <= 0 and y0 != y1:
            return x0 + (x1 - x0) * y0 / (y0 - y1)
    raise ValueError("no sign change between the points")


def describe_cost(base: str, speed: Estimate, undecided: str, memory: Estimate) -> str:
    if undecided:
        return f"it used {memory.mean:.2f} times {base}'s memory; tokens/s: undecided ({undecided})"
    return (
        f"it trained at {speed.mean:.2f} times {base}'s tokens/s{in_brackets(speed)} "
        f"and used {memory.mean:.2f} times its memory"
    )


def describe_worth(base: str, speed_up: Estimate | None, unknown: str) -> str:
    if unknown:
        return f"; what a token is worth cannot be determined ({unknown})"
    if speed_up is None:
        return ""
    return f", and one of its tokens is worth {speed_up.mean:.2f} of {base}'s{in_brackets(speed_up)}"


def interval_of(e: Estimate | None, form: str) -> str:
    """From its lower to its upper end; nothing where there is no interval."""
    return "" if e is None or e.low is None or e.high is None else f"{e.low:{form}} to {e.high:{form}}"


def in_brackets(e: Estimate) -> str:
    words = interval_of(e, ".2f")
    return f" ({CONFIDENCE:.0%} interval {words})" if words else ""


def verdict_of(arm: str, base: str, difference: Estimate, worth: str, cost: str) -> str:
    """One sentence, with the interval and the number of seeds that it rests on."""
    size, n = f"{abs(difference.mean):.4f}", len(difference.values)
    side = "lower" if difference.mean < 0 else "higher"
    if not any(difference.values):
        return f"{arm}: no difference from {base}; the final losses are bitwise equal in {seeds_of(n)}; {cost}."
    if difference.low is None:
        words = "one seed, so no statement about significance"
        return f"{arm}: its final loss is {size} {side} than {base}'s ({words}); {cost}."
    interval = f"{CONFIDENCE:.0%} interval {interval_of(difference, '+.4f')}, {seeds_of(n)}"
    if not difference.excludes(0):
        return (
            f"{arm}: no difference from {base} was found ({difference.mean:+.4f}, {interval}); a true difference "
            f"of {difference.visible:.4f} would be detected with {POWER:.0%} power, a smaller one less often; {cost}."
        )
    return f"{arm}: its final loss is {size} {side} than {base}'s ({interval}){worth}; {cost}."


def seeds_of(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"
