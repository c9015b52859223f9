"""`depthmix eval`: the loss of a run's model, on its own validation data or on any text."""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from depthmix.cli.shared import flag, open_run_folder, print_result, switch
from depthmix.data.tokenizers import BatchTokenizer
from depthmix.models import Decoder
from depthmix.support.terminal import track
from depthmix.training import Score, open_corpus, read_config, score
from depthmix.training.build import check_tokens, run_tokenizer, tokenizer_file
from depthmix.training.build import export as export_model

EXAMPLES = (
    "depthmix eval runs/small --file README.md",
    "depthmix eval runs/small --file README.md --export out/small --json",
)


def run(
    folder: Annotated[Path, tyro.conf.Positional, flag("Folder of a run of `depthmix train`.", "FOLDER")],
    file: Annotated[
        Path | None, flag("A text file to evaluate on.", "FILE", default="all of the run's validation data")
    ] = None,
    tokens_per_row: Annotated[
        int | None, flag("Longest context, in tokens.", "TOKENS", default="as in training")
    ] = None,
    rows: Annotated[int | None, flag("Sequences per batch.", "N", default="as in training")] = None,
    device: Annotated[str, flag("Device to run on, such as cpu or cuda.", "DEVICE")] = "cpu",
    export: Annotated[
        Path | None, flag("Also write the model into this folder, as safetensors.", "FOLDER", default="")
    ] = None,
    json: Annotated[bool, switch("Print one JSON object.")] = False,
) -> int:
    """Evaluate a run: loss, perplexity and bits per byte of its model.

    For an unfinished run, the model of the newest checkpoint is evaluated.
    """
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"{file} is not a file; expected a text file")
    data = read_config(folder).data
    model, digest, _ = open_run_folder(folder, device)
    row = data.tokens_per_row if tokens_per_row is None else tokens_per_row
    rows = data.rows if rows is None else rows
    if file is None:
        corpus = open_corpus(data)
        check_tokens(corpus, digest, folder)
        tokens = torch.as_tensor(corpus.validation[:].astype("int64"))
        result = score(model, tokens, corpus.bytes_per_token * len(tokens), row, rows, with_progress)
    else:
        result = score_file(model, file, run_tokenizer(folder, data), row, rows)
    if export is not None:
        export_model(model, export, tokenizer_file(folder, data))
    if json:
        print(json_format.dumps({"run": str(folder), "on": str(file or "validation"), **result._asdict()}, indent=2))
    else:
        text = "validation data" if file is None else str(file)
        print_result(
            f"{text}: loss {result.loss:.4f}, perplexity {math.exp(min(result.loss, 700)):.4g}, "
            f"{result.bits_per_byte:.4f} bits per byte over {result.tokens:,} tokens"
        )
    return 0


def score_file(model: Decoder, file: Path, tokenizer: BatchTokenizer, row: int, rows: int) -> Score:
    content = file.read_bytes()
    ids = torch.as_tensor(tokenizer.encode_batch([content])[0].astype("int64"))
    if len(ids) < 2:
        raise ValueError(f"{file} has {len(ids)} tokens; expected at least 2: the first is not predicted")
    return score(model, ids, len(content), row, rows, with_progress)


def with_progress(batches: Sequence[Tensor]) -> Iterator[Tensor]:
    return track(batches, "reading", "batches", len(batches))
