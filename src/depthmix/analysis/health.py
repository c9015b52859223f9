"""Whether reading over depth is healthy: known failures, each with its figure, its meaning and what to do.

Pure functions over plain data (`Evidence`). A check of something that a mechanism does not have (queries, streams) is
left out; one whose figures were not recorded is "unknown". Thresholds are constants, with the reason beside each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from depthmix.analysis.evidence import Evidence, numbers

Level = Literal["good", "notice", "problem", "unknown"]

NOTHING_LEARNED = ("residual",)  # mechanisms without parameters: their rows are equal by design
UNIFORM = 0.01  # nats from equal weights: by Pinsker's inequality at most 0.07 of a row's weight lies elsewhere
STATIC = 0.01  # standard deviation over tokens of a row's shares: no token changes more than about 1 % of the row
SINK = 0.25  # share beyond the equal one: a quarter of all reading has moved to one source
SINK_OF_ALL = 0.9  # share of the embedding: all outputs together are left with a tenth
SINK_LATER = 0.6  # share of a later source: it is read more than all others together
FEWEST_READERS = 3  # rows: with fewer, a source is new, and that it is read then makes no sink
SPIKE, LARGE_SPIKE = 3.0, 10.0  # ‖v_1‖ over the median output: as large as 9 (100) unrelated ones together
DEAD = 0.05  # a query's norm over the median one: its logits differ by a twentieth of what others' do
ASLEEP = 1e-3  # median norm of queries: with normalised keys of norm √D, logits differ by at most 0.002 √D
COPIES, NEAR_COPIES = 0.02, 0.1  # distance between streams over their norm: 2 % (10 %) of each is its own
MOVED = 0.01  # largest change of a share over training: below it, reading is what the start gave
LOST_PART, SMALL_PART = 0.01, 0.05  # ‖v‖ / ‖state‖: about 10,000 (400) unrelated outputs would renew the state
RANGE = 1e-3  # of the dtype's largest number: norms are means, single values may be 1000 times larger
SPARE_BITS = 3  # of an output after its addition: with fewer, its rounding error exceeds an eighth of it
READ_SHARE = 0.05  # of a row's weight: a source that has it is meant to be read
BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}  # of the significand
LARGEST = {"float16": 65504.0, "bfloat16": 3.3e38, "float32": 3.4e38, "float64": 1.7e308}
NOT_RECORDED = "Train with run.depth_every above 0, or let `depthmix report` measure a trace."


@dataclass(frozen=True, kw_only=True)
class Health:
    """The outcome of one check."""

    name: str
    level: Level
    figure: str
    meaning: str
    remedy: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def check_health(evidence: Evidence) -> list[Health]:
    """Every check that applies, problems first."""
    found = [health for check in CHECKS for health in check(evidence)]
    order = ("problem", "notice", "unknown", "good")
    return sorted(found, key=lambda health: order.index(health.level))


def outcome(name: str, level: Level, figure: str, meanings: Mapping[str, str], remedy: str) -> Health:
    """`meanings` by level; without one for "notice", that of "problem"."""
    meaning = meanings.get(level) or meanings["problem"]
    return Health(name=name, level=level, figure=figure, meaning=meaning, remedy="" if level == "good" else remedy)


def unknown(name: str) -> Health:
    meaning = "This run has no figures for it."
    return Health(name=name, level="unknown", figure="not recorded", meaning=meaning, remedy=NOT_RECORDED)


def level_of(problem: bool, notice: bool) -> Level:
    return "problem" if problem else "notice" if notice else "good"


def check_uniform(evidence: Evidence) -> Iterator[Health]:
    """Weights that have stayed equal: the mechanism reads like the plain residual."""
    if evidence.mechanism in NOTHING_LEARNED:
        return
    distances = evidence.from_uniform()
    if not distances:
        yield unknown("uniform reading")
        return
    equal, middle = sum(d < UNIFORM for d in distances.values()), statistics.median(distances.values())
    yield outcome(
        "uniform reading",
        level_of(equal == len(distances), equal > len(distances) / 2),
        f"{equal} of {len(distances)} rows within {UNIFORM} nats of equal weights (median distance {middle:.3g} nats)",
        {
            "problem": "Every layer gives all layers below it the same weight, as at the start: nothing was learned "
            "about what to read.",
            "notice": "More than half of the layers still give all layers below them the same weight.",
            "good": "Layers have learned to read some of the layers below more than others.",
        },
        "Train longer, or raise the learning rate of queries and gates; check that they have no weight decay.",
    )


def check_sinks(evidence: Evidence) -> Iterator[Health]:
    """One source that takes far more than its equal share: the embedding, or a later one."""
    if evidence.mechanism in NOTHING_LEARNED:
        return
    shares = evidence.sinks()
    if not shares or not math.isfinite(shares[0]) or not evidence.readers(0):
        yield unknown("embedding as a sink")
        return
    yield embedding_sink(shares[0], evidence.equal_share(0))
    later = [
        (shares[i] - evidence.equal_share(i), i)
        for i in range(1, len(shares))
        if len(evidence.readers(i)) >= FEWEST_READERS and math.isfinite(shares[i])
    ]
    if later:
        excess, source = max(later)
        yield later_sink(evidence.name_of(source), shares[source], shares[source] - excess)


def embedding_sink(share: float, equal: float) -> Health:
    return outcome(
        "embedding as a sink",
        level_of(share >= SINK_OF_ALL, share - equal >= SINK),
        f"the embedding has {share:.2f} of all reading; equal weights would give it {equal:.2f}",
        {
            "problem": "Nearly all reading goes to the embedding: layers hardly use what other layers computed.",
            "notice": "The embedding takes much more than its equal share. Part of this may be wanted, since it is "
            "the token itself; part may be weight that is not needed elsewhere.",
            "good": "The embedding is read, and does not displace the layers' outputs.",
        },
        "Look at the ablation: if cutting the embedding hardly changes the loss, its weight is idle. Try several "
        "heads, or mixing='sigmoid', whose rows may weigh less than 1.",
    )


def later_sink(name: str, share: float, equal: float) -> Health:
    return outcome(
        "sink in a later source",
        level_of(share >= SINK_LATER, share - equal >= SINK),
        f"most above its equal share is {name}: {share:.2f} of the reading of the layers above it, where equal weights "
        f"would give {equal:.2f}",
        {
            "problem": f"The layers above read {name} more than all other sources together.",
            "notice": f"The layers above lean on {name} far more than on its neighbours.",
            "good": "No output is read far more than the others.",
        },
        f"Ablate {name}: if the loss hardly changes, its weight is idle. Compare its norm with the others', and try "
        "another seed or a lower learning rate.",
    )


def check_spike(evidence: Evidence) -> Iterator[Health]:
    """The largest output against the median, often the first: keys are normalised, values are not."""
    norms = evidence.magnitude("output_norm")
    known = [norm for norm in norms if math.isfinite(norm)]
    middle = statistics.median(known) if known else 0.0
    if len(known) < 3 or middle <= 0:
        yield unknown("spike of an output")
        return
    largest = max(range(len(norms)), key=lambda i: norms[i] if math.isfinite(norms[i]) else 0.0)
    ratio = norms[largest] / middle
    yield outcome(
        "spike of an output",
        level_of(ratio >= LARGE_SPIKE, ratio >= SPIKE),
        f"the largest, ‖v_{largest + 1}‖, is {ratio:.2g} times the median output ({norms[largest]:.3g} against "
        f"{middle:.3g})",
        {
            "problem": f"The output of sublayer {largest + 1} is so large that it dominates every sum it is part of.",
            "notice": f"The output of sublayer {largest + 1} stands out and may dominate what later layers read.",
            "good": "No output is far larger than the others.",
        },
        "Lower model.output_init or the learning rate, or use a longer warm-up; cut its routes to see what it does.",
    )


def check_queries(evidence: Evidence) -> Iterator[Health]:
    """Queries that have not left zero while others moved, and rows that weigh every token's sources alike."""
    norms = [norm for norm in numbers(evidence.last.get("query_norm")) if math.isfinite(norm)]
    if not norms:
        return
    middle = statistics.median(norms)
    dead = [k for k, norm in enumerate(norms) if norm < DEAD * middle]
    rows = [row for row in evidence.rows if evidence.count(row) > 1]
    where = [row_name(rows[k], len(evidence.rows)) for k in dead] if len(rows) == len(norms) else []
    spread, distances = evidence.row_values("spread"), evidence.from_uniform()
    still = [r for r in rows if r < len(spread) and spread[r] < STATIC and distances.get(r, 1.0) < UNIFORM]
    asleep = middle < ASLEEP
    listed = f" ({', '.join(where[:4])}{' …' if len(where) > 4 else ''})" if where else ""
    yield outcome(
        "dead queries",
        level_of(asleep or len(dead) > len(norms) / 4, bool(dead)),
        f"{len(dead)} of {len(norms)} queries below {DEAD:g} of the median norm, {middle:.3g}{listed}; {len(still)} "
        "rows give equal weights for every token",
        {
            "problem": "All queries are still at zero, where they started."
            if asleep
            else "Queries have stayed near zero while others moved: their layers average everything below them.",
            "good": "All queries have moved, so every layer can choose what it reads.",
        },
        "Check that queries are trained: no weight decay and no Muon (`depthmix.param_groups` sees to both), and a "
        "learning rate that is not too small. Train longer.",
    )


