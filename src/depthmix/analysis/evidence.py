"""What is known of a run's reading over depth, as plain data that files hold; `health` judges it.

n = L + 1 rows; row r belongs to sublayer r + 1, the last to the head. Source i is v_i, or a column that the mechanism
names; the embedding is source 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]
LINE_NAMES = {"entropy": "weight_entropy", "spread": "weight_spread"}  # names of a trace's rows in a line


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything but the mechanism may be absent.

    lines: of kind "depth", oldest first.
    trace: the content of trace.json.
    reads: columns of the weights that each row reads; None: shares are those of M, row r reads 0 … r.
    names: of these columns.
    M, contribution: [n][n], means over tokens of the weights and of the norms of what each source adds.
    precision: the dtype that the model ran in.
    """

    mechanism: str
    lines: Sequence[Line] = ()
    trace: Mapping[str, Any] | None = None
    reads: Sequence[Sequence[int]] | None = None
    names: Sequence[str] = ()
    M: Sequence[Sequence[float]] | None = None
    contribution: Sequence[Sequence[float]] | None = None
    precision: str = "float32"

    @property
    def last(self) -> Line:
        return self.lines[-1] if self.lines else {}

    def traced(self, part: str, name: str) -> Any:
        """A figure of the trace, from its `rows` or `magnitudes`."""
        figures = (self.trace or {}).get(part)
        return figures.get(name) if isinstance(figures, Mapping) else None

    def row_values(self, name: str) -> list[float]:
        """A figure of each row, from the trace or else from the last line; NaN where a row weighs nothing."""
        traced = numbers(self.traced("rows", name))
        return traced if any(map(math.isfinite, traced)) else numbers(self.last.get(LINE_NAMES.get(name, name)))

    def magnitude(self, name: str) -> list[float]:
        """A magnitude over depth, from the trace or else from the last line; root mean square of several streams."""
        given = self.traced("magnitudes", name)
        given = given if isinstance(given, (list, tuple)) else self.last.get(name)
        if not isinstance(given, (list, tuple)):
            return []
        return [root_mean_square(numbers(v)) if isinstance(v, (list, tuple)) else number(v) for v in given]

    def sinks(self) -> list[float]:
        """The mean share of each source in the rows that can read it."""
        traced = numbers((self.trace or {}).get("sinks"))
        return traced if any(map(math.isfinite, traced)) else numbers(self.last.get("sinks"))

    @property
    def rows(self) -> range:
        return range(len(self.row_values("entropy")))

    def count(self, row: int) -> int:
        """The number of sources that a row reads."""
        if self.reads is not None:
            return len(self.reads[row]) if row < len(self.reads) else 0
        return row + 1

    def from_uniform(self) -> dict[int, float]:
        """Nats of each row from equal weights, ln n − entropy, of rows with at least two sources."""
        entropy = self.row_values("entropy")
        return {
            row: math.log(self.count(row)) - entropy[row]
            for row in self.rows
            if self.count(row) > 1 and math.isfinite(entropy[row])
        }

    def readers(self, source: int) -> list[int]:
        """The rows that can read a source."""
        if self.reads is None:
            return [row for row in self.rows if source <= row]
        return [row for row in self.rows if row < len(self.reads) and source in self.reads[row]]

    def equal_share(self, source: int) -> float:
        """The mean share that a source would have if every row weighted its sources equally."""
        readers = self.readers(source)
        return statistics.fmean(1 / self.count(row) for row in readers) if readers else 0.0

    def name_of(self, source: int) -> str:
        if source < len(self.names):
            return self.names[source]
        return "embedding" if source == 0 else f"output {source}"

    def largest_change(self) -> float | None:
        """Of the embedding's and the newest source's share, over all rows, from the first recording to the last."""
        if len(self.lines) < 2:
            return None
        changes = [
            abs(b - a)
            for name in ("embedding_share", "locality")
            for a, b in zip(numbers(self.lines[0].get(name)), numbers(self.last.get(name)), strict=False)
            if math.isfinite(a) and math.isfinite(b)
        ]
        return max(changes, default=None)

    def lost_sources(self, share: float, rounding: float) -> int:
        """Entries with at least `share` of a row's weight that add less than `rounding` of the row's largest part."""
        count = 0
        for weights, parts in zip(self.M or (), self.contribution or (), strict=False):
            total, largest = sum(map(abs, weights)), max(map(abs, parts), default=0.0)
            if total > 0 and largest > 0:
                read = [part for w, part in zip(weights, parts, strict=False) if abs(w) >= share * total]
                count += sum(abs(part) < largest * rounding for part in read)
        return count

    def not_finite(self) -> list[str]:
        """Names of what holds a number that is not finite; training writes those as text."""
        names = [name.replace("_", " ") for name, value in self.last.items() if any(bad_numbers(value))]
        return names + (["the trace"] if (self.trace or {}).get("finite") is False else [])


def bad_numbers(value: Any) -> Iterator[bool]:
    """True for each number inside nested lists that is not finite, in either spelling."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from bad_numbers(each)
    elif isinstance(value, str):
        yield value in ("nan", "inf", "-inf")
    elif isinstance(value, float):
        yield not math.isfinite(value)


def number(value: Any) -> float:
    """A float, or NaN for anything else: a file may hold null, text, or a whole number too large for a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def numbers(values: Any, length: int | None = None) -> list[float]:
    """The numbers of a list, NaN where there is none; with `length` exactly so many."""
    found = [number(value) for value in values] if isinstance(values, (list, tuple)) else []
    return found if length is None else (found + [math.nan] * length)[:length]


def root_mean_square(values: Sequence[float]) -> float:
    """Of the finite ones; NaN where there are none."""
    known = [value for value in values if math.isfinite(value)]
    return math.sqrt(math.fsum(v * v for v in known) / len(known)) if known else math.nan
