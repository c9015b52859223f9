"""The page of results, in Markdown, from a saved run: generated, not typed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthmix.bench.mixing import MIXING, MIXING_CPU, MIXING_CPU_MS, MIXING_MS, REAL
from depthmix.bench.pipeline import MICROBATCHES, PIPELINE, PIPELINE_MIXING, RANKS, STAGES, TRANSPORT
from depthmix.bench.read import READ, READ_KEPT
from depthmix.bench.report import BASELINE, KEPT, RUNS, SOURCES, Report, Row
from depthmix.bench.wrapped import DECODE, FORWARD, FORWARD_MIXING, STEP, STEP_MIXING

SECTIONS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "read",
        "One read",
        (
            (READ, "In an ordinary process:"),
            (READ_KEPT, "In a process that keeps freed memory (`ops.keep_freed_memory`), for all readers:"),
        ),
    ),
    (
        "mixing",
        "The time of mixing",
        ((MIXING, "1 + (mechanism − residual) / real step of the residual, without the time of the sublayers:"),),
    ),
    (
        "step",
        "A training step",
        (
            ("step", "Forward and backward without an optimiser, relative to the plain residual:"),
            ("forward", "Forward alone:"),
            ("compiled step", "Forward and backward under `torch.compile`:"),
            ("compiled forward", "Forward alone under `torch.compile`:"),
        ),
    ),
    (
        "decoder",
        "The decoder",
        (
            ("decode", "One new token for each sequence, relative to the plain residual:"),
            ("compiled decode", "The same under `torch.compile`:"),
            ("value step", "A training step with values mixed over depth inside attention, relative to one without:"),
            ("loop", "A step of `depthmix train`, relative to forward, backward and optimiser alone:"),
        ),
    ),
    (
        "pipeline",
        "A pipeline",
        (
            (PIPELINE, "A training step, relative to the plain residual in the same pipeline:"),
            (PIPELINE_MIXING, "By the time of mixing and transport, 1 + (mechanism − residual) / real step:"),
            (TRANSPORT, "The step with the cache, relative to the step without it:"),
        ),
    ),
    (
        "hf",
        "A wrapped model of transformers",
        (
            (STEP_MIXING, "A training step by the time of mixing alone, 1 + (wrapped − plain) / real step:"),
            (STEP, "The whole step, relative to the plain model's:"),
            (FORWARD_MIXING, "A forward pass without gradients, by the time of mixing alone:"),
            (FORWARD, "The whole pass:"),
            (DECODE, "One new token for one sequence:"),
        ),
    ),
    (
        "memory",
        "Memory",
        (
            (KEPT, "Memory that the graph of one forward keeps for the backward pass, beyond the plain residual's:"),
            ("peak", "Peak of the resident memory during one training step, beyond what was resident before it:"),
            ("peak over the residual's", "The same, relative to the residual:"),
        ),
    ),
    (
        "growth",
        "Growth",
        (
            (SOURCES, "Time of a read per source, forward and backward, relative to the fewest sources:"),
            ("depth", "A training step relative to the plain residual's, by depth (sublayers):"),
            ("width", "A training step relative to the plain residual's, by width D:"),
        ),
    ),
)

WHAT_MIXING_MEASURES = (
    "The stack runs forward and backward at its real size, with sublayers that compute nothing: each returns a fresh "
    "copy of a stored tensor as its output and another as the gradient of its input, and keeps its input for the "
    "backward pass as a PreNorm does, so that reads, writes and their gradients work on as many distinct tensors as in "
    "training. Each of them also reads the weights of the real sublayer once in each direction, so that sources "
    "leave the processor's caches between two reads as they do in a network; the cost of this and of the copies is the "
    "same for the residual and cancels in the difference. Not included are changes that a mechanism causes in the time "
    "of the sublayers themselves, which the column of the whole step contains with all its noise, and what a compiler "
    "would fuse with the sublayers."
)


QUICK_NOTE = (
    "Quick sizes show that each part runs. Times and peak memory mean nothing at these sizes and are not shown; run "
    "without --quick to measure them."
)


def render(report: Report, figures: Mapping[str, Path], beside: Path) -> str:
    """`figures` by section; links to them are relative to `beside`, the folder of the page."""
    lines = ["# Results: speed", "", *introduction(report)]
    for name, title, parts in SECTIONS:
        tables = [
            table_of(report.of(part), words, mixing_columns(report) if part == MIXING else {})
            for part, words in parts
            if report.of(part)
        ]
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
        f'{report.machine}; reads of attnres and block_attnres by the backend "{report.reads}". Rounds are paired, '
        "with variants in rotating order. With several processes, a figure is the median of their medians, and its "
        "interval goes from the smallest of these to the largest; with one process, it is the median with its 95 % "
        "confidence interval, which does not include the larger spread between processes. A bound holds or fails where "
        "it is farther from the interval than the control (the residual, timed a second time) is from 1; otherwise the "
        'verdict is "undecided", with the interval of the control. Processes in which steps are timed keep freed '
        "memory (`ops.keep_freed_memory`), for all variants; a read is timed both with and without that. This page is "
        "generated from the saved results.",
        *(["", f"**{QUICK_NOTE}**"] if report.quick else []),
    ]


def size_of(report: Report, section: str) -> str:
    sizes: Mapping[str, Any] = report.sizes
    if section == "read":
        read = sizes["read"]
        shape = f"{read['sources']} sources, {read['tokens']} tokens, D = {read['dim']}"
        return f"\n{shape}. One pass is the time to read every source once."
    if section in ("mixing", "step", "memory"):
        step = sizes["step"]
        shape = (
            f"\n{step['depth']} sublayers (attention and SwiGLU in turn), D = {step['dim']}, hidden {step['hidden']}, "
            f"{step['tokens']} tokens."
        )
        return f"{shape} {residual_times(report)}\n\n{WHAT_MIXING_MEASURES}" if section == "mixing" else shape
    if section == "decoder":
        decode, values = sizes["decode"], sizes["values"]
        model = decode["model"]
        return (
            f"\n{2 * model['layers']} sublayers, D = {model['dim']}. Decoding: batch {decode['batch']}, a cache of "
            f"{decode['capacity']} columns, three quarters full, a head of {model['vocab_size']:,} tokens. Training: "
            f"{values['tokens']} tokens, a head of {values['model']['vocab_size']}."
        )
    if section == "pipeline":
        size = sizes["pipeline"]
        return (
            f"\n{RANKS} processes of one thread with {STAGES} stages each, interleaved 1F1B, {MICROBATCHES} "
            f"micro-batches of {size['tokens']} tokens; {size['depth']} sublayers, D = {size['dim']}, hidden "
            f"{size['hidden']}."
        )
    if section == "hf":
        fields = sizes["hf"]["fields"]
        return (
            f"\nQwen3 of {fields['num_hidden_layers']} layers, D = {fields['hidden_size']}, "
            f"{fields['vocab_size']:,} tokens in its vocabulary, sdpa, with `dm.wrap` and without; rows of "
            f"{sizes['hf']['tokens']} tokens, and a cache that is three quarters full."
        )
    sources, depth, width = sizes["sources"], sizes["depth"][0], sizes["width"][0]
    return (
        f"\nReads: {sources['tokens']} tokens, D = {sources['dim']}. Depth: D = {depth['dim']}, {depth['tokens']} "
        f"tokens. Width: {width['depth']} sublayers, {width['tokens']} tokens."
    )


def mixing_columns(report: Report) -> dict[str, list[str]]:
    """Columns beside each ratio of mixing: the same by processor time, that of the whole step, and milliseconds."""
    names = [row.what for row in report.of(MIXING)]
    return {
        "by processor time": [figure_of(report, MIXING_CPU, name) for name in names],
        "whole step": [figure_of(report, "step", name) for name in names],
        "time": [figure_of(report, MIXING_MS, name) for name in names],
        "processor time": [figure_of(report, MIXING_CPU_MS, name) for name in names],
    }


def residual_times(report: Report) -> str:
    def both(name: str) -> str:
        wall, processor = (figure_of(report, part, name) for part in (MIXING_MS, MIXING_CPU_MS))
        return f"{wall or 'not measured'} ({processor or 'not measured'} of processor time)"

    return f"The plain residual without its sublayers takes {both(BASELINE)}, its real step {both(REAL)}."


def figure_of(report: Report, part: str, what: str) -> str:
    return next((figure_text(row) for row in report.of(part) if row.what == what), "")


def table_of(rows: Sequence[Row], words: str, beside: Mapping[str, list[str]] | None = None) -> list[str]:
    """Without empty columns; those of `beside` follow the interval."""
    cells = {
        "what": [name_of(row) for row in rows],
        "figure": [figure_text(row) for row in rows],
        "interval": [interval_text(row) for row in rows],
        **(beside or {}),
        "processes × rounds": [f"{len(row.samples)} × {len(row.samples[0])}" if row.samples else "" for row in rows],
        "target: at most": ["" if row.bound is None else f"{row.bound:,g}" for row in rows],
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
        return "" if row.verdict == RUNS else "not available"
    return f"{number(row.figure, row.unit)} {row.unit}"


def interval_text(row: Row) -> str:
    if row.low is None or row.high is None:
        return ""
    return f"{number(row.low, row.unit)} – {number(row.high, row.unit)}"


def number(value: float, unit: str) -> str:
    if unit == "ms":
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"{value:,.0f}" if unit in ("bytes/token", "MB") else f"{value:.3f}" if value < 10 else f"{value:.1f}"