def row_name(row: int, rows: int) -> str:
    return "the head" if row == rows - 1 else f"sublayer {row + 1}"


def check_streams(evidence: Evidence) -> Iterator[Health]:
    """Several streams (mHC, Hyper-Connections) that carry the same, or matrices that stay where they started."""
    distances = [d for d in evidence.magnitude("stream_distance") if math.isfinite(d)]
    if not distances:
        return
    middle = statistics.median(distances)
    yield outcome(
        "collapsed streams",
        level_of(middle < COPIES, middle < NEAR_COPIES),
        f"the distance between streams is {middle:.3g} of their norm (median over depth; after the last write "
        f"{distances[-1]:.3g}; unrelated streams have 1.41)",
        {
            "problem": "All streams carry the same: the model is a plain residual that costs more.",
            "notice": "The streams are nearly copies of one another.",
            "good": "The streams carry different things.",
        },
        "Use a start whose streams differ (start='lite' or 'parted'), or train longer.",
    )
    moved, from_uniform = evidence.largest_change(), evidence.from_uniform()
    if moved is None or not from_uniform:
        yield unknown("matrices at their start")
        return
    plain = max(from_uniform.values()) < UNIFORM
    yield outcome(
        "matrices at their start",
        level_of(plain, moved < MOVED),
        f"shares of a row changed by at most {moved:.3g} from the first recording to the last; rows of M are at most "
        f"{max(from_uniform.values()):.3g} nats from constant ones",
        {
            "problem": "M is that of a plain residual: the matrices between streams act like the identity.",
            "notice": "Layers read what the start gave them: the matrices between streams have hardly moved.",
            "good": "The matrices between streams have left their start.",
        },
        "Raise the input scale (scale_init) or the learning rate of the gates, or train longer.",
    )


