"""The shape of a result: rows that the table, the JSON file, the figures and the page share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from depthmix.bench.timing import FEWEST, Ratio, Samples, pool
from depthmix.support.checks import check_option
from depthmix.support.files import write_text

BASELINE, CONTROL, SOURCES, KEPT = "residual", "residual again", "sources", "kept"
RUNS = "runs"  # the verdict on everything that depends on time, or on the allocator, at quick sizes
MODEL = {"layers": int, "dim": int, "vocab_size": int}
SIZES = {  # what pages and figures read of a report's sizes
    "read": {"sources": int, "tokens": int, "dim": int},
    "step": {"depth": int, "dim": int, "hidden": int, "tokens": int},
    "decode": {"model": MODEL, "batch": int, "capacity": int},
    "values": {"model": MODEL, "tokens": int},
    "sources": {"tokens": int, "dim": int},
    "depth": [{"dim": int, "tokens": int}],
    "width": [{"depth": int, "tokens": int}],
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. `at` is the number of sources, the depth or the width where the part is about growth."""

    part: str
    what: str
    figure: float | None  # None: not measured; at quick sizes, or because of what the note says
    unit: str
    low: float | None = None
    high: float | None = None
    bound: float | None = None
    verdict: str = ""
    at: int | None = None
    note: str = ""
    samples: list[list[float]] = field(default_factory=list)  # paired ratios, one list per process

    def ratio(self) -> Ratio | None:
        """The figure with its interval; None where it has none."""
        if self.figure is None or self.low is None or self.high is None:
            return None
        return Ratio(self.figure, self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Report:
    machine: str
    reads: str  # which kernel serves attnres and block_attnres
    command: str
    rounds: int
    processes: int
    quick: bool
    sizes: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def of(self, *parts: str) -> list[Row]:
        return [row for row in self.rows if row.part in parts]

    def to_json(self) -> str:
        """One line per row: otherwise each sample would have a line of its own."""
        head = {name.name: getattr(self, name.name) for name in fields(self) if name.name != "rows"}
        lines = [json.dumps(asdict(row), ensure_ascii=False) for row in self.rows]
        text = json.dumps(head, ensure_ascii=False, indent=2)[:-2]
        return text + ',\n  "rows": [\n    ' + ",\n    ".join(lines) + "\n  ]\n}"

    @classmethod
    def from_json(cls, text: str, origin: str = "the report") -> Report:
        try:
            values = json.loads(text)
            check_shape("report", values, cls)
            check_shape("sizes", values["sizes"], SIZES)
            for i, row in enumerate(values["rows"]):
                check_shape(f"rows[{i}]", row, Row)
            return cls(**{**values, "rows": [Row(**row) for row in values["rows"]]})
        except (ValueError, RecursionError) as error:
            hint = "expected a file written by: depthmix bench --output FILE"
            raise ValueError(f"{origin} is not a result of this version of the benchmark ({error}); {hint}") from None

    @classmethod
    def joined(cls, reports: Sequence[Report]) -> Report:
        """Several runs on one machine as one report; of rows that several of them have, the first is kept.

        Verdicts are computed again, since files of earlier versions may hold others.
        """
        first = reports[0]
        if quick := {report.quick for report in reports} - {first.quick}:
            raise ValueError(f"quick={quick} and quick={first.quick}; expected only full sizes, or only quick ones")
        rows = {(row.part, row.what, row.at): row for report in reversed(reports) for row in report.rows}
        order = dict.fromkeys((row.part, row.what, row.at) for report in reports for row in report.rows)
        return replace(
            first,
            machine="; ".join(dict.fromkeys(report.machine for report in reports)),
            command="\n    ".join(report.command for report in reports),
            notes=list(dict.fromkeys(note for report in reports for note in report.notes)),
            rows=final_rows([rows[key] for key in order], first.quick),
        )

    def save(self, path: Path) -> None:
        write_text(path, self.to_json() + "\n")


def check_shape(name: str, value: object, shape: Any) -> None:
    """Check JSON against a shape: a dataclass, an object by its fields, a list of one shape, or an annotation."""
    if isinstance(shape, dict) or is_dataclass(shape):
        known = shape if isinstance(shape, dict) else get_type_hints(shape)
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {value!r:.40}; expected an object with {', '.join(known)}")
        if missing := sorted(set(known) - set(value)):
            raise ValueError(f"{name} lacks {', '.join(missing)}")
        if is_dataclass(shape) and (extra := sorted(set(value) - set(known))):
            raise ValueError(f"{name} has unknown fields {', '.join(extra)}; expected {', '.join(known)}")
        for key, inner in known.items():
            check_shape(f"{name}.{key}", value[key], inner)
    elif isinstance(shape, list):
        if not isinstance(value, list) or not value:
            raise ValueError(f"{name} is {value!r:.40}; expected a list")
        for i, each in enumerate(value):
            check_shape(f"{name}[{i}]", each, shape[0])
    else:
        check_option(name, value, shape)


def ratio_rows(
    part: str,
    samples: Mapping[str, Samples],
    *,
    unit: str = "×",
    bounds: Mapping[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
    at: int | None = None,
) -> list[Row]:
    """Rows of a timed part, with their verdicts."""
    rows = []
    for what, of_each_process in samples.items():
        ratio = pool(of_each_process)
        rows.append(
            Row(
                part=part,
                what=what,
                figure=ratio.median,
                low=ratio.low,
                high=ratio.high,
                unit=unit,
                bound=(bounds or {}).get(what),
                at=at,
                note=(notes or {}).get(what, ""),
                samples=[[round(value, 4) for value in each] for each in of_each_process],
            )
        )
    return with_verdicts(rows)


def final_rows(rows: Sequence[Row], quick: bool) -> list[Row]:
    """Rows with their verdicts. Quick sizes show that each part runs: only the bytes kept mean anything there."""
    if not quick:
        return with_verdicts(rows)
    return [
        row
        if row.part == KEPT
        else replace(row, figure=None, low=None, high=None, bound=None, verdict=RUNS, samples=[])
        for row in rows
    ]


def with_verdicts(rows: Sequence[Row]) -> list[Row]:
    """Timed rows against their bounds; a row without an interval keeps the verdict that it has."""
    verdicts = [
        row.verdict if row.bound is None or (ratio := row.ratio()) is None else verdict(row, ratio, row.bound, rows)
        for row in rows
    ]
    return [replace(row, verdict=words) for row, words in zip(rows, verdicts, strict=True)]


def verdict(row: Row, ratio: Ratio, bound: float, rows: Sequence[Row]) -> str:
    """Holds or fails where the bound is farther from the interval than the control is from 1.

    Otherwise undecided, with the control's interval: a difference as large as that between two timings of the same work
    is not an effect.
    """
    if len(row.samples) == 1 and len(row.samples[0]) < FEWEST:
        return "undecided (too few rounds)"
    control = control_of(row, rows)
    if control is None:
        return ratio.verdict(bound)
    words = ratio.verdict(bound, drift=abs(control.median - 1))
    return f"undecided (control {control.low:.3f} – {control.high:.3f})" if words == "undecided" else words


def control_of(row: Row, rows: Sequence[Row]) -> Ratio | None:
    """The baseline, timed a second time, over itself; for growth with sources, the row with the fewest."""
    part = [each for each in rows if each.part == row.part]
    if row.part == SOURCES:
        control = min(part, key=lambda each: each.at or 0)
        control = row if control.low == control.high else control  # an earlier version's: the baseline itself
    else:
        control = next((each for each in part if each.what == CONTROL and each.at == row.at), row)
    return None if control is row else control.ratio()
