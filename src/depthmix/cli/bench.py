"""`depthmix bench`: what reading over depth costs, on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import tyro

from depthmix.analysis.figures import new_figure
from depthmix.analysis.invariants import verify
from depthmix.bench import PARTS, ChildFailed, Part, Report, Settings, run_suite
from depthmix.bench.figures import draw_all
from depthmix.bench.model import options_for
from depthmix.bench.page import QUICK_NOTE, figure_text, interval_text, name_of, render
from depthmix.bench.suite import FOCUS
from depthmix.mechanisms import list_mechanisms, mechanism
from depthmix.support.files import read_text, write_text
from depthmix.support.terminal import console, print_table, say

BOUNDS = {  # targets; figures are shown beside them, whatever they are
    "ops.attend, forward": 3.0,
    "ops.attend, forward and backward": 12.0,
    "ops.attend against fla-core naive, forward and backward": 0.2,
    "64 sources, time of each": 1.15,
    "block_attnres": 1.05,
    "attnres": 1.12,
    "denseformer": 1.05,
    "mhc": 1.40,
    "depth_attention": 1.03,
    "depthmix train": 1.03,
}


def run(
    parts: tuple[Part, ...] = PARTS,
    mixers: tuple[str, ...] = (),
    rounds: int = 15,
    processes: int | None = None,
    quick: bool = False,
    compiled: bool = False,
    json: bool = False,
    output: Path | None = None,
    figures: Path | None = None,
    markdown: Path | None = None,
    saved: Annotated[tuple[Path, ...], tyro.conf.arg(name="from")] = (),
) -> int:
    """Measure what reading over depth costs, against the plain residual and against other implementations.

    read: one read, forward and with its backward pass, in passes over its sources, beside the peers that are installed.
    mixing: the time that a mechanism itself takes in a training step: forward and backward with sublayers that cost
    next to nothing, minus the plain residual's, over the residual's real step; by wall-clock and by processor time.
    step: a training step and a forward of a decoder-shaped network for every mechanism, over the plain residual's time.
    decode: one new token for each of 8 sequences, with the decoder's cache and a head of 32,000 tokens; with --compiled
    also compiled. values: a training step of the decoder with values mixed over depth inside attention, over one
    without. loop: a step of `depthmix train`, over the bare forward, backward and optimiser. memory: bytes that the
    graph keeps for the backward pass, and the peak of a training step, in one process a mechanism. growth: the read
    against the number of sources, the step against depth and width.

    Variants take turns in rotating order within a process; a figure is the median of the medians of several processes,
    its interval goes from the smallest to the largest. A bound inside the interval, or no farther from it than the
    residual, timed twice, differs from itself, leaves the verdict undecided, and so do fewer than 6 rounds of a single
    process. Nothing is measured while `depthmix verify` fails.

    A full run takes about an hour on two cores, --compiled some minutes more for each network; --quick takes under a
    minute. Progress goes to stderr.

    Args:
        parts: what to measure.
        mixers: mechanisms to measure. By default all for mixing, step and memory, block_attnres and attnres where each
            costs minutes (--compiled, growth) and with --quick.
        rounds: paired rounds in each process; growth with depth and width takes at most 7.
        processes: child processes for each timed part, one after the other; 3, with --quick 1.
        quick: small sizes and few rounds: whether it runs, not how fast it is.
        compiled: the step under torch.compile too, one network at a time.
        json: print one object instead of a table.
        output: write the result, with every paired ratio, to this JSON file as well. An interrupted run resumes when it
            is started again with the same output.
        figures: draw the result into this folder, as PNGs.
        markdown: write the tables, and the figures where --figures is given, as a page.
        saved: measure nothing; print and draw these files, written by --output. Of several, parts are put together.
    """
    check_targets(output, markdown, figures)
    if saved:
        report = Report.joined([Report.from_json(read_text(path, "Measure it again"), str(path)) for path in saved])
    else:
        every = FOCUS if quick else tuple(name for name in list_mechanisms() if name != "residual")
        settings = Settings(
            parts=parts,
            mixers=tuple(dict.fromkeys(mixers)) or every,
            focus=tuple(dict.fromkeys(mixers)) or FOCUS,
            rounds=min(rounds, 3) if quick else rounds,
            processes=processes if processes is not None else 1 if quick else 3,
            quick=quick,
            compiled=compiled,
        )
        refuse_failing(settings.mixers)
        try:
            journal = None if output is None else output.with_suffix(".partial.jsonl")
            report = run_suite(settings, BOUNDS, " ".join(["depthmix", *sys.argv[1:]]), journal)
        except ChildFailed as error:
            say(f"depthmix: {error}")
            return 1
    if output is not None:
        report.save(output)
        output.with_suffix(".partial.jsonl").unlink(missing_ok=True)
    drawn = draw_all(report, figures) if figures is not None else {}
    if markdown is not None:
        write_text(markdown, render(report, drawn, markdown.parent))
    print(report.to_json()) if json else print_report(report)
    return 0


def check_targets(output: Path | None, markdown: Path | None, figures: Path | None) -> None:
    """Errors before the first hour of work, not after it."""
    for path in (output, markdown):
        if path is not None and path.is_dir():
            raise ValueError(f"{path} is a folder; expected the name of a file to write")
    if figures is not None:
        if figures.is_file():
            raise ValueError(f"{figures} is a file; expected a folder for the figures")
        new_figure()  # raises if matplotlib is missing


def refuse_failing(names: Iterable[str]) -> None:
    jobs = [(name, mechanism(name)) for name in dict.fromkeys(("residual", *names))]  # unknown names are errors first
    for name, cls in jobs:
        measured = options_for(name, depth=7)
        for options in [cls.variants[0], *([measured] if measured else [])]:
            failed = [c.name for c in verify(name, options, dtype=torch.float32) if not c.holds]
            if failed:
                reasons = "; ".join(failed)
                raise ValueError(
                    f"{name} fails checks, so it is not measured: {reasons}. Run `depthmix verify {name}` for details"
                )


def print_report(report: Report) -> None:
    print("What reading over depth costs")
    for part in dict.fromkeys(row.part for row in report.rows):
        cells = []
        for row in report.of(part):
            bound = "" if row.bound is None else f"{row.bound:,g}"
            cells.append((name_of(row), figure_text(row), interval_text(row), bound, row.verdict))
        print()
        print_table("", (part, "figure", "interval", "at most", "verdict"), cells)
    terminal = console()
    times = "× is the ratio to the plain residual, or to what the row names."
    terminal.print(f"\n{QUICK_NOTE if report.quick else times} Bytes kept are those beyond the residual's.")
    for line in dict.fromkeys(row.note for row in report.of("peak") if row.note):
        terminal.print(line)
    for key in ("machine", "reads", "rounds", "processes", "command"):
        terminal.print(f"{key}: {getattr(report, key)}")
    for note in report.notes:
        terminal.print(note)