def check_dilution(evidence: Evidence) -> Iterator[Health]:
    """How much the last quarter of the sublayers still adds to what is there."""
    parts = evidence.magnitude("contribution")
    late = [part for part in parts[-max(1, len(parts) // 4) :] if math.isfinite(part)]
    if not late:
        yield unknown("dilution")
        return
    part = statistics.fmean(late)
    yield outcome(
        "dilution",
        level_of(part < LOST_PART, part < SMALL_PART),
        f"an output of the last quarter of the sublayers is {part:.2g} of the state that contains it",
        {
            "problem": "The state has grown so large that late sublayers hardly change it.",
            "notice": "Late sublayers change the state little.",
            "good": "Late sublayers still change the state.",
        },
        "Use fewer sublayers, or a mechanism that bounds the state (block_attnres, attnres).",
    )


def check_range(evidence: Evidence) -> Iterator[Health]:
    """Numbers that are not finite, or near the end of the dtype's range."""
    wrong, most = evidence.not_finite(), LARGEST.get(evidence.precision, LARGEST["float32"])
    norms = [n for name in ("state_norm", "output_norm", "read_norm") for n in evidence.magnitude(name)]
    largest = max((norm for norm in norms if math.isfinite(norm)), default=math.nan)
    if not wrong and math.isnan(largest):
        yield unknown("range of numbers")
        return
    end = f"the largest norm is {largest:.3g}, and {evidence.precision} ends at {most:.2g}"
    yield outcome(
        "range of numbers",
        level_of(bool(wrong) or largest > RANGE * most, False),
        f"not finite: {', '.join(wrong)}" if wrong else end,
        {
            "problem": "The model computes numbers that are not finite."
            if wrong
            else f"Single numbers may exceed the range of {evidence.precision}.",
            "good": "All magnitudes are finite and far from the end of the range.",
        },
        "Lower the learning rate, or train in float32.",
    )


def check_rounding(evidence: Evidence) -> Iterator[Health]:
    """Outputs, and sources with weight, that are too small beside what they are added to for the dtype's bits."""
    parts = [part for part in evidence.magnitude("contribution") if math.isfinite(part) and part > 0]
    if not parts:
        yield unknown("rounding")
        return
    bits = BITS.get(evidence.precision, 24)
    left, lost = bits + math.log2(min(1.0, *parts)), evidence.lost_sources(READ_SHARE, 2.0**-bits)
    words = f"; {lost} sources with at least {READ_SHARE:g} of a row's weight are below the row's rounding"
    yield outcome(
        "rounding",
        level_of(left < 0 or lost > 0, left < SPARE_BITS),
        f"{max(left, 0.0):.0f} of {bits} bits of the smallest output remain after its addition, in "
        f"{evidence.precision}{words if lost else ''}",
        {
            "problem": "Something that was computed, or is meant to be read, is lost to rounding in a sum.",
            "notice": "Few bits of the smallest output remain in the sum.",
            "good": "What is added is far above the rounding of the sums.",
        },
        "Keep the stream in float32, or use a mechanism that bounds the state.",
    )


CHECKS: tuple[Callable[[Evidence], Iterator[Health]], ...] = (
    *(check_uniform, check_sinks, check_spike, check_queries),
    *(check_streams, check_dilution, check_range, check_rounding),
)
