"""Over training: curves, magnitudes and what is left of a pattern when outputs are put into blocks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from depthmix.report.dynamics import (
    MOST_POINTS,
    MOST_RECORDINGS,
    correlate,
    curves,
    over_training,
    packed_snapshots,
    patterns,
)
from depthmix.report.packed import unpack
from depthmix.report.reading import SavedRun, Snapshot, read_run_folder
from tests.runs import lines


def planted(**fields: object) -> SavedRun:
    return SavedRun(folder=Path("run"), name="run", **fields)  # type: ignore[arg-type]


def lower(n: int, seed: int = 0) -> np.ndarray:
    return np.tril(np.random.default_rng(seed).random((n, n)) + 0.01)


def test_magnitudes_over_training_are_those_of_the_metrics(trained: Path) -> None:
    found = over_training(read_run_folder(trained / "attnres"))
    recorded = lines(trained / "attnres", "depth")
    assert found is not None
    assert found["steps"] == [line["step"] for line in recorded] == [6, 12]
    series = {name: unpack(packed) for name, packed in found["series"].items()}
    assert np.allclose(series["output_norm"], [line["output_norm"] for line in recorded], rtol=1e-6)
    assert np.allclose(series["entropy"], [line["weight_entropy"] for line in recorded], rtol=1e-5, atol=1e-6)
    assert {name: values.shape for name, values in series.items()} == {
        **dict.fromkeys(("state_norm", "output_norm", "contribution", "gradient_norm"), (2, 6)),
        **dict.fromkeys(("read_norm", "entropy", "embedding_share", "locality"), (2, 7)),
    }


def test_only_blocks_have_a_running_sum(trained: Path) -> None:
    block = over_training(read_run_folder(trained / "block_attnres"))
    assert block is not None
    assert block["series"]["partial_norm"] == block["series"]["state_norm"]
    residual = over_training(read_run_folder(trained / "residual"))
    assert residual is not None
    assert "partial_norm" not in residual["series"]


def test_the_state_of_several_streams_is_their_root_mean_square() -> None:
    found = over_training(
        planted(lines=[{"kind": "depth", "step": 1, "output_norm": [1.0], "state_norm": [[3.0, 4.0]]}])
    )
    assert found is not None
    assert unpack(found["series"]["state_norm"])[0, 0] == pytest.approx(math.sqrt(12.5))


def test_a_number_that_is_not_finite_is_a_gap() -> None:
    line = {"kind": "depth", "step": 1, "output_norm": [1.0, "inf"], "gradient_norm": "nan", "locality": [None, 0.5]}
    found = over_training(planted(lines=[line]))
    assert found is not None
    assert np.isnan(unpack(found["series"]["output_norm"])).tolist() == [[False, True]]
    assert np.isnan(unpack(found["series"]["gradient_norm"])).all()
    assert np.isnan(unpack(found["series"]["locality"])).tolist() == [[True, False, True]]


def test_long_runs_are_thinned_and_keep_their_ends() -> None:
    steps = 10 * MOST_POINTS
    train = [{"kind": "train", "step": s, "tokens": s, "seconds": s / 2, "loss": float(s)} for s in range(1, steps + 1)]
    depth = [{"kind": "depth", "step": s, "tokens": s, "output_norm": [1.0]} for s in range(1, 500)]
    run = planted(lines=train + depth)
    curve = curves(run)["train"]
    assert len(curve["loss"]) == MOST_POINTS
    assert curve["tokens"][-1] == steps
    assert curve["loss"][0] == pytest.approx(5.5), "the mean of the steps that a point stands for"
    found = over_training(run)
    assert found is not None
    assert (found["steps"][0], found["steps"][-1], len(found["steps"])) == (1, 499, MOST_RECORDINGS)


def test_snapshots_keep_their_matrices_and_their_tokens(trained: Path) -> None:
    run = read_run_folder(trained / "block_attnres")
    found = packed_snapshots(run)
    assert found is not None
    assert found["tokens"] == [6 * 64, 12 * 64]
    assert np.allclose(unpack(found["M"])[-1], run.snapshots[-1].M, atol=1e-3)
    assert unpack(found["weights"]).shape == (2, 7, len(found["source_names"]))
    assert found["values"] is None


def test_many_large_snapshots_are_thinned() -> None:
    run = planted(snapshots=[Snapshot(step=s, M=lower(97)) for s in range(40)])
    found = packed_snapshots(run)
    assert found is not None
    assert (found["steps"][0], found["steps"][-1]) == (0, 39)
    assert len(found["M"]["data"]) < 250_000


def test_a_pattern_correlates_with_itself_whatever_its_scale() -> None:
    M = lower(8)
    overall, rows = correlate(M, 3 * M)
    assert overall == pytest.approx(1)
    assert np.allclose(rows[2:], 1)
    assert all(map(math.isnan, rows[:2])), "rows of one and of two sources have no correlation"


def test_independent_patterns_do_not_correlate_and_opposite_ones_do_negatively() -> None:
    assert abs(correlate(lower(80, 1), lower(80, 2))[0]) < 0.08
    M = lower(8)
    equal = np.tril(np.ones((8, 8))) / np.arange(1, 9)[:, None]
    shares = M / M.sum(-1, keepdims=True)
    opposite = np.clip(2 * equal - shares, 1e-9, None)
    assert correlate(M, opposite)[0] < -0.8


def test_the_correlation_of_a_row_is_pearsons() -> None:
    a, b = lower(6, 1), lower(6, 2)
    rows = correlate(a, b)[1]
    assert rows[5] == pytest.approx(np.corrcoef(a[5], b[5])[0, 1])


def test_equal_weights_correlate_with_nothing() -> None:
    overall, rows = correlate(np.tril(np.ones((5, 5))), lower(5))
    assert math.isnan(overall)
    assert all(map(math.isnan, rows))


def test_only_block_and_full_of_the_same_depth_are_compared(trained: Path) -> None:
    runs = [read_run_folder(trained / name) for name in ("residual", "block_attnres", "attnres")]
    (found,) = patterns(runs) or []
    assert (found["block"], found["full"]) == ("block_attnres", "attnres")
    assert len(found["by_row"]) == 7
    runs[2].lines, runs[2].snapshots = [], runs[2].snapshots[:0]
    assert patterns(runs) is None
    assert patterns(runs[:2]) is None
