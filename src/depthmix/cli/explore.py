"""`depthmix explore`: a page in the browser that asks runs about texts and edits what their layers read."""

from __future__ import annotations

import json as json_format
import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from depthmix.cli.generate import check_folder, saved_model, tokenizer_of
from depthmix.cli.shared import flag, open_run_folder, switch
from depthmix.models import load_model
from depthmix.report import make_document
from depthmix.report.answers import MOST_TOKENS, Explorable, answer_with
from depthmix.report.document import Opened
from depthmix.report.page import fill_page, read_template
from depthmix.report.reading import SavedRun, read_run_folder, unique_names
from depthmix.report.server import ExplorerServer
from depthmix.support.checks import check_device, check_positive, check_range
from depthmix.support.files import parse_toml, read_text
from depthmix.support.terminal import say
from depthmix.training.config import RESTORE
from depthmix.training.continued import is_retrofit

EXAMPLES = (
    "depthmix explore runs/small",
    "depthmix explore runs/small --port 8000 --idle 3600",
)
NO_RUN = "This folder holds a saved model and no run, so nothing of its training is shown."


def run(
    folders: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        flag("Folders of runs of `depthmix train`, or folders that `dm.save_model` wrote.", "FOLDER ...", default=""),
    ] = (),
    *,
    port: Annotated[int, flag("Port on this machine; 0 for any free one.", "PORT")] = 0,
    open: Annotated[bool, switch("Also open the page in a browser.")] = False,
    device: Annotated[str, flag("Device to run on, such as cpu or cuda.", "DEVICE")] = "cpu",
    idle: Annotated[
        float | None, flag("End after this many seconds without a request.", "SECONDS", default="when interrupted")
    ] = None,
    functions: Annotated[
        bool,
        switch("Import the user-defined functions that a model's configuration names. This runs their code."),
    ] = False,
    json: Annotated[bool, switch("Print the address and the runs as one JSON object.")] = False,
) -> int:
    """Explore runs in a browser: what layers read, and what a cut changes.

    The page is served on this machine only, at an address with a secret. For an unfinished run, the model of the newest
    checkpoint is used. Ctrl-C ends it.
    """
    if not folders:
        raise ValueError("explore takes at least one folder: that of a run, or of a saved model")
    check_range("port", port, 0, 65535)
    if idle is not None:
        check_positive("idle", idle)
    check_device(device)
    for folder in folders:
        check_folder(folder)
    template = read_template()
    names = unique_names(folders)
    runs = [load_run(folder, name, device, functions) for folder, name in zip(folders, names, strict=True)]
    page = fill_page(template, explorer_document(folders, runs))
    server = ExplorerServer(page, partial(answer_with, runs), port=port)
    with ended_by_sigterm():
        try:
            announce(server, runs, json)
            if open:
                import webbrowser

                webbrowser.open(server.address)
        except BaseException:
            server.close()
            raise
        server.serve(idle)
    return 0


def load_run(folder: Path, name: str, device: str, functions: bool) -> Explorable:
    """The model in float32, in which it is explored whatever it was trained in."""
    if is_retrofit(folder):
        raise ValueError(
            f"the model of {folder} comes from transformers, which explore does not read; use depthmix trace and "
            "ablate, whose measurements `depthmix report` shows"
        )
    place, step = saved_model(folder), None
    if place is not None:
        model = load_model(place, device=device, dtype=torch.float32, functions=functions)
    else:
        model, _, step = open_run_folder(folder, device, dtype=torch.float32, functions=functions)
    tokenizer = tokenizer_of(folder, model.config)
    return Explorable(name, model, tokenizer, most_tokens=context(folder), finished=step is None)


def context(folder: Path) -> int:
    """The number of tokens of a text that are read: no more than in training, where that is known."""
    path = folder / "config.toml"
    if saved_model(folder) == folder or not path.is_file():
        return MOST_TOKENS
    data = parse_toml(read_text(path, RESTORE), str(path), RESTORE).get("data")  # nothing that it names is imported
    trained = data.get("tokens_per_row") if isinstance(data, dict) else None
    return min(MOST_TOKENS, trained) if isinstance(trained, int) and trained > 1 else MOST_TOKENS


def explorer_document(folders: Sequence[Path], runs: Sequence[Explorable]) -> dict[str, Any]:
    """What the page draws: what the folders hold of each run, and what the loaded model says of itself."""
    saved = [read_saved(folder, run.name) for folder, run in zip(folders, runs, strict=True)]
    opened = Opened(title=f"Explorer: {', '.join(run.name for run in runs)}", runs=saved, arms=[])
    document = make_document(opened, shlex.join(["depthmix", "explore", *map(str, folders)]))
    described = [{**one, **run.facts()} for one, run in zip(document["runs"], runs, strict=True)]
    return {**document, "kind": "explorer", "runs": described}


def read_saved(folder: Path, name: str) -> SavedRun:
    if saved_model(folder) == folder:
        return SavedRun(folder=folder, name=name, missing=[NO_RUN])
    return read_run_folder(folder, name)


def announce(server: ExplorerServer, runs: Sequence[Explorable], json: bool) -> None:
    if json:
        print(json_format.dumps({"address": server.address, "runs": [run.name for run in runs]}), flush=True)
        return
    for run in runs:
        say(run.describe())
    print(server.address, flush=True)
    say("Open this address in a browser on this machine; nobody else should know it. Ctrl-C ends the explorer.")


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the explorer as Ctrl-C does. Signals reach the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
