"""The page of results, in Markdown, from a saved run: generated, not typed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthmix.bench.read import READ, READ_KEPT
from depthmix.bench.report import Report, Row
from depthmix.bench.timing import MARGIN

SECTIONS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "read",
        "One read",
        (
            (READ, "In an ordinary process:"),
            (READ_KEPT, "In a process that keeps freed memory (`ops.keep_freed_memory`), for all alike:"),
        ),
    ),
    (
        "step",
        "A training step",
        (
            ("step", "Forward and backward without an optimiser, over the plain residual's time:"),
            ("forward", "Forward alone:"),
            ("compiled step", "Forward and backward under `torch.compile`:"),
            ("compiled forward", "Forward alone under `torch.compile`:"),
        ),
    ),
    (
        "decoder",
        "The decoder",
        (
            ("decode", "One new token for each sequence, over the plain residual's time:"),
            ("compiled decode", "The same under `torch.compile`:"),
            ("value step", "A training step with values mixed over depth inside attention, over one without:"),
            ("loop", "A step of `depthmix train`, over forward, backward and optimiser alone:"),
        ),
    ),
    (
        "memory",
        "Memory",
        (
            ("kept", "What the graph of one forward keeps for the backward pass, beyond the plain residual's:"),
            ("peak", "Peak of the resident memory during one training step, beyond what was resident before it:"),
            ("peak over the residual's", "The same, over the residual's:"),
        ),
    ),
    (
        "growth",
        "Growth",
        (
            ("sources", "Time of a read, forward and backward, for each source, over that with the fewest sources:"),
            ("depth", "A training step over the plain residual's, by depth (sublayers):"),
            ("width", "A training step over the plain residual's, by width D:"),
        ),
    ),
)


def render(report: Report, figures: Mapping[str, Path], beside: Path) -> str:
    """`figures` by section; links to them are relative to `beside`, the folder of the page."""
    lines = ["# Results: speed", "", *introduction(report)]
    for name, title, parts in SECTIONS:
        tables = [table_of(report.of(part), words) for part, words in parts if report.of(part)]
        if not tables:
            continue
        lines += ["", f"## {title}", *filter(None, [size_of(report, name)])]
        if name in figures:
            link = Path(os.path.relpath(figures[name], beside)).as_posix()
            lines += ["", f"![{title}: the figures of the tables below]({link})"]
        for table in tables:
            lines += ["", *table]
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def introduction(report: Report) -> list[str]:
    return [
        f"    {report.command}",
        "",
        f'{report.machine}; reads of attnres and block_attnres by the backend "{report.reads}". Paired rounds, '
        "variants in rotating order. Of several processes a figure is the median of their medians, and its interval "
        "goes from the smallest of these to the largest; of one process it is the median with its 95 % confidence "
        "interval, and the spread between processes, which is larger, is not in it. Where it straddles a bound, or the "
        f'residual differs from itself by more than {MARGIN}, the verdict is "undecided". Processes in '
        "which steps are timed keep freed memory (`ops.keep_freed_memory`), for all variants alike; a read is timed in "
        "an ordinary process and in such a one. This page is generated from the saved results.",
        *(["", "**Quick sizes: this shows that the benchmark runs, and nothing of speed.**"] if report.quick else []),
    ]


def size_of(report: Report, section: str) -> str:
    sizes: Mapping[str, Any] = report.sizes
    if section == "read":
        read = sizes["read"]
        shape = f"{read['sources']} sources, {read['tokens']} tokens, D = {read['dim']}"
        return f"\n{shape}. A pass is the time to read every source once."
    if section in ("step", "memory"):
        step = sizes["step"]
        return (
            f"\n{step['depth']} sublayers (attention and SwiGLU in turn), D = {step['dim']}, hidden {step['hidden']}, "
            f"{step['tokens']} tokens."
        )
    if section == "decoder":
        decode, values = sizes["decode"], sizes["values"]
        model = decode["model"]
        return (
            f"\n{2 * model['layers']} sublayers, D = {model['dim']}. Decoding: batch {decode['batch']}, a cache of "
            f"{decode['capacity']} columns, three quarters full, a head of {model['vocab_size']:,} tokens. Training: "
            f"{values['tokens']} tokens, a head of {values['model']['vocab_size']}."
        )
    sources, depth, width = sizes["sources"], sizes["depth"][0], sizes["width"][0]
    return (
        f"\nReads: {sources['tokens']} tokens, D = {sources['dim']}. Depth: D = {depth['dim']}, {depth['tokens']} "
        f"tokens. Width: {width['depth']} sublayers, {width['tokens']} tokens."
    )


def table_of(rows: Sequence[Row], words: str) -> list[str]:
    """Only columns that have something to say."""
    cells = {
        "what": [name_of(row) for row in rows],
        "figure": [figure_text(row) for row in rows],
        "interval": [interval_text(row) for row in rows],
        "processes × rounds": [f"{len(row.samples)} × {len(row.samples[0])}" if row.samples else "" for row in rows],
        "aim: at most": ["" if row.bound is None else f"{row.bound:,g}" for row in rows],
        "verdict": [row.verdict for row in rows],
        "note": [row.note for row in rows],
    }
    shown = [heading for heading, column in cells.items() if any(column)]
    table = [f"| {' | '.join(shown)} |", "|" + "---|" * len(shown)]
    table += [f"| {' | '.join(line)} |" for line in zip(*(cells[heading] for heading in shown), strict=True)]
    return [words, "", *table] if words else table


def name_of(row: Row) -> str:
    return row.what if row.at is None or str(row.at) in row.what else f"{row.what}, {row.part} {row.at}"


def figure_text(row: Row) -> str:
    if row.figure is None:
        return "not available"
    return f"{number(row.figure, row.unit)} {row.unit}"


def interval_text(row: Row) -> str:
    if row.low is None or row.high is None:
        return ""
    return f"{number(row.low, row.unit)} – {number(row.high, row.unit)}"


def number(value: float, unit: str) -> str:
    return f"{value:,.0f}" if unit in ("bytes/token", "MB") else f"{value:.3f}" if value < 10 else f"{value:.1f}"
