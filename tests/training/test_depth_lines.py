"""The diagnostics of a run: one recorded pass for all of them, in every form of decoder, at a known cost."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import depthmix as dm
from depthmix.studies.arms import Grid, Size, make_arms
from depthmix.training import TrainConfig, diagnostics, override, train
from depthmix.training.diagnostics import least_interval, measure, read_statistics
from depthmix.training.metrics import scalars
from tests.decoders import some_tokens, tiny
from tests.runs import lines, tiny_run


def norms_by_hooks(model: dm.Decoder, tokens: Tensor) -> tuple[list[float], list[float]]:
    """Of outputs and their gradients, as earlier versions took them: by hooks on the sublayers."""
    outputs, gradients = [], []

    def norm(x: Tensor) -> float:
        return float((x.detach().float() ** 2).sum(-1).mean().sqrt())

    def record(module: Any, inputs: Any, returned: tuple[Tensor, Any]) -> None:
        outputs.append(norm(returned[0]))
        returned[0].register_hook(lambda g: gradients.append(norm(g)))

    handles = [sublayer.register_forward_hook(record) for sublayer in model.sublayers]
    model.loss(tokens).backward()
    for handle in handles:
        handle.remove()
    return outputs, gradients[::-1]


@pytest.mark.parametrize("mixer", ["residual", "block_attnres", "attnres", "mhc"])
@pytest.mark.parametrize("form", ["dense", "moe", "looped"])
def test_outputs_and_their_gradients_mean_what_they_meant(form: str, mixer: str) -> None:
    model, tokens = tiny(form, mixer=mixer), some_tokens(2, 9)
    outputs, gradients = norms_by_hooks(model, tokens)
    model.zero_grad()
    for every in (None, 2):  # with activation checkpointing, too
        model.checkpoint_every = every
        magnitudes, trace = measure(model, lambda: model.loss(tokens))
        assert model.checkpoint_every == every
        line = magnitudes.to_dict()
        assert line["output_norm"] == pytest.approx(outputs, rel=1e-5)
        assert line["gradient_norm"] == pytest.approx(gradients, rel=1e-5)
        depth = model.config.depth
        assert len(line["state_norm"]) == len(line["contribution"]) == depth
        assert len(line["read_norm"]) == len(line["read_gradient_norm"]) == depth + 1
        assert torch.allclose(trace.M, dm.trace(model, tokens).M, atol=1e-10)
    assert all(p.grad is None for p in model.parameters())


def test_one_pass_serves_all_diagnostics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    plain = dm.Decoder.hidden
    monkeypatch.setattr(dm.Decoder, "hidden", lambda *args: passes.append(1) or plain(*args))
    train(tiny_run(tmp_path / "run", run__steps=2, run__validate_batches=1, run__depth_every=0, run__snapshot_every=0))
    assert len(passes) == 2 + 1 + 1, "two steps, a validation of one batch, one recording"


FIELDS = {"embedding_norm", "read_norm", "output_norm", "state_norm", "contribution", "read_gradient_norm"}
FIELDS |= {"gradient_norm", "stream_distance", "query_norm", "shares_of", "weight_entropy", "locality"}
FIELDS |= {"embedding_share", "weight_spread", "sinks", "effective_rank", "recording_seconds", "processor_seconds"}


def test_a_line_and_a_snapshot_of_blocks_tell_of_sources(tmp_path: Path) -> None:
    result = train(tiny_run(tmp_path / "run", depth=6, mixer__block_sublayers=3))
    first, last = lines(tmp_path / "run", "depth")
    assert last.keys() == FIELDS | {"kind", "step", "tokens"}
    assert last["shares_of"] == "weights"
    assert len(last["sinks"]) == 3, "the embedding and two blocks"
    assert all(0 <= x <= math.log(n) + 1e-6 for x, n in zip(last["weight_entropy"], [1, 2, 2, 2, 3, 3, 3], strict=True))
    assert all(len(norms) == 1 for norms in last["state_norm"])
    assert last["stream_distance"] is None
    assert 1 <= last["effective_rank"] <= 4
    assert 0 < first["recording_seconds"] < last["recording_seconds"] <= result.recording_seconds
    assert last["recording_seconds"] < last["processor_seconds"] <= result.processor_seconds
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    assert saved["recording_seconds"] == result.recording_seconds
    with safe_open(tmp_path / "run" / "snapshots" / "step-00000012.safetensors", "pt") as file:
        assert set(file.keys()) == {"M", "weights", "deviation", "entropy"}
        weights, metadata = file.get_tensor("weights"), file.metadata()
    assert metadata["shares_of"] == "weights"
    sources = json.loads(metadata["sources"])
    assert sources["source_names"] == ["embedding", "block 1", "block 2"]
    assert sources["partial"] == [False, True, True, False, True, True, False]
    assert weights.shape == (7, 3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(7))


def test_a_line_of_streams_tells_of_each_and_of_their_distance(tmp_path: Path) -> None:
    train(tiny_run(tmp_path / "run", "mhc", run__steps=6, mixer__streams=3))
    line = lines(tmp_path / "run", "depth")[-1]
    assert all(len(norms) == 3 for norms in line["state_norm"])
    assert len(line["stream_distance"]) == 4
    assert all(0 <= x < 2 for x in line["stream_distance"])
    assert line["shares_of"] == "M"
    assert len(line["sinks"]) == 5
    assert 1 <= line["effective_rank"] <= 3 + 1e-6
    tracked = dict(scalars(line))
    assert tracked["depth/state_norm/3/2"] == line["state_norm"][3][2]
    assert "depth/shares_of" not in tracked


@pytest.mark.parametrize("mixer", ["ddl", "mrla", "delta_attnres", "linear_attention"])
def test_every_kind_of_mixing_is_recorded(mixer: str, tmp_path: Path) -> None:
    train(tiny_run(tmp_path / "run", mixer, run__steps=1))
    line = lines(tmp_path / "run", "depth")[-1]
    assert line.keys() >= FIELDS
    assert (line["effective_rank"] is None) == (mixer == "ddl")
    if mixer == "delta_attnres":
        assert line["weight_entropy"][0] is line["locality"][-1] is None, "rows that are plain sums weight nothing"


def test_values_of_a_line_are_those_of_its_trace() -> None:
    model, tokens = tiny(mixer={"name": "attnres", "heads": 2}), some_tokens(2, 5)
    _, trace = measure(model, lambda: model.loss(tokens))
    line = read_statistics(trace)
    weights = trace.weights.flatten(0, 2)
    row = [-sum(float(a) * math.log(float(a)) for a in alpha[4] if a > 0) for alpha in weights]
    assert line["weight_entropy"][4] == pytest.approx(sum(row) / len(row))
    assert line["locality"][4] == pytest.approx(float(weights[:, 4, 4].mean()))
    assert line["effective_rank"] == pytest.approx(
        float(dm.effective_rank(trace.M).flatten()[[2, 4, 6, 8, 11, 13, 15, 17]].mean())
    )


def test_a_study_spaces_its_recordings_by_the_tokens_between_them() -> None:
    assert least_interval(2048) == 25
    assert least_interval(10**6) == 1
    for steps, every in ((150, 25), (586, 58), (10, 25)):
        grid = Grid.parse(["residual"], [Size(depth=4, dim=16)], settings=["data.rows=8", f"run.steps={steps}"])
        assert make_arms(grid)[0].config.run.depth_every == every
    grid = Grid.parse(["residual"], [Size(depth=4, dim=16)], settings=["run.steps=150", "run.depth_every=1"])
    assert make_arms(grid)[0].config.run.depth_every == 1


def test_recording_costs_below_a_hundredth_of_the_steps_between(tmp_path: Path) -> None:
    """Processor time, the least of two; 24 sublayers of width 96, 8 rows of 256 tokens."""
    config = override(TrainConfig.from_dial(24, "attnres", dim=96, folder=str(tmp_path / "run")), "data.rows", 8)
    tokens = torch.randint(0, 256, (8, 256))
    model = dm.Decoder(config.model)
    probe = tokens[: diagnostics.PROBE[0], : diagnostics.PROBE[1]]

    def least(work: Any) -> float:
        times = []
        for _ in range(2):
            started = time.process_time()
            work()
            times.append(time.process_time() - started)
        return min(times)

    def record() -> None:
        magnitudes, trace = measure(model, lambda: model.loss(probe))
        magnitudes.to_dict()
        read_statistics(trace)

    step = least(lambda: model.loss(tokens).backward())
    assert least(record) < 0.01 * least_interval(config.tokens_per_step) * step


def test_processor_time_goes_on_over_a_restart(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", run__steps=12, run__checkpoint_every=6)
    stopped = []

    def stop_once(event: Any) -> None:
        if event["kind"] == "checkpoint" and not stopped:
            stopped.append(event)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, report=stop_once)
    before = lines(tmp_path / "run", "depth")[-1]
    result = train(config)
    assert result.recording_seconds > before["recording_seconds"] > 0
    assert result.processor_seconds > before["processor_seconds"]
