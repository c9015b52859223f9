"""A step of `depthmix train` against a bare one: what the loop adds to forward, backward and optimiser."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from depthmix.bench.report import BASELINE
from depthmix.bench.step import ratios, with_control
from depthmix.models import DecoderConfig
from depthmix.parallel.layout import Layout
from depthmix.training import DataConfig, RunConfig, TrainConfig, loop
from depthmix.training.run import Run

LOOP, ALONE = "depthmix train", "without the optimiser"


def run(model: Mapping[str, Any], tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Both train one model, in turns; the loop adds the next batch, clipping, the check of the loss and metrics."""
    with tempfile.TemporaryDirectory() as folder:
        run = loop.begin(prepared(Path(folder), model, tokens), Layout(), torch.device("cpu"), lambda event: None)
        try:
            return {"loop": ratios(with_control(variants(run)), rounds, "loop")}
        finally:
            run.close()


def prepared(folder: Path, model: Mapping[str, Any], tokens: int) -> TrainConfig:
    """A run without end on random text, so that only the steps take time."""
    source = folder / "text"
    source.mkdir()
    letters = random.Random(0)
    for name in ("a.txt", "b.txt"):
        (source / name).write_text("".join(letters.choices("abcdefgh \n", k=100 * tokens)))
    data = DataConfig(source=str(source), folder=str(folder / "tokens"), tokens_per_row=tokens, rows=1, validation=0.5)
    (folder / "run").mkdir()
    return TrainConfig(
        model=DecoderConfig(**model),
        data=data,
        run=RunConfig(folder=str(folder / "run"), steps=10**9, validate_batches=1),
    )


def variants(run: Run) -> dict[str, Callable[[], None]]:
    row = next(run.batches)

    def alone() -> None:
        run.model.loss_of(row).backward()
        run.model.zero_grad()

    def bare() -> None:
        run.model.loss_of(row).backward()
        run.optimizers.step(1.0)
        run.model.zero_grad()

    return {BASELINE: bare, LOOP: lambda: loop.step(run), ALONE: alone}
