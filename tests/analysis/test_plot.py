"""`dm.plot`: what is drawn is what the trace holds, into the axes that were given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import depthmix as dm
from depthmix.analysis import figures
from depthmix.analysis.invariants import make_probe

pyplot = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _no_figure_is_left_open() -> Iterator[None]:
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


def traced(name: str, **options: Any) -> dm.Trace:
    probe = make_probe(name, options)
    return dm.trace(probe.stack, probe.x, probe.sublayers)


def traced_values() -> dm.Trace:
    torch.manual_seed(0)
    model = dm.Decoder(
        dm.DecoderConfig(vocab_size=11, dim=16, layers=5, heads=2, hidden=16, kv_mixer={"name": "depth_attention"})
    )
    return dm.trace(model, torch.arange(8).view(2, 4))


def drawn(axes: Any) -> np.ndarray:
    """The entries of the picture; NaN where nothing is drawn."""
    assert len(axes.images) == 1
    return np.ma.filled(axes.images[0].get_array().astype(float), np.nan)


def expected(matrix: torch.Tensor) -> np.ndarray:
    above = torch.ones_like(matrix).triu(1).bool()
    return matrix.masked_fill(above, float("nan")).numpy()


def test_m_is_drawn_with_a_row_for_each_reader_and_a_column_for_each_source() -> None:
    trace = traced("attnres")
    axes = dm.plot.mixing_matrix(trace)
    np.testing.assert_array_equal(drawn(axes), expected(trace.M.double().mean((0, 1))))
    assert axes.get_ylabel() == "reader"
    assert axes.get_xlabel() == "source\n(mean of 6 tokens)"
    assert axes.get_title() == "attnres"
    assert [t.get_text() for t in axes.get_yticklabels()] == ["1", "2", "3", "4", "5", "6", "7", "head"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0", "1", "2", "3", "4", "5", "6", "7"]
    assert axes.images[0].origin == "upper", "the first reader is the top row"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [("attnres", {"heads": 2}, "head 0"), ("mrla", {}, "channel 0"), ("ddl", {}, "gains of writes")],
)
def test_what_is_drawn_of_many_matrices_is_said(name: str, options: dict[str, Any], words: str) -> None:
    trace = traced(name, **options)
    axes = dm.plot.mixing_matrix(trace)
    first = trace.M if trace.kind == "operator" else trace.M[..., 0, :, :]
    np.testing.assert_array_equal(drawn(axes), expected(first.double().mean((0, 1))))
    assert axes.get_xlabel() == f"source\n({words}, mean of 6 tokens)"


def test_given_axes_are_drawn_into_and_returned() -> None:
    figure, (left, right) = pyplot.subplots(1, 2)
    assert dm.plot.mixing_matrix(traced("residual"), left, colorbar=False, title="") is left
    assert dm.plot.source_weights(traced("attnres"), ax=right, colorbar=False) is right
    assert figure.axes == [left, right]
    assert left.get_title() == ""
    assert pyplot.get_fignums() == [figure.number], "no other figure was made"


def test_entries_beyond_the_limit_are_clipped_and_the_bar_says_so() -> None:
    trace = traced("residual")
    axes = dm.plot.mixing_matrix(trace, limit=0.5)
    assert axes.images[0].get_clim() == (-0.5, 0.5)
    assert axes.images[0].colorbar.extend == "max"
    assert drawn(axes)[-1, 0] == 1, "the entries themselves are kept"
    whole = dm.plot.mixing_matrix(trace)
    assert whole.images[0].get_clim() == (-1, 1)
    assert whole.images[0].colorbar.extend == "neither"


def test_many_layers_have_few_ticks_and_the_head_is_one() -> None:
    probe = make_probe("residual", {}, depth=60)
    axes = dm.plot.mixing_matrix(dm.trace(probe.stack, probe.x, probe.sublayers))
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert len(labels) <= 9
    assert (labels[0], labels[-1], axes.get_yticks()[-1]) == ("1", "head", 60)


def test_entries_that_are_not_finite_leave_the_colours_of_the_others() -> None:
    trace = traced("residual")
    trace.M[..., 5, 2], trace.M[..., 6, 2] = float("nan"), float("inf")
    axes = dm.plot.mixing_matrix(trace)
    assert axes.images[0].get_clim() == (-1, 1)
    axes.figure.canvas.draw()


def test_weights_are_drawn_over_the_sources_by_name() -> None:
    trace = traced("block_attnres", block_sublayers=3)
    axes = dm.plot.source_weights(trace)
    assert trace.weights is not None
    want = trace.weights.double().mean((0, 1)).numpy()
    shown = drawn(axes)
    for row, read in enumerate(trace.reads):
        assert np.flatnonzero(~np.isnan(shown[row])).tolist() == read
        np.testing.assert_array_equal(shown[row, read], want[row, read])
    assert [t.get_text() for t in axes.get_xticklabels()] == trace.source_names
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("reader", "source (+: still growing)")
    assert [t.get_position() for t in axes.texts] == [(1, 1), (1, 2), (2, 4), (2, 5), (3, 7)]


def test_mixed_values_are_drawn_by_attention_layer() -> None:
    trace = traced_values()
    axes = dm.plot.value_matrix(trace)
    assert trace.values is not None
    np.testing.assert_array_equal(drawn(axes), expected(trace.values.double()[..., 0, :, :].flatten(0, 1).mean(0)))
    assert [t.get_text() for t in axes.get_yticklabels()] == ["1", "2", "3", "4", "5"]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("reader", "source\n(attention layers, head 0, mean of 8 tokens)")


@pytest.mark.parametrize("function", ["mixing_matrix", "source_weights", "value_matrix"])
def test_what_is_no_trace_is_refused(function: str) -> None:
    with pytest.raises(TypeError, match=rf"{function} got a Tensor; expected a Trace, as dm\.trace\(model, tokens\)"):
        getattr(dm.plot, function)(torch.eye(3))
    assert pyplot.get_fignums() == []


def test_what_are_no_axes_is_refused() -> None:
    with pytest.raises(TypeError, match="ax is a ndarray; expected matplotlib Axes"):
        dm.plot.mixing_matrix(traced("residual"), pyplot.subplots(1, 2)[1])
    with pytest.raises(TypeError, match="ax is a Figure; expected matplotlib Axes"):
        dm.plot.mixing_matrix(traced("residual"), pyplot.figure())


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_no_range_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match=rf"limit={limit}; expected a positive number"):
        dm.plot.mixing_matrix(traced("residual"), limit=limit)
    assert pyplot.get_fignums() == []


def test_a_trace_without_weights_or_values_names_what_to_draw() -> None:
    with pytest.raises(ValueError, match="residual does not weight a list of sources; draw M with mixing_matrix"):
        dm.plot.source_weights(traced("residual"))
    with pytest.raises(ValueError, match="no attention of the model mixes values over depth; draw M with mixing"):
        dm.plot.value_matrix(traced("residual"))


def test_files_hold_what_plot_draws(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = []
    monkeypatch.setattr(figures, "save", lambda figure, path: pictures.append(figure))
    trace = traced("attnres")
    figures.heat_map(trace, tmp_path / "m.png", "a title")
    figures.weights_map(trace, tmp_path / "w.png")
    np.testing.assert_array_equal(drawn(pictures[0].axes[0]), drawn(dm.plot.mixing_matrix(trace)))
    np.testing.assert_array_equal(drawn(pictures[1].axes[0]), drawn(dm.plot.source_weights(trace)))
    assert pictures[0].axes[0].get_title() == "a title"


def test_without_a_display_a_new_figure_is_made_and_saved(tmp_path: Any) -> None:
    code = """
import sys, torch, depthmix as dm
dm.plot
assert "matplotlib" not in sys.modules, "asking for dm.plot imports no matplotlib"
stack = dm.DepthStack("attnres", dim=8, depth=3)
trace = dm.trace(stack, torch.randn(2, 8), [torch.tanh] * 3)
dm.plot.mixing_matrix(trace).figure.savefig(sys.argv[1])
"""
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    target = tmp_path / "m.png"
    subprocess.run([sys.executable, "-c", code, str(target)], env=environment, check=True)
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("function", ["mixing_matrix", "source_weights"])
def test_without_matplotlib_the_extra_is_named(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced("attnres")
    for module in ("matplotlib", "matplotlib.axes"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r"install it with: pip install 'depthmix\[figures\]'"):
        getattr(dm.plot, function)(trace)
