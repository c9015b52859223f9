"""What a run writes into a checkpoint, and how it resumes from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from depthmix.training import checkpoint
from depthmix.training.build import check_tokens
from depthmix.training.config import TrainConfig
from depthmix.training.folder import CONFIG, check_same
from depthmix.training.manifest import path_of
from depthmix.training.run import Progress, Run


def save_checkpoint(run: Run) -> None:
    wait_for_checkpoint(run)
    config, step = run.config.run, run.progress.step
    if run.metrics is not None:
        run.metrics.sync()
    folder = run.folder / "checkpoints"
    state = {
        **state_tensors(run),
        "progress": dataclasses.asdict(run.progress),
        "data": run.batches.state(),
        "corpus": run.corpus.digest,
        "random": {"seed": config.seed, "step": step},  # seeds the random numbers of the next step
        "config": run.config.saved(),
    }
    run.pending = checkpoint.save(folder, step, state, keep=config.keep, asynchronous=config.asynchronous)
    if run.metrics is not None:
        run.report({"kind": "checkpoint", "step": step, "path": str(path_of(folder, step))})


def wait_for_checkpoint(run: Run) -> None:
    """Wait until the pending checkpoint is complete; its errors are raised here."""
    pending, run.pending = run.pending, None
    if pending is not None:
        pending.result()


def load_checkpoint(run: Run) -> None:
    """Load the newest intact checkpoint, if there is one."""
    loaded = checkpoint.load_latest(run.folder / "checkpoints", state_tensors(run))
    if loaded is not None:
        restore(run, loaded[1])


def state_tensors(run: Run) -> dict[str, Any]:
    """Weights and optimiser; loading fills them in place."""
    return {"model": run.model.state_dict(), "optimizer": run.optimizers.state()}


def restore(run: Run, state: Mapping[str, Any]) -> None:
    """Restore everything except tensors, which are filled already."""
    problem = f"{run.folder / CONFIG} differs from the configuration of the checkpoints"
    check_same(TrainConfig.from_saved(state["config"], run.folder / "checkpoints"), run.config, problem)
    check_tokens(run.corpus, state["corpus"], run.folder)
    run.progress = Progress(**state["progress"])
    run.batches.restore(state["data"])
