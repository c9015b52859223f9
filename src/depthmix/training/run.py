"""A run in progress: what the loop, validation, diagnostics and checkpoints share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.analysis.passes import mean_loss
from depthmix.data import Batches, Corpus
from depthmix.parallel.model import DistributedModel
from depthmix.training.config import TrainConfig
from depthmix.training.flops import flops_per_token
from depthmix.training.metrics import MetricsFile
from depthmix.training.optim import Optimizers

Report = Callable[[Mapping[str, Any]], None]


@dataclass
class Progress:
    """What a checkpoint holds in addition to weights, optimiser and the position in the data."""

    step: int = 0  # completed steps
    seconds: float = 0.0  # of training work, over all starts
    losses: list[float] = field(default_factory=list)  # the latest ones, for the running median
    bad: int = 0  # bad losses in a row
    validation: dict[str, float] = field(default_factory=dict)
    memory: int = 0  # peak in bytes, over all starts
    processor_seconds: float = 0.0  # of all work, over all starts and threads
    recording_seconds: float = 0.0  # the part of it that diagnostics and snapshots took


@dataclass
class Run:
    config: TrainConfig
    corpus: Corpus
    device: torch.device
    model: DistributedModel
    optimizers: Optimizers
    batches: Batches
    probe: Tensor  # the fixed batch of the diagnostics
    report: Report
    progress: Progress = field(default_factory=Progress)
    pending: Future[None] | None = None  # a checkpoint that is being written
    metrics: MetricsFile | None = None  # on rank 0

    def __post_init__(self) -> None:
        self.folder = Path(self.config.run.folder)
        self.clock = time.process_time()
        self.flops = flops_per_token(self.config.model, self.config.data.tokens_per_row)

    def is_due(self, every: int) -> bool:
        """True at each multiple of `every`, and after the last step."""
        done = self.progress.step
        return done == self.config.run.steps or (every > 0 and done % every == 0)

    def processor_seconds(self) -> float:
        """Processor time of this run so far, over all starts and all threads of this process."""
        now = time.process_time()
        self.progress.processor_seconds += now - self.clock
        self.clock = now
        return self.progress.processor_seconds

    def probe_model(self) -> nn.Module | None:
        """The model for diagnostics, see `DistributedModel.probe`; every rank must call this."""
        model: nn.Module | None = self.model.probe()
        return model

    def probe_loss(self, model: nn.Module) -> Tensor:
        with self.model.autocast():
            loss: Tensor = mean_loss(model, self.probe)
        return loss

    def log_metrics(self, kind: str, values: Mapping[str, Any]) -> None:
        if self.metrics is not None:
            done = self.progress.step
            line = {"kind": kind, "step": done, "tokens": done * self.config.tokens_per_step, **values}
            self.metrics.write(line)
            self.report(line)

    def close(self) -> None:
        """Wait for a pending checkpoint and close the metrics, before the folder is released."""
        if self.pending is not None:
            self.pending.exception()
        if self.metrics is not None:
            self.metrics.close()
