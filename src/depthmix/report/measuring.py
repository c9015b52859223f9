"""Measure what a report needs and a run has not saved: a trace of a text and causal importance, beside the run.

Axes: B row of text, T token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from depthmix.analysis import ablate, survey
from depthmix.models import Decoder
from depthmix.report.reading import (
    ABLATION,
    DAMAGE,
    PROBLEMS,
    TRACE,
    SavedRun,
    attempt,
    read_ablation,
    read_trace,
    sentence,
)
from depthmix.support.terminal import Progress, say
from depthmix.training import DataConfig, read_config
from depthmix.training.build import check_functions, open_run, run_tokenizer
from depthmix.training.manifest import list_checkpoints
from depthmix.training.texts import Text, file_text, measured_folder, row_length, validation_text

TRACE_TOKENS = 16_384
ABLATION_ROWS = 16  # sequences: the unit of the intervals
ABLATION_TOKENS = 4_096
FEWEST_ROWS = 4  # for an interval
FAILURES = (*DAMAGE, RuntimeError, ImportError, MemoryError)
STALE = "The trace is older than the weights and shows an earlier state of the run"


def measure_missing(
    run: SavedRun, *, device: str = "cpu", text: Path | None = None, tokens: int = TRACE_TOKENS
) -> None:
    """Measure and save a trace and an ablation where they are missing; a failure is noted.

    Those of another text than the validation data are kept in a folder of their own, and shown instead of the run's.
    """
    place = measured_folder(run.folder) if text is None else measured_folder(run.folder, text.name)
    if text is not None:
        run.trace = run.ablation = None
        reread(run, place, [TRACE, ABLATION])
    if not run.has_weights:
        return
    wanted: list[str] = []
    try:
        check_functions(run.folder / "config.toml")
        data, length = read_config(run.folder).data, row_length(run.folder)
        rows = min(ABLATION_ROWS, max(FEWEST_ROWS, ABLATION_TOKENS // length))
        sizes = {TRACE: tokens, ABLATION: rows * length}

        def read(size: int, digest: str = "") -> Text:
            if text is None:
                return validation_text(run.folder, digest, length, size)
            return file_text(text, run_tokenizer(run.folder, data), length, size)

        digests = {} if text is None else {name: read(size).digest() for name, size in sizes.items()}
        wanted = wanted_parts(run, place, digests)
        if not wanted:
            return
        opened = open_run(run.folder, device, functions=False)
        if TRACE in wanted:
            save_trace(run, place, opened.model, data, read(sizes[TRACE], opened.digest))
        if ABLATION in wanted:
            save_ablation(run, place, opened.model, read(sizes[ABLATION], opened.digest))
    except FAILURES as error:
        problem = f"The run could not be measured: {sentence(error)}"
        run.missing.append(problem)
        say(f"{run.name}: {problem}")
    reread(run, place, wanted)


def wanted_parts(run: SavedRun, place: Path, digests: Mapping[str, str]) -> list[str]:
    """Names of the files to be made: missing, older than the weights, or not of the text with this digest, if any."""
    saved = {TRACE: run.trace.content if run.trace is not None else None, ABLATION: run.ablation}
    if is_stale(run, place):
        return [*saved]
    return [name for name, content in saved.items() if content is None or not is_of(content, digests.get(name))]


def is_of(content: dict[str, Any], digest: str | None) -> bool:
    """Whether a measurement is of the wanted text; None: any text."""
    read = content.get("text")
    return digest is None or (isinstance(read, dict) and read.get("sha256") == digest)


def is_stale(run: SavedRun, place: Path | None = None) -> bool:
    """Whether the run's weights are newer than the trace in its folder (or in `place`): it was trained on since."""
    weights = [run.folder / "final" / "model.safetensors"]
    weights += [path / "manifest.json" for path in list_checkpoints(run.folder / "checkpoints")]
    made = [path.stat().st_mtime for path in weights if path.is_file()]
    place = run.folder if place is None else place
    traces = [place / name for name in (TRACE, ABLATION) if (place / name).is_file()]
    return bool(made and traces) and max(made) > min(path.stat().st_mtime for path in traces)


def reread(run: SavedRun, place: Path, names: list[str]) -> None:
    """Take up what is saved in `place`, instead of what could not be read before."""
    run.missing[:] = [line for line in run.missing if not line.startswith(tuple(PROBLEMS[name] for name in names))]
    if TRACE in names and (place / TRACE).is_file():
        run.trace = attempt(run.missing, PROBLEMS[TRACE], lambda: read_trace(place, run.depth))
    if ABLATION in names and (place / ABLATION).is_file():
        run.ablation = attempt(run.missing, PROBLEMS[ABLATION], lambda: read_ablation(place))


def texts_of(runs: Sequence[SavedRun]) -> dict[str, str]:
    """Where traces are of different texts: a sentence for each run that has one."""
    read = {run.name: run.trace.content["text"] for run in runs if run.trace is not None}
    if len({text.get("sha256") for text in read.values()}) < 2:
        return {}
    return {name: f"Traces are of different texts; this one is of {text.get('source')}." for name, text in read.items()}


def save_trace(run: SavedRun, place: Path, model: Decoder, data: DataConfig, text: Text) -> None:
    tokenizer = None
    with suppress(OSError, ImportError):  # without it the table shows ids
        tokenizer = run_tokenizer(run.folder, data)
    device = next(model.parameters()).device
    batches = (batch.to(device) for batch in text.batches(f"{run.name}: trace"))
    found = survey(model, batches, source=text.source, decode=None if tokenizer is None else tokenizer.decode)
    found.figures["text"] |= text.describe()
    found.save(place)


def save_ablation(run: SavedRun, place: Path, model: Decoder, text: Text) -> None:
    rows = text.rows().to(next(model.parameters()).device)
    with Progress(None) as progress:

        def show(done: int, total: int) -> None:
            progress.total = total
            progress.update(done, f"{run.name}: ablation, {done} of {total} passes")

        found = ablate(model, rows, progress=show)
    dataclasses.replace(found, text=text.describe()).save(place / ABLATION)
