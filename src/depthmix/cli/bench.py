"""`depthmix bench`: what reading over depth costs, on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from depthmix.analysis.figures import new_figure
from depthmix.analysis.invariants import verify
from depthmix.bench import PARTS, ChildFailed, Part, Report, Settings, run_suite
from depthmix.bench.figures import draw_all
from depthmix.bench.model import options_for
from depthmix.bench.page import QUICK_NOTE, figure_text, interval_text, name_of, render
from depthmix.bench.suite import FOCUS
from depthmix.cli.shared import flag, switch
from depthmix.mechanisms import list_mechanisms, mechanism
from depthmix.support.checks import import_package
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
    "block_attnres in a pipeline": 1.06,
    "block_attnres: cache against none": 1.0,
    "block_attnres in Qwen3": 1.06,
    "block_attnres in Qwen3, decoding": 1.15,
}


EXAMPLES = (
    "depthmix bench --quick --parts read --output out/read.json",
    "depthmix bench --from out/read.json --markdown out/read.md",
)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    parts: Annotated[tuple[Part, ...], flag("What to measure; see below.", "PART ...")] = PARTS
    mixers: Annotated[
        tuple[str, ...],
        flag("Mechanisms to measure.", "NAME ...",
             default="all; only block_attnres and attnres with --quick or where each takes minutes"),
    ] = ()  # fmt: skip
    quick: Annotated[bool, switch("Small sizes and few rounds: shows that it runs, not how fast it is.")] = False
    compiled: Annotated[bool, switch("Also measure steps under torch.compile, one network at a time.")] = False
    hf: Annotated[bool, switch("Measure wrapped models of transformers, and nothing else: short for --parts hf.")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class Repetition:
    rounds: Annotated[int, flag("Paired rounds in each process; growth with depth and width uses at most 7.", "N")] = 15
    processes: Annotated[
        int | None, flag("Child processes for each timed part, one after the other.", "N", default="3, with --quick 1")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Output:
    json: Annotated[bool, switch("Print one JSON object instead of a table.")] = False
    output: Annotated[
        Path | None,
        flag("Also write the result, with every paired ratio, to this JSON file. An interrupted benchmark resumes when "
             "it is started again with the same file.", "FILE", default=""),
    ] = None  # fmt: skip
    figures: Annotated[Path | None, flag("Draw the result into this folder, as PNGs.", "FOLDER", default="")] = None
    markdown: Annotated[
        Path | None, flag("Write the tables, and the figures of --figures, as a page.", "FILE", default="")
    ] = None
    saved: Annotated[
        tuple[Path, ...],
        flag("Measure nothing; print and draw these files, written by --output. Parts of several files are joined.",
             "FILE ...", name="from", default=""),
    ] = ()  # fmt: skip


def run(
    *, measurement: Measurement = Measurement(), repetition: Repetition = Repetition(), output: Output = Output()
) -> int:
    """Measure the speed and memory of depth mixing against the plain residual.

    Parts: read (one read, forward and with its backward pass, also of other installed implementations), mixing
    (the time of the mechanism itself in a training step), step (whole training steps), decode (one new token for each
    of 8 sequences), values (KV mechanisms in a training step), loop (`depthmix train` against the bare step), pipeline
    (a step of two processes with four stages each, with and without the cache), memory (what the backward pass keeps,
    and the peak), growth (more sources, depth and width), and by name only: hf (a Qwen3 of transformers, wrapped and
    unwrapped). docs/cli.md describes each.

    A figure is the median over processes of their medians, with the interval from the smallest to the largest. A bound
    too close to the interval to tell from noise gives "undecided". Nothing is measured while `depthmix verify` fails.

    A full benchmark takes about an hour on two cores, more with --compiled; --quick takes under a minute.
    """
    check_targets(output)
    report = read_saved(output.saved) if output.saved else measure(measurement, repetition, output.output)
    if report is None:
        return 1
    if output.output is not None:
        report.save(output.output)
        journal_of(output.output).unlink(missing_ok=True)
    drawn = draw_all(report, output.figures) if output.figures is not None else {}
    if output.markdown is not None:
        write_text(output.markdown, render(report, drawn, output.markdown.parent))
    print(report.to_json()) if output.json else print_report(report)
    return 0


def read_saved(paths: Sequence[Path]) -> Report:
    return Report.joined([Report.from_json(read_text(path, "Measure it again"), str(path)) for path in paths])


def measure(chosen: Measurement, repetition: Repetition, file: Path | None) -> Report | None:
    """Measure, or resume from the journal beside `file`; None where a child failed, with a message."""
    quick, named = chosen.quick, tuple(dict.fromkeys(chosen.mixers))
    every = FOCUS if quick else tuple(name for name in list_mechanisms() if name != "residual")
    if chosen.hf and chosen.parts != PARTS:
        raise ValueError("--hf and --parts were both given; expected one of them: --hf is short for --parts hf")
    settings = Settings(
        parts=("hf",) if chosen.hf else chosen.parts,
        mixers=named or every,
        focus=named or FOCUS,
        rounds=min(repetition.rounds, 3) if quick else repetition.rounds,
        processes=repetition.processes if repetition.processes is not None else 1 if quick else 3,
        quick=quick,
        compiled=chosen.compiled,
    )
    if "hf" in settings.parts:
        import_package("transformers", "the part hf of the benchmark", "'depthmix[hf]'")
    refuse_failing(settings.mixers)
    journal = None if file is None else journal_of(file)
    try:
        return run_suite(settings, BOUNDS, " ".join(["depthmix", *sys.argv[1:]]), journal)
    except ChildFailed as error:
        say(f"depthmix: {error}")
        return None


def journal_of(file: Path) -> Path:
    """Where results are kept until all of them are there."""
    return file.with_suffix(".partial.jsonl")


def check_targets(output: Output) -> None:
    """Errors before the first hour of work, not after it."""
    for path in (output.output, output.markdown):
        if path is not None and path.is_dir():
            raise ValueError(f"{path} is a folder; expected the name of a file to write")
    if output.figures is not None:
        if output.figures.is_file():
            raise ValueError(f"{output.figures} is a file; expected a folder for the figures")
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
