"""A loss that is not finite, or far above the running median: skip the step, or stop and name the likely layer."""

from __future__ import annotations

import math
import statistics
from typing import NoReturn

from depthmix.training.diagnostics import largest_layer
from depthmix.training.manifest import list_checkpoints
from depthmix.training.resume import wait_for_checkpoint
from depthmix.training.run import Run

WINDOW, ENOUGH = 64, 16  # losses in the running median, and the fewest it needs
SKIPS = 16  # most bad losses in a row that a run skips


class BadLoss(RuntimeError):
    """The loss is not finite, or far above the running median."""


def check_loss(loss: float, norm: float, before: list[float], factor: float) -> str | None:
    """What is wrong with a loss or with the norm of its gradient, if anything."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the gradient's norm is {norm}, at a loss of {loss:.4g}"
    if len(before) >= ENOUGH and loss > factor * (usual := statistics.median(before)):
        return f"the loss is {loss:.4g}, {loss / usual:.1f} times the running median of {usual:.4g}"
    return None


def skip_or_stop(run: Run, problem: str) -> None:
    """Discard this step's expert counts and continue without its gradient, or raise BadLoss."""
    if run.config.run.on_bad_loss == "stop" or run.progress.bad > SKIPS:
        bad = run.progress.bad
        stop(run, problem + (f" ({bad} bad steps in a row)" if bad > 1 else ""))
    run.model.forget_load()


def stop(run: Run, problem: str) -> NoReturn:
    wait_for_checkpoint(run)
    model = run.probe_model()
    layer = "see rank 0" if model is None else largest_layer(model, lambda: run.probe_loss(model))
    saved = list_checkpoints(run.folder / "checkpoints")
    raise BadLoss(
        f"step {run.progress.step}: {problem}. Layer with the largest output: {layer}. Last good checkpoint: "
        f"{saved[-1] if saved else 'none'}. Train in another folder with a lower optimizer.lr (now "
        f"{run.config.optimizer.lr:g}), or resume in this one with run.on_bad_loss=skip or another run.bad_loss_factor"
    )
