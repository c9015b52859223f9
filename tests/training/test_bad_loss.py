"""A loss or a norm that is not finite is told as it is: on the console, in the metrics, in the error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.cli.train_progress import TrainingProgress
from depthmix.parallel.distributed import DistributedDecoder
from depthmix.training import BadLoss, loop, train
from depthmix.training.metrics import MetricsFile, read_metrics
from depthmix.training.run import Run
from tests.runs import lines, tiny_run


def strict(text: str) -> Any:
    """JSON as other languages read it, without Python's NaN and Infinity."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_skipped_step_tells_the_loss_as_it_is(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run(tmp_path / "run", run__steps=3, run__on_bad_loss="skip")
    plain, progress, events = DistributedDecoder.backward, TrainingProgress(config, 1, lambda steps: 1.0 * steps), []
    steps: list[float] = []

    def second_is_bad(model: DistributedDecoder, batches: Any) -> float:
        steps.append(plain(model, batches))
        return value if len(steps) == 2 else steps[-1]

    def report(event: Any) -> None:
        events.append(event)
        progress.report(event)

    monkeypatch.setattr(DistributedDecoder, "backward", second_is_bad)
    train(config, report=report)
    assert f"step 2/3 skipped: the loss is {value}\n" in capsys.readouterr().err
    [event] = [event for event in events if event["kind"] == "skipped"]
    assert str(event["loss"]) == str(value), "a number, for whoever is called"
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        strict(line)
    [line] = lines(tmp_path / "run", "skipped")
    assert (line["step"], line["loss"], line["problem"]) == (2, str(value), f"the loss is {value}")
    assert str(float(line["loss"])) == str(value)
    assert math.isfinite(line["grad_norm"])


def test_a_norm_that_is_not_finite_is_told_with_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedDecoder, "clip", lambda model, limit: math.inf)
    words = r"step 1: the gradient's norm is inf, at a loss of 5\.\d+\. Layer with the largest output"
    with pytest.raises(BadLoss, match=words):
        train(tiny_run(tmp_path / "run"))


def test_the_error_tells_the_loss_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedDecoder, "backward", lambda model, batches: math.nan)
    with pytest.raises(BadLoss, match=r"^step 1: the loss is nan\. Layer with the largest output"):
        train(tiny_run(tmp_path / "run"))


def test_bad_steps_in_a_row_are_counted_over_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One skipped and in the checkpoint, the next with another start that stops: two, and no ordinal."""
    plain, step = loop.step, DistributedDecoder.backward
    at: list[int] = []

    def watched(run: Run) -> None:
        at[:] = [run.progress.step]
        plain(run)

    def backward(model: DistributedDecoder, batches: Any) -> float:
        return math.nan if at[0] in (3, 4) else step(model, batches)

    monkeypatch.setattr(loop, "step", watched)
    monkeypatch.setattr(DistributedDecoder, "backward", backward)
    changes = {"run__checkpoint_every": 1, "run__depth_every": 0, "run__validate_every": 0}

    def interrupt(event: Any) -> None:
        if event["kind"] == "checkpoint" and event["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny_run(tmp_path / "run", run__on_bad_loss="skip", **changes), report=interrupt)
    with pytest.raises(BadLoss, match=r"^step 5: the loss is nan \(2 bad steps in a row\)\. Layer with the largest"):
        train(tiny_run(tmp_path / "run", **changes))


def test_numbers_inside_lists_are_written_as_valid_json_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "depth", "step": 1, "output_norm": [NaN, 1.5]}\n')  # of depthmix 0.1
    log = MetricsFile(path, 1)
    log.write({"kind": "depth", "step": 2, "output_norm": [math.inf, 2.5], "weight_entropy": None})
    log.close()
    for line in path.read_text().splitlines():
        strict(line)
    assert [line["output_norm"] for line in read_metrics(path)] == [["nan", 1.5], ["inf", 2.5]]


def test_a_tracker_gets_numbers(tmp_path: Path) -> None:
    from depthmix.training.metrics import scalars

    line = {"kind": "skipped", "step": 1, "loss": math.nan, "problem": "the loss is nan", "norms": [math.inf]}
    found = dict(scalars(line))
    assert found.keys() == {"skipped/loss", "skipped/norms/0"}
    assert torch.tensor([*found.values()]).isfinite().sum() == 0
