"""The training loop. A run that was stopped, however it happened, resumes to the same final weights, bit for bit.

A step depends on the weights, the optimiser's state and the position in the data: all three are in a checkpoint.
Random numbers of a step are seeded by (seed, step, rank).

Axes: B batch, T token.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from depthmix.data import Batches
from depthmix.parallel import ranks
from depthmix.parallel.layout import Layout
from depthmix.support.checks import check_device
from depthmix.support.files import FORMAT, seed_of
from depthmix.training import diagnostics
from depthmix.training.bad_loss import WINDOW, check_loss, skip_or_stop
from depthmix.training.build import check_outside_source, distribute, export, layout_of, open_corpus
from depthmix.training.config import TrainConfig
from depthmix.training.folder import Result, claim_folder, finished_result, rank_contact, stop_signals, write_result
from depthmix.training.metrics import METRICS, MetricsFile, memory_bytes
from depthmix.training.optim import Optimizers
from depthmix.training.precision import check_precision
from depthmix.training.resume import load_checkpoint, save_checkpoint, wait_for_checkpoint
from depthmix.training.retrofit import count_parameters
from depthmix.training.run import Report, Run
from depthmix.training.schedule import rate_factor
from depthmix.training.validation import held_out, run_diagnostics, run_validation


class Interrupted(RuntimeError):
    """The run was asked to stop; it can be resumed."""


def train(
    config: TrainConfig,
    *,
    resume: bool = True,
    report: Report = lambda event: None,
) -> Result:
    """Train, or resume the unfinished run in the folder; of a complete run, only the result is read.

    Args:
        config: everything that decides the result.
        resume: False removes an earlier run from the folder and restarts from step 0.
        report: called on rank 0 with each line of metrics.jsonl, and with events of kind "begin" and "checkpoint".
    """
    device = check_device(config.run.device)
    check_precision(config.run.precision, device)
    check_outside_source(config.data, Path(config.run.folder))
    layout = layout_of(config)
    if ranks.launched() > 1:
        open_corpus(config.data)  # before the process group, which could time out while one rank prepares the data
    with rank_contact(), ranks.process_group(device, config.parallel.timeout), claim_folder(config, resume):
        if (result := finished_result(config)) is not None:
            return result
        run = begin(config, layout, device, report)
        try:
            run_steps(run)
            tokenizer = run.corpus.folder / "tokenizer.json"
            export(run.model.whole(), run.folder / "final", config, folder=run.folder, tokenizer=tokenizer)
            return write_result(run.folder, make_result(run))
        finally:
            run.close()


def begin(config: TrainConfig, layout: Layout, device: torch.device, report: Report) -> Run:
    """Set up a run from its newest intact checkpoint, or from initial weights if there is none."""
    data = config.data
    corpus = ranks.first_then_others(lambda: open_corpus(data))
    if corpus.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size}; expected at least {corpus.vocab_size}, the number of token "
            f"ids in {data.path}"
        )
    model = distribute(config, layout, device)
    batches = Batches(
        corpus.train,
        tokens_per_row=data.tokens_per_row,
        rows=data.rows,
        seed=config.run.seed,
        rank=model.data_rank,
        ranks=layout.data,
    )
    probe = next(held_out(corpus, config))[: diagnostics.PROBE[0], : diagnostics.PROBE[1]].to(device)
    run = Run(config, corpus, device, model, Optimizers(model.parts.values(), config.optimizer), batches, probe, report)
    load_checkpoint(run)
    if ranks.rank() == 0:
        run.metrics = MetricsFile(run.folder / METRICS, run.progress.step, config.run.tracker)
        notes = {part.depth.facts.note for part in model.parts.values()}
        model_size = {"parameters": count_parameters(config.model).total, "layout": notes.pop()}
        length = {"steps": config.run.steps, "train_tokens": len(corpus.train)}
        processes = layout.describe() if layout.size > 1 else ""
        report({"kind": "begin", "step": run.progress.step, "processes": processes, **length, **model_size})
    return run


def run_steps(run: Run) -> None:
    """Train to the last step, or until a signal asks to stop; a checkpoint is written in both cases."""
    config, progress = run.config.run, run.progress
    with stop_signals() as stop_requested:
        while progress.step < config.steps:
            step(run)
            run_validation(run)
            run_diagnostics(run)
            run.processor_seconds()  # for the checkpoint
            stop = bool(ranks.total(stop_requested()))
            if stop or run.is_due(config.checkpoint_every):
                save_checkpoint(run)
            if stop and progress.step < config.steps:
                wait_for_checkpoint(run)
                raise Interrupted(f"stopped after step {progress.step} of {config.steps}; a checkpoint is saved")
    wait_for_checkpoint(run)


def step(run: Run) -> None:
    """One training step; the optimiser does not step if the loss is bad and may be skipped."""
    config, progress, started = run.config, run.progress, time.perf_counter()
    torch.manual_seed(seed_of(config.run.seed, progress.step, ranks.rank()))
    factor = rate_factor(progress.step, config.run.steps, config.schedule)
    loss = run.model.backward([next(run.batches).to(run.device) for _ in range(config.run.accumulate)])
    norm = run.model.clip(config.optimizer.clip)
    problem = check_loss(loss, norm, progress.losses, config.run.bad_loss_factor)
    progress.step += 1
    if problem is None:
        run.optimizers.step(factor)
        run.model.update_balance()
        progress.losses = [*progress.losses, loss][-WINDOW:]
        progress.bad = 0
    else:
        progress.bad += 1
        skip_or_stop(run, problem)
    run.model.zero_grad()
    seconds = time.perf_counter() - started
    progress.seconds += seconds
    progress.memory = max(progress.memory, memory_bytes(run.device))
    values = {
        "loss": loss,
        "lr": factor * config.optimizer.lr,
        "grad_norm": norm,
        "seconds": progress.seconds,
        "tokens_per_second": config.tokens_per_step / seconds,
        "flops": run.flops * progress.step * config.tokens_per_step,
        "memory_bytes": progress.memory,
    }
    if problem is None:
        run.log_metrics("train", values)
    else:
        run.log_metrics("skipped", {**values, "problem": problem})


def make_result(run: Run) -> Result:
    config, progress = run.config, run.progress
    tokens = config.run.steps * config.tokens_per_step
    return Result(
        steps=config.run.steps,
        tokens=tokens,
        seconds=progress.seconds,
        tokens_per_second=tokens / progress.seconds,
        validation_loss=progress.validation["loss"],
        bits_per_byte=progress.validation["bits_per_byte"],
        peak_memory_bytes=progress.memory,
        flops=run.flops * tokens,
        parameters=count_parameters(config.model).total,
        config_digest=config.digest,
        data_digest=run.corpus.digest,
        mixer=config.model.saved()["mixer"],
        kv_mixer=config.model.saved()["kv_mixer"],
        processor_seconds=run.processor_seconds(),
        recording_seconds=progress.recording_seconds,
        format=FORMAT,
    )
