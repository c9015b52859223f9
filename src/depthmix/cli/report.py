"""`depthmix report`: what runs or a study have learned over depth, as one HTML page that works offline."""

from __future__ import annotations

import json as json_format
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from depthmix.cli.shared import can_draw, flag, switch
from depthmix.report import make_document, open_folders, write_page
from depthmix.report.document import Opened
from depthmix.report.measuring import STALE, TRACE_TOKENS, is_stale, measure_missing, texts_of
from depthmix.report.page import read_template
from depthmix.report.pictures import draw_figures
from depthmix.support.checks import check_device, check_range
from depthmix.support.terminal import Progress, printable

EXAMPLES = (
    "depthmix report runs/small",
    "depthmix report studies/compare --saved-only --output report.html",
)
NAME = "report.html"


def run(
    folders: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        flag(
            "Folders of runs of `depthmix train`, finished or not; or the folder of one study of `depthmix compare`.",
            "FOLDER ...",
            default="",
        ),
    ] = (),
    *,
    output: Annotated[
        Path | None,
        flag("The HTML file to write.", "FILE", default=f"{NAME} in the folder, of several runs in the current folder"),
    ] = None,
    saved_only: Annotated[bool, switch("Measure nothing: show what the folders contain.")] = False,
    text: Annotated[
        Path | None, flag("A text file to trace and ablate on.", "FILE", default="the run's validation data")
    ] = None,
    tokens: Annotated[int, flag("Largest number of tokens to trace.", "N")] = TRACE_TOKENS,
    figures: Annotated[
        Path | None, flag("Also write the main figures into this folder, as PNG and SVG.", "FOLDER", default="none")
    ] = None,
    device: Annotated[str, flag("Device to measure on, such as cpu or cuda.", "DEVICE")] = "cpu",
    json: Annotated[bool, switch("Print one JSON object.")] = False,
) -> int:
    """Report on runs or a study: one HTML page that works offline.

    The page has losses, magnitudes and gradients over depth, what layers read, causal importance, health in plain
    language and costs; of a study one run for each arm, the tables, and the paper's observations held against all
    seeds.

    What is missing is measured first if a run's weights are there, and saved beside the run: a trace of a text
    (trace.json, trace.safetensors) and an ablation (ablation.json). The next report uses them again.
    """  # fmt: skip
    check_range("tokens", tokens, 2)
    check_device(device)
    if text is not None and not text.is_file():
        raise FileNotFoundError(f"text={text} is not a file; expected a text file")
    if text is not None and saved_only:
        raise ValueError(f"text={text} and saved_only; expected only one of them: with saved_only nothing is measured")
    read_template()  # before an hour of measuring and not after it
    opened = read_folders(folders)
    target = check_target(output or default_output(folders))
    for each in opened.runs:
        if not saved_only:
            measure_missing(each, device=device, text=text, tokens=tokens)
        if is_stale(each):
            each.missing.append(f"{STALE}.")
    for name, sentence in texts_of(opened.runs).items():
        next(each for each in opened.runs if each.name == name).missing.append(sentence)
    document = make_document(opened, shlex.join(["depthmix", *sys.argv[1:]]))
    size = write_page(document, target)
    drawn = draw_figures(opened.runs, figures) if figures is not None and can_draw() else []
    print_summary(document, target, size, drawn, json)
    return 0


def read_folders(folders: Sequence[Path]) -> Opened:
    with Progress(None) as progress:
        return open_folders(folders, lambda done: progress.update(done, f"reading: {done} runs"))


def default_output(folders: Sequence[Path]) -> Path:
    return folders[0] / NAME if len(folders) == 1 else Path(NAME)


def check_target(target: Path) -> Path:
    if target.is_dir():
        raise ValueError(f"output={target} is a folder; expected a file such as {target / NAME}")
    return target


def print_summary(document: dict[str, Any], target: Path, size: int, drawn: Sequence[Path], json: bool) -> None:
    if json:
        health = {run["name"]: {h["name"]: h["level"] for h in run["health"]} for run in document["runs"]}
        content = {
            "report": str(target),
            "bytes": size,
            "figures": [str(path) for path in drawn],
            "health": health,
            "missing": {run["name"]: run["missing"] for run in document["runs"]},
            "findings": document["findings"],
        }
        print(json_format.dumps(content, indent=2))
        return
    for run in document["runs"]:
        for health in run["health"]:
            if health["level"] == "problem":
                print(printable(f"{run['name']}: {health['name']}: {health['figure']}"))
    if drawn:
        print(printable(f"{len(drawn)} figures in {drawn[0].parent}"))
    print(printable(f"{target} ({size / 1e6:.2f} MB)"))
