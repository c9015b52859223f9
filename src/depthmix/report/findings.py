"""The paper's observations (arXiv 2603.15031, section 6) held against recorded runs, one by one.

Every verdict is computed: a number for each seed, their mean and Student's interval, and a rule that the note states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from depthmix.analysis.statistics import CONFIDENCE, Estimate, estimate
from depthmix.report.dynamics import correlate, without_embedding
from depthmix.report.observations import (
    FEWEST_SOURCES,
    SKIP,
    Arm,
    Measure,
    Observation,
    embedding_attention_minus_mlp,
    embedding_share,
    falls_at_boundaries,
    gradient_slope,
    growth,
    newest_share,
    relative_sharpness,
    sharpness_mlp_minus_attention,
    skipping_rows,
)
from depthmix.report.packed import mean

Verdict = Literal["seen", "not seen", "unclear", "opposite"]
SHARE_MARGIN, NATS_MARGIN, LOG_MARGIN = 0.02, 0.02, 0.1  # where one seed decides: about the spread between seeds
SKIPPING = 0.1  # share of rows that must skip
ALIKE = 0.5  # correlation above which a pattern is kept: a quarter of its variance is then explained
NAMES = {"attnres": "Full AttnRes", "block_attnres": "Block AttnRes"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    claim: str
    verdict: Verdict
    figure: str
    note: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Seen if the interval lies above `threshold`, `below` if it lies under it, otherwise unclear.

    margin: with one seed there is no interval, and a value this close to the threshold is unclear.
    """

    threshold: float = 0.0
    below: Verdict = "opposite"
    margin: float

    def judge(self, found: Estimate) -> Verdict:
        if found.low is None or found.high is None:
            low, high = found.mean - self.margin, found.mean + self.margin
        else:
            low, high = found.low, found.high
        return "seen" if low > self.threshold else self.below if high < self.threshold else "unclear"

    def words(self, seeds: int) -> str:
        alone = f"value ± {self.margin:g} (one seed, no interval)"
        what = f"{CONFIDENCE:.0%} interval over seeds" if seeds > 1 else alone
        return f"Seen if the {what} lies above {self.threshold:g}, {self.below} if below it, else unclear."


def check_findings(arms: Sequence[Arm]) -> list[Finding] | None:
    """Every claim for which the needed arms are there; None if there are none."""
    arms = comparable(arms)
    by_name = {arm.mechanism: arm for arm in reversed(arms)}
    found: list[Finding] = []
    for name in ("attnres", "block_attnres"):
        if name in by_name:
            found += reading(by_name[name])
    if {"attnres", "block_attnres"} <= by_name.keys():
        found += block_against_full(by_name["block_attnres"], by_name["attnres"])
    if "residual" in by_name and "block_attnres" in by_name:
        found += magnitudes(by_name["block_attnres"], by_name["residual"])
    if "residual" in by_name:
        for name in ("attnres", "block_attnres"):
            if name in by_name:
                found += gradients(by_name[name], by_name["residual"])
    return found or None


def comparable(arms: Sequence[Arm]) -> list[Arm]:
    """The arms of one size: that with the most mechanisms, the first of those."""
    arms = [arm for arm in arms if arm.observations and arm.mechanism in ("residual", *NAMES)]
    sizes = list(dict.fromkeys((arm.depth, arm.dim) for arm in arms))
    chosen = max(sizes, key=lambda size: len({a.mechanism for a in arms if (a.depth, a.dim) == size}), default=None)
    return [arm for arm in arms if (arm.depth, arm.dim) == chosen]


def reading(arm: Arm) -> Iterator[Finding]:
    """What one form of Attention Residuals reads."""
    who = name_of(arm)
    rule = Rule(below="not seen", margin=SHARE_MARGIN)
    yield from single(
        arm,
        f"{who}: the newest source stands out (diagonal dominance)",
        lambda o: beyond(newest_share(o)),
        rule,
        lambda e: f"its share is {shares_of(arm, newest_share)}: {interval(e, '+.3f')}",
        "Share of the newest source minus 1/n for a row of n sources, mean over rows.",
    )
    skips = Rule(threshold=SKIPPING, below="not seen", margin=SHARE_MARGIN)
    yield from single(
        arm,
        f"{who}: some layers skip to a distant source",
        skipping_rows,
        skips,
        lambda e: f"{interval(e, '.2f')} of the rows do",
        f"Rows of at least {FEWEST_SOURCES} sources in which one, neither the embedding nor the newest, has {SKIP:g} "
        "times its equal share in the mean over tokens.",
    )
    yield from single(
        arm,
        f"{who}: the embedding stays a source throughout",
        lambda o: beyond(embedding_share(o)),
        rule,
        lambda e: f"in the upper half its share is {shares_of(arm, embedding_share)}: {interval(e, '+.3f')}",
        "Share of the embedding minus 1/n, mean over the upper half of the rows.",
    )
    yield from single(
        arm,
        f"{who}: more of the embedding before attention than before MLPs",
        embedding_attention_minus_mlp,
        Rule(margin=SHARE_MARGIN),
        lambda e: f"difference of its share {interval(e, '+.3f')}",
        "Each read before attention against the mean of its two neighbours before MLPs, shares beyond the equal one.",
    )
    yield from single(
        arm,
        f"{who}: sharper reads before MLPs than before attention",
        sharpness_mlp_minus_attention,
        Rule(margin=NATS_MARGIN),
        lambda e: f"{interval(e, '+.3f')} nats further from equal weights",
        "ln n minus the entropy of a row of n sources; reads before attention against the mean of their two neighbours "
        "before MLPs.",
    )


