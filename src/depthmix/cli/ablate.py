"""`depthmix ablate`: cut routes of a trained model and measure what changes."""

from __future__ import annotations

import dataclasses
import json as json_format
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro

from depthmix.analysis import Ablation, ablate
from depthmix.analysis.ablation import CONTROLS, ROUTES, Change, Effect
from depthmix.cli.measured import Reading, open_measured
from depthmix.cli.shared import Several, flag, repeatable, switch
from depthmix.support.checks import check_range
from depthmix.support.terminal import Progress, print_table, print_wrapped, printable, say
from depthmix.training.texts import measured_folder

EXAMPLES = (
    "depthmix ablate runs/small --rows 4 --routes 4",
    'depthmix ablate runs/small --cut embedding --cut "2->4" --rows 4 --json',
)
ROWS = 16
FEWEST_ROWS = 4
NAME = "ablation.json"
MOST = 1000  # largest number of rows, routes and controls


def run(
    folder: Annotated[
        Path,
        tyro.conf.Positional,
        flag("Folder of a run of `depthmix train`, or a folder that `dm.save_model` wrote.", "FOLDER"),
    ],
    cut: Annotated[
        Several,
        repeatable(
            "What to cut: embedding, recent, older, partial, 'source 3', a route '2->7', or a mixed value "
            "'value 1->4'. Without it: every family, every source and the strongest routes.",
            "CUT",
        ),
    ] = (),
    *,
    reading: Reading = Reading(),
    rows: Annotated[int, flag("Rows of text; intervals are over rows, so use at least 4.", "N")] = ROWS,
    routes: Annotated[int, flag("Number of the strongest routes to cut.", "N")] = ROUTES,
    controls: Annotated[int, flag("Random cuts beside each family, and beside each --cut.", "N")] = CONTROLS,
    renormalise: Annotated[
        bool, switch("Give the weight of what was cut to the rest of a row, where the mechanism normalises its reads.")
    ] = False,
    seed: Annotated[int, flag("Seed of the random cuts.", "SEED")] = 0,
    output: Annotated[
        Path | None,
        flag("Folder of the result.", "FOLDER",
             default="that of the run; measured/NAME in it for chosen cuts, --renormalise or a text of yours"),
    ] = None,
    json: Annotated[bool, switch("Print one JSON object.")] = False,
) -> int:  # fmt: skip
    """Cut routes of a model and measure how its loss and predictions change.

    Writes ablation.json. Rows and sublayers are counted from 1, source 0 is the embedding: '2->7' is what sublayer 7
    reads of the output of sublayer 2. Each change has a 95 % interval over rows of text.
    """
    for name, value, low in (("rows", rows, 1), ("routes", routes, 0), ("controls", controls, 0)):
        check_range(name, value, low, MOST)
    model, _, text = open_measured(folder, reading, rows=rows)
    tokens = text.rows().to(next(model.parameters()).device)
    if tokens.shape[1] < 2:
        raise ValueError(f"{text.source} has {tokens.numel()} tokens; expected at least 2: the first is not predicted")
    with Progress(None) as progress:
        found = ablate(
            model,
            tokens,
            cut or None,
            renormalise=renormalise,
            controls=controls,
            routes=routes,
            seed=seed,
            progress=passes_shown(progress),
        )
    found = dataclasses.replace(found, text=text.describe())
    words = [*reading.words(), *(["cuts"] if cut else []), *(["renormalised"] if renormalise else [])]
    target = (output or measured_folder(folder, *words)) / NAME
    found.save(target)
    if json:
        print(json_format.dumps(found.to_dict(), indent=2))
    else:
        print_summary(found)
    if found.rows < FEWEST_ROWS:
        say(f"intervals over {found.rows} rows say little; use at least {FEWEST_ROWS}")
    say(printable(f"written to {target}"))
    return 0


def passes_shown(progress: Progress) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        progress.total = total
        progress.update(done, f"{done} of {total} passes")

    return show


def print_summary(found: Ablation) -> None:
    sequences = "one row" if found.rows == 1 else f"{found.rows} rows"
    print_wrapped(
        f"{found.mechanism}: loss {found.loss:.4f} over {found.tokens:,} tokens in {sequences} without any cut"
    )
    print_table("", HEADINGS, [cells_of(effect) for effect in found.effects])
    print_wrapped(f"{found.how}. mass: the share of |M| that was cut, in the rows that were cut. {READING}")


HEADINGS = ("cut", "mass", "change of loss", "95 % interval", "random cuts", "KL")
READING = (
    "A cut matters by itself if its interval lies above 0 and above all random cuts of as many routes. "
    "Changes are in nats per token."
)


def cells_of(effect: Effect) -> list[str]:
    losses = effect.controls["loss"] if effect.controls else []
    return [
        effect.name,
        f"{effect.mass:.3f}",
        f"{effect.loss.mean:+.4f}",
        interval_of(effect.loss),
        f"{min(losses):+.3f} to {max(losses):+.3f}" if losses else "",
        f"{effect.kl.mean:.4f}",
    ]


def interval_of(change: Change) -> str:
    return "" if change.low is None or change.high is None else f"{change.low:+.3f} to {change.high:+.3f}"
