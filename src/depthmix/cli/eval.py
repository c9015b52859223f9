"""`depthmix eval`: the loss of a run's model, on its own validation data or on any text; or its results on tasks."""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor, nn

from depthmix.cli.eval_tasks import NO_TASKS, Tasks, check_flags, run_tasks
from depthmix.cli.processes import ALONE, Serving
from depthmix.cli.shared import flag, open_run_folder, print_result, say_unfinished, switch
from depthmix.parallel import ranks
from depthmix.parallel.model import DistributedModel
from depthmix.support.checks import check_device
from depthmix.support.terminal import track
from depthmix.training import DataConfig, RetrofitConfig, Score, open_corpus, read_config, score
from depthmix.training.build import check_tokens, run_tokenizer, tokenizer_file
from depthmix.training.build import export as export_model
from depthmix.training.serve import plan_serving

EXAMPLES = (
    "depthmix eval runs/small --file README.md",
    "depthmix eval runs/small --file README.md --export out/small --json",
)


def run(
    folder: Annotated[
        Path,
        tyro.conf.Positional,
        flag(
            "Folder of a run of `depthmix train`; with --tasks also one of `dm.save_model` or `save_pretrained`.",
            "FOLDER",
        ),
    ],
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
    benchmarks: Tasks = NO_TASKS,
    processes: Serving = ALONE,
) -> int:
    """Evaluate a run: its loss on text, or its results on benchmarks (--tasks).

    The loss comes with perplexity and bits per byte. For an unfinished run, the model of the newest checkpoint is used.

    On several processes: torchrun --nproc-per-node 4 -m depthmix eval FOLDER --tp 2. Those that --tp and --pp leave
    share the rows.
    """
    distributed_flags = {name: value != getattr(ALONE, name) for name, value in vars(processes).items()}
    check_flags(benchmarks, {"file": file, "rows": rows, "export": export, **distributed_flags})
    if benchmarks.tasks:
        if ranks.launched() > 1:
            raise ValueError(f"--tasks on {ranks.launched()} processes; expected one: start it without torchrun")
        return run_tasks(folder, benchmarks, device, tokens_per_row, json)
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"{file} is not a file; expected a text file")
    config = read_config(folder)
    if file is None and isinstance(config.model, RetrofitConfig) and config.uses_own_tokenizer:
        config.model.existing_path()  # whose tokenizer the validation data name
    data = config.data
    sizes = (data.tokens_per_row if tokens_per_row is None else tokens_per_row, data.rows if rows is None else rows)
    if processes == ALONE and ranks.launched() == 1:
        model, digest, _ = open_run_folder(folder, device)
        result = score_run(model, digest, folder, data, file, sizes)
        whole: nn.Module | None = model
    else:
        serving = plan_serving(folder, tp=processes.tp, pp=processes.pp, divide=True)
        own = ranks.own_device(check_device(device))
        with ranks.process_group(own):
            distributed = serving.load(own)
            say_unfinished(folder, serving.step)
            result = score_run(distributed, serving.digest, folder, data, file, sizes)
            whole = None if export is None else distributed.whole()
    if not ranks.main_process():
        return 0
    if export is not None:
        export_model(whole, export, config, folder=folder, tokenizer=tokenizer_file(folder, data))
    if json:
        print(json_format.dumps({"run": str(folder), "on": str(file or "validation"), **result._asdict()}, indent=2))
    else:
        text = "validation data" if file is None else str(file)
        print_result(
            f"{text}: loss {result.loss:.4f}, perplexity {math.exp(min(result.loss, 700)):.4g}, "
            f"{result.bits_per_byte:.4f} bits per byte over {result.tokens:,} tokens"
        )
    return 0


def score_run(
    model: nn.Module | DistributedModel,
    digest: str | None,
    folder: Path,
    data: DataConfig,
    file: Path | None,
    sizes: tuple[int, int],
) -> Score:
    """On a file, or on the validation data of the run; `sizes` are tokens per row and rows."""
    if file is None:
        corpus = open_corpus(data)
        check_tokens(corpus, digest or "", folder)
        tokens = torch.as_tensor(corpus.validation[:].astype("int64"))
        return score(model, tokens, corpus.bytes_per_token * len(tokens), *sizes, with_progress)
    content = file.read_bytes()
    ids = torch.as_tensor(run_tokenizer(folder, data).encode_batch([content])[0].astype("int64"))
    if len(ids) < 2:
        raise ValueError(f"{file} has {len(ids)} tokens; expected at least 2: the first is not predicted")
    return score(model, ids, len(content), *sizes, with_progress)


def with_progress(batches: Sequence[Tensor]) -> Iterable[Tensor]:
    if not ranks.main_process():
        return batches
    return track(batches, "reading", "batches", len(batches))
