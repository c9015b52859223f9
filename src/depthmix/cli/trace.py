"""`depthmix trace`: what the layers of a trained model read, measured over a text of any length."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import tyro

from depthmix.analysis import survey
from depthmix.cli.measured import Reading, open_measured
from depthmix.cli.shared import flag, switch
from depthmix.cli.trace_summary import print_summary
from depthmix.support.terminal import printable, say
from depthmix.training.texts import measured_folder

EXAMPLES = (
    "depthmix trace runs/small --tokens 2048",
    "depthmix trace runs/small --text README.md --output out/readme --json",
)
VALIDATION_TOKENS = 65_536  # read of the validation data unless --tokens says otherwise


def run(
    folder: Annotated[
        Path,
        tyro.conf.Positional,
        flag("Folder of a run of `depthmix train`, or a folder that `dm.save_model` wrote.", "FOLDER"),
    ],
    *,
    reading: Reading = Reading(),
    tokens: Annotated[
        int | None,
        flag("Read at most this many tokens.", "N", default=f"all; of validation data {VALIDATION_TOKENS:,}"),
    ] = None,
    output: Annotated[
        Path | None,
        flag("Folder of the result.", "FOLDER", default="that of the run; measured/NAME in it for a text of yours"),
    ] = None,
    json: Annotated[bool, switch("Print one JSON object.")] = False,
) -> int:
    """Measure what the layers of a model read, over a text of any length.

    Writes trace.safetensors and trace.json. For an unfinished run, the model of the newest checkpoint is used.
    """
    model, tokenizer, text = open_measured(folder, reading, tokens=tokens, of_validation=VALIDATION_TOKENS)
    result = survey(model, text.batches(), source=text.source, decode=tokenizer.decode)
    result.figures["text"] |= text.describe()
    target = output or measured_folder(folder, *reading.words())
    result.save(target)
    if json:
        print(json_format.dumps(result.figures, indent=2))
    else:
        print_summary(result)
    say(printable(f"written to {target}: trace.safetensors, trace.json"))
    return 0
