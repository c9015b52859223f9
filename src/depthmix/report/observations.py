"""What the last recording of each seed of an arm says about each claim of the paper: one number per run.

Rows of a single source and the head's row are left out everywhere. n = L + 1 rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from depthmix.analysis.evidence import Line, numbers
from depthmix.report.dynamics import last_matrix, state_norms
from depthmix.report.packed import mean
from depthmix.report.reading import SavedRun

FEWEST_SOURCES = 4  # of a row that can skip: the embedding, the newest, and two to choose from
SKIP = 2.0  # a source is sought out if it has this many times its equal share


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One run at its end."""

    seed: int
    line: Line
    kinds: Sequence[str]
    counts: Sequence[int]  # of sources that each row reads
    M: np.ndarray | None = None
    weights: np.ndarray | None = None  # [n, C]
    reads: Sequence[Sequence[int]] = field(default_factory=list)
    partial: Sequence[bool] = field(default_factory=list)

    @property
    def inner_rows(self) -> list[int]:
        """Rows of sublayers that read at least two sources."""
        return [row for row in range(len(self.kinds)) if self.counts[row] > 1]

    def row(self, name: str) -> list[float]:
        return numbers(self.line.get(name), len(self.kinds) + 1)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The runs of one arm, one for each seed."""

    label: str
    mechanism: str
    depth: int
    dim: int | None
    observations: list[Observation]


def observe(run: SavedRun, seed: int, line: Mapping[str, Any] | None = None) -> Observation | None:
    """What a run shows at its end; `line` is its last recording, if known from elsewhere. None: nothing recorded."""
    line = line or next(iter(reversed(run.of_kind("depth"))), None)
    depth = run.depth or len(numbers((line or {}).get("output_norm")))
    if not line or not depth:
        return None
    snapshot = run.snapshots[-1] if run.snapshots else None
    weighted = snapshot is not None and snapshot.weights is not None
    if line.get("shares_of") == "weights" and not weighted:
        return None  # how many sources a row reads is not known
    reads = snapshot.reads if snapshot is not None and weighted else []
    return Observation(
        seed=seed,
        line=line,
        kinds=[("attn", "mlp")[i % 2] for i in range(depth)],
        counts=[len(row) for row in reads] or list(range(1, depth + 2)),
        M=last_matrix(run),
        weights=snapshot.weights if snapshot is not None else None,
        reads=reads,
        partial=snapshot.partial if snapshot is not None else [],
    )


def newest_share(o: Observation) -> tuple[float, float]:
    """The newest source's share, the mean over rows, and what equal weights would give it."""
    share = o.row("locality")
    return mean([share[row] for row in o.inner_rows]), mean([1 / o.counts[row] for row in o.inner_rows])


def embedding_share(o: Observation) -> tuple[float, float]:
    """The embedding's share, the mean over the upper half of the rows, and what equal weights would give it."""
    share, rows = o.row("embedding_share"), o.inner_rows[len(o.inner_rows) // 2 :]
    return mean([share[row] for row in rows]), mean([1 / o.counts[row] for row in rows])


def skipping_rows(o: Observation) -> float:
    """The share of rows that give some source, neither the embedding nor the newest, twice its equal share."""
    if o.weights is None:
        return math.nan
    found = []
    for row in o.inner_rows:
        if (count := o.counts[row]) >= FEWEST_SOURCES:
            total = np.abs(o.weights[row, list(o.reads[row])]).sum()
            between = np.abs(o.weights[row, [c for c in o.reads[row][:-1] if c != 0]])
            found.append(float(between.max(initial=0.0) >= SKIP * total / count))
    return mean(found)


def sharpness(o: Observation) -> list[float]:
    """Nats of each row from equal weights: 0 if all sources weigh the same."""
    entropy = o.row("weight_entropy")
    return [math.log(count) - value if count else math.nan for value, count in zip(entropy, o.counts, strict=True)]


def attention_minus_mlp(o: Observation, values: Sequence[float]) -> float:
    """Of each read before attention, minus the mean of its neighbours before MLPs; the mean over such reads.

    Neighbours, because what rows read drifts with depth, and rows before MLPs are on average one lower.
    """
    inner = set(o.inner_rows)
    differences = [
        values[row] - (values[row - 1] + values[row + 1]) / 2
        for row in inner
        if o.kinds[row] == "attn" and {row - 1, row + 1} <= inner and o.kinds[row - 1] == o.kinds[row + 1] == "mlp"
    ]
    return mean(differences)


def embedding_attention_minus_mlp(o: Observation) -> float:
    share = o.row("embedding_share")
    return attention_minus_mlp(o, [s - 1 / max(count, 1) for s, count in zip(share, o.counts, strict=True)])


def sharpness_mlp_minus_attention(o: Observation) -> float:
    return -attention_minus_mlp(o, sharpness(o))


def relative_sharpness(o: Observation, other: Observation) -> float:
    """How much sharper the rows of `o` are than those of `other`, each in shares of its own ln n; mean over rows."""
    pairs = []
    for row in sorted({*o.inner_rows} & {*other.inner_rows}):
        a, b = (sharpness(x)[row] / math.log(x.counts[row]) for x in (o, other))
        pairs.append(a - b)
    return mean(pairs)


def growth(o: Observation) -> float:
    """ln of the mean state norm of the last quarter of the sublayers over that of the first."""
    norms = [norm for norm in state_norms(o.line) if norm > 0]
    quarter = max(1, len(norms) // 4)
    return math.log(mean(norms[-quarter:]) / mean(norms[:quarter])) if len(norms) > 1 else math.nan


def falls_at_boundaries(o: Observation) -> float:
    """The share of block boundaries at which the running sum is smaller than that of the block before."""
    norms = state_norms(o.line)
    begins = [row for row in range(2, len(o.kinds)) if o.partial and not o.partial[row]]
    return mean([float(norms[row] < norms[row - 1]) for row in begins if row < len(norms)])


def gradient_slope(o: Observation) -> float:
    """|ln| of the mean gradient norm of the first quarter of the outputs over that of the last: 0 if they are equal."""
    norms = numbers(o.line.get("gradient_norm"))
    quarter = max(1, len(norms) // 4)
    first, last = mean(norms[:quarter]), mean(norms[-quarter:])
    return abs(math.log(first / last)) if first > 0 and last > 0 else math.nan


Measure = Callable[[Observation], float]
