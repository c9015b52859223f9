"""Measurements during training, each at its own interval; none of them changes the weights.

Axes: B batch, T token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from depthmix.data import Corpus, validation_batches
from depthmix.parallel import ranks
from depthmix.training import bad_loss, diagnostics
from depthmix.training.config import TrainConfig
from depthmix.training.run import Run


def run_validation(run: Run) -> None:
    """Log the validation loss when it is due. One that is not finite stops the run before a checkpoint is written."""
    if not run.is_due(run.config.run.validate_every):
        return
    run.progress.validation = validate(run)
    if not math.isfinite(loss := run.progress.validation["loss"]):
        bad_loss.stop(run, f"the validation loss is {loss}")
    run.log_metrics("validation", {"seconds": run.progress.seconds, **run.progress.validation})


@torch.no_grad()
def validate(run: Run) -> dict[str, float]:
    """Loss and bits per byte of the first validation batches."""
    run.model.train(False)
    total, rows = 0.0, 0
    for tokens in held_out(run.corpus, run.config):
        total += len(tokens) * run.model.evaluate(tokens.to(run.device))
        rows += len(tokens)
    run.model.train()
    loss = total / rows
    return {"loss": loss, "bits_per_byte": loss / math.log(2) / run.corpus.bytes_per_token}


def held_out(corpus: Corpus, config: TrainConfig) -> Iterator[Tensor]:
    """The batches [B, T + 1] that every validation of a run reads."""
    data = config.data
    return validation_batches(corpus.validation, data.tokens_per_row, data.rows, config.run.validate_batches)


def run_diagnostics(run: Run) -> None:
    """When due, on the fixed batch: log norms over depth and what layers read; save M and the weights over sources."""
    depth_due, snapshot_due = run.is_due(run.config.run.depth_every), run.is_due(run.config.run.snapshot_every)
    if not depth_due and not snapshot_due:
        return
    progress, started = run.progress, run.processor_seconds()
    model = run.probe_model()
    if model is None:
        return
    magnitudes, trace = diagnostics.measure(model, lambda: run.probe_loss(model))
    if snapshot_due and ranks.rank() == 0:
        path = run.folder / "snapshots" / f"step-{progress.step:08d}.safetensors"
        diagnostics.save_snapshot(path, progress.step, run.config.model, trace)
    if depth_due:
        values = {
            **magnitudes.to_dict(),
            **diagnostics.read_statistics(trace),
            "query_norm": diagnostics.query_norms(model),
        }
        spent = progress.recording_seconds + run.processor_seconds() - started
        costs = {"recording_seconds": spent, "processor_seconds": progress.processor_seconds}
        run.log_metrics("depth", {**values, **costs})
    progress.recording_seconds += run.processor_seconds() - started
