"""`depthmix eval --tasks`: benchmarks of the lm-evaluation-harness for a model in any kind of folder."""

from __future__ import annotations

import json as json_format
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from depthmix.cli.shared import flag, open_run_folder, resumable, switch
from depthmix.models.saved import CONFIG
from depthmix.support.checks import check_device, import_package
from depthmix.support.files import read_json
from depthmix.support.terminal import print_table, print_wrapped, say
from depthmix.training import read_config
from depthmix.training.build import RESULT_AGAIN, run_tokenizer
from depthmix.training.folder import CONFIG as RUN_CONFIG

INSTALL = "'depthmix[harness]'"
HEADINGS = ("task", "metric", "value", "stderr", "n", "shots", "version")


@dataclass(frozen=True, kw_only=True)
class Tasks:
    tasks: Annotated[
        tuple[str, ...],
        flag("Evaluate tasks of the lm-evaluation-harness instead: names of tasks, of groups, or of the suites "
             "attnres-paper and depth-attention-paper.", "NAME ...", default=""),
    ] = ()  # fmt: skip
    task_folder: Annotated[
        Path | None,
        flag("Folder of task files of your own. Functions that they name are imported, which runs their code.",
             "FOLDER", default=""),
    ] = None  # fmt: skip
    limit: Annotated[
        int | None, flag("Evaluate only the first N questions of each task, as a trial.", "N", default="all")
    ] = None
    shots: Annotated[int | None, flag("Examples in a prompt.", "N", default="as each task says")] = None
    batch: Annotated[int | None, flag("Questions of a task at a time.", "N", default="1")] = None
    allow_code: Annotated[
        bool,
        switch("Allow tasks that execute code which the model writes, such as humaneval and mbpp, without a sandbox."),
    ] = False
    output: Annotated[
        Path | None,
        flag("Write all results of tasks into this file, after each task. If it exists, only missing tasks are "
             "evaluated.", "FILE", default=""),
    ] = None  # fmt: skip


NO_TASKS = Tasks()


def check_flags(options: Tasks, others: Mapping[str, object]) -> None:
    """Flags of tasks and flags of the loss exclude each other; `others` are those of the loss that were given."""
    if not options.tasks:
        given = [name for name, value in vars(options).items() if value != getattr(NO_TASKS, name)]
        if given:
            raise ValueError(f"--{spelled(given[0])} without --tasks; expected both: it concerns tasks only")
    elif given := [name for name, value in others.items() if value is not None and value is not False]:
        hint = "; the number of questions at a time is --batch" if given[0] == "rows" else ""
        raise ValueError(f"--{spelled(given[0])} with --tasks; expected one of them: it concerns the loss only{hint}")


def spelled(name: str) -> str:
    return name.replace("_", "-")


def run_tasks(folder: Path, options: Tasks, device: str, max_length: int | None, json: bool) -> int:
    """Evaluate a folder's model on tasks, print a table or the whole result."""
    if not sys.stderr.isatty():  # a line now and then instead of a moving bar; read when tqdm is imported
        os.environ.setdefault("TQDM_MININTERVAL", "20")
    import_package("lm_eval", "depthmix eval --tasks", INSTALL)
    from depthmix.hf.harness import Settings, run_tasks
    from depthmix.hf.tasks.lookup import choose_tasks

    check_device(device)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist or is not a folder; expected one that contains a model")
    Settings(limit=options.limit, shots=options.shots, max_length=max_length, batch=options.batch or 1)
    chosen = choose_tasks(options.tasks, options.task_folder, options.allow_code)
    model, tokenizer, trained_length = open_folder(folder, device)
    settings = Settings(
        limit=options.limit,
        shots=options.shots,
        max_length=trained_length if max_length is None else max_length,
        batch=options.batch or 1,
    )
    keeping = nullcontext() if options.output is None else resumable()
    with keeping, redirect_stdout(sys.stderr):  # the harness prints remarks there
        document = run_tasks(chosen, model, tokenizer, settings, options.output, str(folder))
    if json:
        print(json_format.dumps(document, indent=2, ensure_ascii=False))
    else:
        print_results(document, options)
    return 0


def open_folder(folder: Path, device: str) -> tuple[Any, Any, int | None]:
    """Model, tokenizer, and the longest context in training where the folder is that of a run of a decoder."""
    from depthmix.hf import DepthmixForCausalLM, from_tokenizer
    from depthmix.hf.opening import open_pretrained

    if not (folder / RUN_CONFIG).is_file() or holds_pretrained(folder / "final"):
        return *open_pretrained(folder, device), None
    data = read_config(folder).data
    model = DepthmixForCausalLM.from_decoder(open_run_folder(folder, device).model)
    return model, from_tokenizer(run_tokenizer(folder, data)), data.tokens_per_row


def holds_pretrained(final: Path) -> bool:
    """Whether a run ended with a model of transformers, which `save_pretrained` wrote."""
    content = read_json(final / CONFIG, RESULT_AGAIN) if (final / CONFIG).is_file() else {}
    return isinstance(content, dict) and "model_type" in content


def print_results(document: Mapping[str, Any], options: Tasks) -> None:
    """A row for each metric of each task."""
    rows = [row for entry in document["tasks"].values() for row in entry["rows"]]
    print_table("", HEADINGS, [[shown(name, row[name]) for name in HEADINGS] for row in rows])
    if (limit := document["settings"]["limit"]) is not None:
        print_wrapped(f"only the first {limit} questions of each task were evaluated (--limit)")
    if options.output is not None:
        say(f"written to {options.output}")


def shown(heading: str, value: Any) -> str:
    if value is None:
        return ""
    if heading in ("value", "stderr") and isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
