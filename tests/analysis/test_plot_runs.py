"""Figures of runs: what is drawn is what metrics.jsonl holds, however far the run has come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import depthmix as dm
from depthmix.analysis import survey
from depthmix.analysis.plot.curves import edges
from tests.decoders import some_tokens, tiny

pyplot = pytest.importorskip("matplotlib.pyplot")
DEPTH, READERS = 3, 4


@pytest.fixture(autouse=True)
def _no_figure_is_left_open() -> Iterator[None]:
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


def recording(step: int) -> dict[str, Any]:
    """Lists with two numbers each are those of two streams."""
    return {
        "kind": "depth",
        "step": step,
        "tokens": 100 * step,
        "output_norm": [step + 1.0, step + 2.0, step + 3.0],
        "state_norm": [[3.0 * step, 4.0 * step], [1.0, 1.0], [2.0]],
        "gradient_norm": [1e-3, None, "nan"],
        "read_norm": [1.0, 2.0, 3.0, 4.0 * step],
        "contribution": [0.5, 0.25, 0.125],
        "embedding_share": [1.0, 0.5, 0.25, 0.2],
        "stream_distance": None,
    }


def losses(step: int, kind: str, loss: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "tokens": 100 * step, "seconds": 2.0 * step, "loss": loss}


def write_run(folder: Path, *, last: str = "") -> Path:
    """Ten steps, with recordings at 2, 4 and 8, and validation at 5 and 10."""
    lines = [losses(step, "train", 10.0 / step) for step in range(1, 11)]
    lines += [recording(step) for step in (2, 4, 8)]
    lines += [losses(5, "validation", 2.5), losses(10, "validation", 1.25)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + last)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


# Norms over depth.


def line_of(axes: Any, k: int = 0) -> list[float]:
    return [float(y) for y in axes.lines[k].get_ydata()]


def test_the_last_recording_is_drawn_over_sublayers(run: Path) -> None:
    axes = dm.plot.depth_norms(run, series="output_norm")
    assert line_of(axes) == [9, 10, 11]
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3]
    assert axes.get_yscale() == "log"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("sublayer", "norm of the output")
    assert axes.get_legend() is None


def test_several_streams_are_one_line_of_their_root_mean_square(run: Path) -> None:
    assert line_of(dm.plot.depth_norms(run))[:2] == pytest.approx([(12.5 * 64) ** 0.5, 1.0])


def test_numbers_that_were_not_recorded_or_not_finite_are_gaps(run: Path) -> None:
    np.testing.assert_array_equal(line_of(dm.plot.depth_norms(run, series="gradient_norm")), [1e-3, np.nan, np.nan])


def test_what_the_head_reads_is_a_point_of_its_own(run: Path) -> None:
    axes = dm.plot.depth_norms(run, series="read_norm", log=False)
    assert line_of(axes) == [1, 2, 3, 32]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "2", "3", "head"]
    assert axes.get_yscale() == "linear"


def test_a_survey_and_one_measured_pass_are_drawn_beside_a_run(run: Path) -> None:
    model = tiny(mixer="attnres")
    found = survey(model, [some_tokens(1, 4)])
    with dm.analysis.measuring(model.depth) as magnitudes:
        model.loss(some_tokens(1, 4)).backward()
    axes = dm.plot.depth_norms(run, series="output_norm", label="run")
    assert dm.plot.depth_norms(found, axes, series="output_norm", label="survey") is axes
    dm.plot.depth_norms(magnitudes, axes, series="output_norm", label="pass", colour="red")
    assert line_of(axes, 1) == found.figures["magnitudes"]["output_norm"]
    assert line_of(axes, 2) == magnitudes.to_dict()["output_norm"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["run", "survey", "pass"]
    colours = [line.get_color() for line in axes.lines]
    assert len(set(colours)) == 3
    assert colours[2] == "red"


def test_what_magnitudes_do_not_have_is_said(run: Path) -> None:
    model = tiny(mixer="attnres")
    with dm.analysis.measuring(model.depth) as magnitudes:
        model(some_tokens(1, 4))  # no backward pass
    with pytest.raises(ValueError, match=r"these magnitudes have no gradient_norm; they have state_norm, output_norm"):
        dm.plot.depth_norms(magnitudes, series="gradient_norm")
    with pytest.raises(ValueError, match=r"the recordings of .*run have no stream_distance; they have state_norm"):
        dm.plot.depth_norms(run, series="stream_distance")
    with pytest.raises(ValueError, match="series='norm'; expected one of 'state_norm'"):
        dm.plot.depth_norms(run, series="norm")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"depth_norms got a dict; expected a Survey, a dm\.analysis\.Magnitudes or"):
        dm.plot.depth_norms({})  # type: ignore[arg-type]
    assert pyplot.get_fignums() == []


# Files of runs.


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    cut = write_run(tmp_path / "run", last='{"kind": "depth", "step": 9, "tokens": 900, "output_no')
    assert line_of(dm.plot.depth_norms(cut, series="output_norm")) == [9, 10, 11]
    assert len(dm.plot.over_training(cut).collections[0].get_array()[0]) == 3


def test_another_damaged_line_is_an_error_with_its_number(tmp_path: Path) -> None:
    damaged = write_run(tmp_path / "run")
    path = damaged / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:20]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 4, is damaged: it is not valid JSON"):
        dm.plot.loss_curves(damaged)


def test_a_folder_without_a_run_or_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no metrics\.jsonl; expected the folder of a run"):
        dm.plot.over_training(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(losses(1, "train", 2.0)) + "\n")
    with pytest.raises(ValueError, match=r"has no recordings over depth; train with run\.depth_every above 0"):
        dm.plot.over_training(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no losses yet"):
        dm.plot.loss_curves(tmp_path)
    assert pyplot.get_fignums() == []


# Over training.


def test_a_map_has_a_column_for_each_recording_and_a_row_for_each_sublayer(run: Path) -> None:
    axes = dm.plot.over_training(run)
    mesh = axes.collections[0]
    np.testing.assert_array_equal(mesh.get_array(), [[3, 5, 9], [4, 6, 10], [5, 7, 11]])
    borders = mesh.get_coordinates()
    assert borders[0, :, 0].tolist() == [100, 300, 600, 1000]
    assert borders[:, 0, 1].tolist() == [0.5, 1.5, 2.5, 3.5], "the first sublayer is the lowest row"
    assert (mesh.norm.vmin, mesh.norm.vmax, type(mesh.norm).__name__) == (3, 11, "LogNorm")
    assert axes.get_ylabel() == "sublayer"


def test_shares_have_a_linear_scale_and_the_heads_row(run: Path) -> None:
    axes = dm.plot.over_training(run, series="embedding_share", colorbar=False)
    assert type(axes.collections[0].norm).__name__ == "Normalize"
    assert [t.get_text() for t in axes.get_yticklabels()] == ["1", "2", "3", "head"]
    assert len(axes.figure.axes) == 1


def test_numbers_that_are_missing_leave_holes_and_the_colours_of_the_others(run: Path) -> None:
    axes = dm.plot.over_training(run, series="gradient_norm")
    shown = np.ma.filled(axes.collections[0].get_array().astype(float), np.nan)
    assert np.isnan(shown[1:]).all()
    assert np.isfinite(shown[0]).all()
    axes.figure.canvas.draw()


def test_lines_are_one_for_each_recording_and_later_ones_are_lighter(run: Path) -> None:
    axes = dm.plot.over_training(run, view="lines", log=False)
    assert [line_of(axes, k) for k in range(3)] == [[3, 4, 5], [5, 6, 7], [9, 10, 11]]
    brightness = [sum(line.get_color()[:3]) for line in axes.lines]
    assert brightness == sorted(brightness)
    assert axes.get_ylabel() == "norm of the output"
    with pytest.raises(ValueError, match="view='line'; expected one of 'map', 'lines'"):
        dm.plot.over_training(run, view="line")  # type: ignore[arg-type]


def test_one_recording_is_one_column() -> None:
    assert edges([100.0]) == [99.5, 100.5]


# Losses.


def test_losses_of_training_are_thin_and_those_of_validation_have_markers(run: Path) -> None:
    axes = dm.plot.loss_curves(run)
    train, validation = axes.lines
    assert train.get_xydata().tolist() == [[100.0 * s, 10.0 / s] for s in range(1, 11)]
    assert validation.get_xydata().tolist() == [[500, 2.5], [1000, 1.25]]
    assert train.get_linewidth() < validation.get_linewidth()
    assert train.get_color() == validation.get_color()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["run"]


def test_the_fall_at_the_beginning_does_not_decide_the_scale(run: Path) -> None:
    low, high = dm.plot.loss_curves(run).get_ylim()
    assert low < 1.0
    assert 5.0 < high < 6.0, "the loss after a fifth of the run, not the 10 at its beginning"


def test_runs_are_drawn_over_seconds_by_the_names_of_their_folders(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("a/seed_0", "b/seed_0")]
    axes = dm.plot.loss_curves(folders, axis="seconds", train=False)
    assert [line.get_xdata().tolist() for line in axes.lines] == [[10, 20], [10, 20]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a/seed_0", "b/seed_0"]
    assert axes.get_xlabel() == "seconds of training"


def test_names_of_folders_are_no_formulas_and_none_is_hidden(tmp_path: Path) -> None:
    axes = dm.plot.loss_curves([write_run(tmp_path / "a$_$"), write_run(tmp_path / "_b")], train=False)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [r"a\$_\$", " _b"]
    axes.figure.canvas.draw()


def test_a_run_without_validation_shows_its_training(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(losses(s, "train", 3.0 / s)) + "\n" for s in (1, 2, 3)))
    axes = dm.plot.loss_curves(tmp_path, train=False, labels=["mine"])
    assert line_of(axes) == [3.0, 1.5, 1.0]
    assert axes.get_legend().get_texts()[0].get_text() == "mine"


def test_labels_and_axes_of_losses_are_checked(run: Path) -> None:
    with pytest.raises(ValueError, match="2 labels for 1 runs"):
        dm.plot.loss_curves([run], labels=["a", "b"])
    with pytest.raises(ValueError, match="folders is empty"):
        dm.plot.loss_curves([])
    with pytest.raises(ValueError, match="axis='steps'; expected one of 'tokens', 'seconds'"):
        dm.plot.loss_curves(run, axis="steps")  # type: ignore[arg-type]
