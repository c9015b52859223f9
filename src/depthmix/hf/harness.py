"""Evaluate a model on tasks of the lm-evaluation-harness. The numbers are the harness's own; nothing is recomputed."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from depthmix.hf.model import DepthmixForCausalLM
from depthmix.hf.opening import open_pretrained
from depthmix.hf.results import describe_model, new_document, read_document, task_entry, versions, write_document
from depthmix.hf.tasks.lookup import INSTALL, NEEDED_BY, Chosen, choose_tasks, prepare
from depthmix.models import Decoder
from depthmix.support.checks import check_range, import_package, user_path
from depthmix.support.files import lock
from depthmix.support.terminal import format_duration, say

CODE_SWITCH = "HF_ALLOW_CODE_EVAL"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How tasks are evaluated.

    limit: only the first so many questions of each task: for a trial, not for results.
    shots: number of examples in a prompt; by default each task's own. Tasks that state 0 keep it.
    max_length: longest context in tokens; by default as the model's configuration says, else 2,048.
    batch: questions at a time. It changes results by rounding only.
    """

    limit: int | None = None
    shots: int | None = None
    max_length: int | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("shots", 0), ("max_length", 2), ("batch", 1)):
            if (value := getattr(self, name)) is not None:
                check_range(name, value, least)