def beyond(share_and_equal: tuple[float, float]) -> float:
    return share_and_equal[0] - share_and_equal[1]


def shares_of(arm: Arm, measure: Callable[[Observation], tuple[float, float]]) -> str:
    share, equal = (mean(column) for column in zip(*map(measure, arm.observations), strict=True))
    return f"{share:.3f} where equal weights give {equal:.3f}"


def block_against_full(block: Arm, full: Arm) -> Iterator[Finding]:
    """Whether blocks keep what single outputs learn."""
    matrices = [(a.M, b.M) for a, b in pairs(block, full)]
    values = [correlate(a, b)[0] for a, b in matrices if a is not None and b is not None]
    outputs = [
        correlate(without_embedding(a), without_embedding(b))[0] for a, b in matrices if a is not None and b is not None
    ]
    rule = Rule(threshold=ALIKE, below="not seen", margin=LOG_MARGIN)
    finding = judged(
        "Block AttnRes keeps the pattern of Full AttnRes",
        values,
        rule,
        lambda e: f"correlation of M {interval(e, '.2f')}{beside(outputs, full)}",
        "Pearson's correlation of the shares of M's rows beyond the equal ones, all rows of at least three sources "
        "together, runs with the same seed paired. A block spreads one weight over its outputs.",
    )
    if finding is not None:
        yield finding
    finding = judged(
        "Block AttnRes reads more sharply than Full AttnRes",
        [relative_sharpness(a, b) for a, b in pairs(block, full)],
        Rule(margin=SHARE_MARGIN),
        lambda e: f"difference {interval(e, '+.3f')}",
        "1 − entropy / ln n of a row of n sources, so that blocks and outputs can be compared; mean over rows.",
    )
    if finding is not None:
        yield finding


def beside(outputs: Sequence[float], full: Arm) -> str:
    """What the correlation is to be compared with: without the embedding, and of Full with itself over seeds."""
    own = mean(outputs)
    words = [] if math.isnan(own) else [f"{own:.2f} among outputs alone"]
    matrices = [o.M for o in full.observations if o.M is not None]
    again = [correlate(a, b)[0] for i, a in enumerate(matrices) for b in matrices[:i]]
    if not math.isnan(mean(again)):
        words.append(f"two seeds of Full have {mean(again):.2f}")
    return f"; {', '.join(words)}" if words else ""


def magnitudes(block: Arm, base: Arm) -> Iterator[Finding]:
    """The state over depth: growing in the plain residual, bounded and periodic with blocks."""
    yield from single(
        base,
        "The plain residual's stream grows with depth",
        growth,
        Rule(margin=LOG_MARGIN),
        lambda e: f"last quarter over first quarter {interval(e.mapped(math.exp), '.2f')}",
        "Mean norm of the state in the last quarter of the sublayers over that in the first; the rule is for its "
        "logarithm.",
    )
    falls = [share for o in block.observations if math.isfinite(share := falls_at_boundaries(o))]
    down = estimate(falls) if falls else None
    finding = judged(
        "Block AttnRes bounds the state, which starts again with each block",
        [growth(b) - growth(a) for a, b in pairs(block, base)],
        Rule(margin=LOG_MARGIN),
        lambda e: (
            f"the residual grows {interval(e.mapped(math.exp), '.2f')} times as much"
            + ("" if down is None else f"; the running sum falls at {interval(down, '.2f')} of the boundaries")
        ),
        "Mean state norm of the last quarter of the sublayers over that of the first, in logarithms, paired by seed; "
        "seen only if the running sum also falls at more than half of the boundaries, by the same rule.",
    )
    if finding is not None:
        periodic = down is not None and Rule(threshold=0.5, margin=SHARE_MARGIN).judge(down) == "seen"
        verdict = finding.verdict if finding.verdict != "seen" or periodic else "unclear"
        yield Finding(claim=finding.claim, verdict=verdict, figure=finding.figure, note=finding.note)


def gradients(arm: Arm, base: Arm) -> Iterator[Finding]:
    finding = judged(
        f"{name_of(arm)}: gradients are flatter over depth than the residual's",
        [gradient_slope(b) - gradient_slope(a) for a, b in pairs(arm, base)],
        Rule(margin=LOG_MARGIN),
        lambda e: f"the residual's first and last quarters differ {interval(e.mapped(math.exp), '.2f')} times as much",
        "Mean norm of the gradients of the first quarter of the outputs over that of the last, |ln|, paired by seed.",
    )
    if finding is not None:
        yield finding


def single(
    arm: Arm, claim: str, measure: Measure, rule: Rule, figure: Callable[[Estimate], str], how: str
) -> Iterator[Finding]:
    finding = judged(claim, [measure(o) for o in arm.observations], rule, figure, how)
    if finding is not None:
        yield finding


def judged(
    claim: str, values: Sequence[float], rule: Rule, figure: Callable[[Estimate], str], how: str
) -> Finding | None:
    """None where no run has the numbers."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return None
    found = estimate(known)
    words = f"{figure(found)}, {seeds_of(len(known))}"
    return Finding(claim=claim, verdict=rule.judge(found), figure=words, note=f"{how} {rule.words(len(known))}")


def pairs(first: Arm, second: Arm) -> list[tuple[Observation, Observation]]:
    """Runs with equal seeds."""
    others = {o.seed: o for o in second.observations}
    return [(o, others[o.seed]) for o in first.observations if o.seed in others]


def interval(e: Estimate, form: str) -> str:
    ends = "" if e.low is None or e.high is None else f" ({e.low:{form}} to {e.high:{form}})"
    return f"{e.mean:{form}}{ends}"


def seeds_of(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def name_of(arm: Arm) -> str:
    return NAMES[arm.mechanism]