def evaluate(
    model: Any,
    tasks: str | Iterable[str],
    *,
    tokenizer: Any = None,
    task_folder: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    shots: int | None = None,
    max_length: int | None = None,
    batch: int = 1,
    allow_code: bool = False,
    output: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Evaluate a model on tasks of the lm-evaluation-harness; needs the extra `harness`.

    Returns what `output` contains: the model's digests, the settings, and for each task its rows (metric, value,
    standard error, number of questions, shots, version) and all that the harness says of it.

    Args:
        model: a folder as for `depthmix eval` (of a run: a finished one), a model of transformers, wrapped or not, or
            a `Decoder`.
        tasks: names of tasks, groups or suites; see docs/evaluation.md.
        tokenizer: that of transformers, needed for a model in memory.
        task_folder: folder of your own task files. They can name Python functions: their code runs.
        limit: only the first so many questions of each task.
        shots: number of examples in a prompt; by default each task's own.
        max_length: longest context in tokens; by default as the model's configuration says, else 2,048.
        batch: questions at a time.
        allow_code: allow tasks that execute code that the model writes, without a sandbox.
        output: a JSON file that is written after each task. If it has results of the same model and settings, only
            the tasks that are missing are evaluated.
        device: where a folder's model runs; one in memory stays where it is.
        dtype: of the parameters of a folder's model; by default as saved.
    """
    settings = Settings(limit=limit, shots=shots, max_length=max_length, batch=batch)
    chosen = choose_tasks([tasks] if isinstance(tasks, str) else tasks, task_folder, allow_code)
    if isinstance(model, (str, os.PathLike)):
        if tokenizer is not None:
            raise TypeError("got a folder and a tokenizer; expected tokenizer=None: a folder has its own")
        source = os.fspath(model)
        model, tokenizer = open_pretrained(source, device, dtype)
    else:
        source = None
    return run_tasks(chosen, model, tokenizer, settings, None if output is None else user_path(output), source)


def run_tasks(
    chosen: Chosen, model: Any, tokenizer: Any, settings: Settings, output: Path | None, source: str | None = None
) -> dict[str, Any]:
    """Evaluate the tasks that `output` does not have yet, one after the other, and keep each result at once.

    `source` is where the model comes from, for readers of the result.
    """
    if isinstance(model, Decoder):
        model = DepthmixForCausalLM.from_decoder(model)
    check_model(model, tokenizer)
    with evaluating(model, tokenizer, chosen.allow_code), claimed(output):
        engine = make_engine(model, tokenizer, settings)
        document = new_document({"source": source, **describe_model(model, tokenizer)}, stated(settings, engine))
        if output is not None:
            document = read_document(output, document, chosen.definitions)
        pending = [name for name in chosen.suites if name not in document["tasks"]]
        if kept := len(chosen.suites) - len(pending):
            say(f"{output} has {kept} of {len(chosen.suites)} tasks already")
        prepare(chosen, pending, engine.max_length)
        for number, name in enumerate(pending, 1):
            say(f"task {number} of {len(pending)}: {name}")
            document["tasks"][name] = run_task(chosen, engine, name, settings)
            if output is not None:
                write_document(output, document)
    return document


def run_task(chosen: Chosen, engine: Any, name: str, settings: Settings) -> dict[str, Any]:
    """What is kept of a task."""
    begun = time.monotonic()
    result = evaluate_task(chosen, engine, name, settings)
    seconds = time.monotonic() - begun
    say(f"{name}: done in {format_duration(seconds)}")
    where = {"device": str(engine.device), "batch": settings.batch, "seconds": round(seconds, 3)}
    return {"suite": chosen.suites[name], "definition": chosen.definitions[name], **where, **task_entry(name, result)}


def check_model(model: Any, tokenizer: Any) -> None:
    """The harness needs a causal language model and a tokenizer that fits it and names an end of text."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"evaluate got a {type(model).__name__}; expected a folder, a causal language model of transformers, or a "
            "depthmix.Decoder"
        )
    if tokenizer is None:
        raise TypeError(
            "tokenizer=None with a model in memory; expected a tokenizer of transformers: AutoTokenizer, or "
            "depthmix.hf.tokenizer_of(folder) for a run of depthmix"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise ValueError(
            f"the tokenizer has ids up to {largest}, and the model a vocabulary of {rows}; expected ids below {rows}. "
            "Use the tokenizer that the model was trained with, or model.resize_token_embeddings(…) and train it"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer names no end of text (eos_token=None); expected one, with which the harness begins texts "
            "and ends answers. Set tokenizer.eos_token, in a folder in its tokenizer_config.json"
        )


def make_engine(model: Any, tokenizer: Any, settings: Settings) -> Any:
    """The harness's own class around a model; it may add a padding token to the tokenizer, so that gets a copy."""
    models = import_package("lm_eval.models.huggingface", NEEDED_BY, INSTALL)
    return models.HFLM(
        pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=settings.batch, max_length=settings.max_length
    )


def stated(settings: Settings, engine: Any) -> dict[str, Any]:
    """The settings that decide results."""
    return {
        "limit": settings.limit,
        "shots": settings.shots,
        "max_length": engine.max_length,
        "lm_eval": versions()["lm_eval"],
    }


def evaluate_task(chosen: Chosen, engine: Any, name: str, settings: Settings) -> Any:
    """One task or group. The harness sets its seeds at the start of each, so results do not depend on the others."""
    evaluator = import_package("lm_eval", NEEDED_BY, INSTALL)
    return evaluator.simple_evaluate(
        model=engine,
        tasks=[name],
        task_manager=chosen.manager,
        num_fewshot=settings.shots,
        limit=settings.limit,
        log_samples=False,
        confirm_run_unsafe_code=chosen.allow_code,
    )


@contextmanager
def evaluating(model: Any, tokenizer: Any, allow_code: bool) -> Iterator[None]:
    """In evaluation mode, with the tokenizer's end of text as that of answers; afterwards the model is as before.

    Without an end, `generate` would write on after it, and the harness would read that as part of the answer.
    """
    modes, ends = [(part, part.training) for part in model.modules()], model.generation_config.eos_token_id
    logger = logging.getLogger("lm_eval.models.huggingface")
    logger.addFilter(is_of_use)
    if ends is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    try:
        with code_allowed() if allow_code else nullcontext():
            yield
    finally:
        logger.removeFilter(is_of_use)
        model.generation_config.eos_token_id = ends
        for part, training in modes:
            part.training = training


@contextmanager
def code_allowed() -> Iterator[None]:
    """The metric of tasks that execute code asks for a variable of the environment as well."""
    before = os.environ.get(CODE_SWITCH)
    os.environ[CODE_SWITCH] = "1"
    try:
        yield
    finally:
        del os.environ[CODE_SWITCH]
        if before is not None:
            os.environ[CODE_SWITCH] = before


def is_of_use(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "`pretrained` model kwarg is not of type" not in message and "already-initialized model" not in message


def claimed(output: Path | None) -> Any:
    """While open, no other process writes to the file; the lock lies beside it."""
    if output is None:
        return nullcontext()
    if output.is_dir():
        raise IsADirectoryError(f"output={output} is a folder; expected the name of a JSON file")
    output.parent.mkdir(parents=True, exist_ok=True)
    refusal = f"another process is writing {output}; wait for it to finish, or choose another file"
    return lock(output.with_name(f"{output.name}.lock"), refusal)
