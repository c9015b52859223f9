"""Figures of surveys, and single rows of traces: entries, rows, names and bars are those of the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import depthmix as dm
from depthmix.analysis import Survey, survey
from tests.decoders import some_tokens, tiny

pyplot = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _no_figure_is_left_open() -> Iterator[None]:
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


def model_of(mixer: str = "block_attnres", **changes: Any) -> dm.Decoder:
    return tiny(mixer={"name": mixer, **changes.pop("options", {})}, **changes)


def surveyed(mixer: str = "block_attnres", **changes: Any) -> Survey:
    return survey(model_of(mixer, **changes), [some_tokens(2, 5)], decode=lambda ids: f"<{ids[0]}>")


def drawn(axes: Any) -> np.ndarray:
    return np.ma.filled(axes.images[0].get_array().astype(float), np.nan)


def lower(matrix: torch.Tensor) -> np.ndarray:
    above = torch.ones_like(matrix).triu(1).bool()
    return matrix.double().masked_fill(above, float("nan")).numpy()


@pytest.mark.parametrize("quantity", ["M_mean", "M_std", "contribution", "share"])
def test_each_quantity_of_a_survey_is_drawn_below_the_diagonal(quantity: Any) -> None:
    found = surveyed()
    axes = dm.plot.mixing_matrix(found, quantity=quantity)
    tensor = found.tensors[quantity]
    np.testing.assert_array_equal(drawn(axes), lower(tensor[0] if tensor.dim() == 3 else tensor))
    low, high = axes.images[0].get_clim()
    assert low == (-high if quantity in ("M_mean", "share") else 0), "colours on both sides of 0 only where values are"
    assert axes.get_title() == "block_attnres"


@pytest.mark.parametrize("quantity", ["M_mean", "M_std", "contribution", "share"])
@pytest.mark.parametrize("mixer", ["attnres", "ddl"])
def test_a_trace_of_the_same_tokens_gives_the_same_picture_as_a_survey(mixer: str, quantity: Any) -> None:
    model, tokens = model_of(mixer), some_tokens(2, 5)
    from_trace = dm.plot.mixing_matrix(dm.trace(model, tokens), quantity=quantity)
    from_survey = dm.plot.mixing_matrix(survey(model, [tokens]), quantity=quantity)
    np.testing.assert_allclose(drawn(from_trace), drawn(from_survey), atol=1e-5, rtol=1e-5)
    assert from_trace.get_xlabel() == from_survey.get_xlabel()


@pytest.mark.parametrize(("rows", "first"), [("attn", 0), ("mlp", 1)])
def test_rows_of_one_kind_keep_the_numbers_of_their_sublayers(rows: Any, first: int) -> None:
    found = surveyed()
    axes = dm.plot.mixing_matrix(found, rows=rows)
    np.testing.assert_array_equal(drawn(axes), lower(found.tensors["M_mean"][0])[first:-1:2])
    assert [t.get_text() for t in axes.get_yticklabels()] == [str(i + 1) for i in range(first, 6, 2)]
    assert axes.get_title() == f"block_attnres: {'attention' if rows == 'attn' else 'MLPs'}"
    weights = dm.plot.source_weights(found, rows=rows)
    for y, row in enumerate(range(first, 6, 2)):
        assert np.flatnonzero(~np.isnan(drawn(weights)[y])).tolist() == found.figures["reads"][row]


def test_another_head_is_another_picture_and_is_named() -> None:
    found = surveyed("attnres", options={"heads": 2})
    axes = dm.plot.mixing_matrix(found, head=1)
    np.testing.assert_array_equal(drawn(axes), lower(found.tensors["M_mean"][1]))
    assert "head 1" in axes.get_xlabel()
    weights = dm.plot.source_weights(found, head=1, quantity="weights_std")
    shown, wanted = drawn(weights), found.tensors["weights_std"][1].double().numpy()
    np.testing.assert_array_equal(shown[~np.isnan(shown)], wanted[~np.isnan(shown)])
    with pytest.raises(ValueError, match="head=2; expected a whole number from 0 to 1"):
        dm.plot.mixing_matrix(found, head=2)


def test_mixed_values_of_a_survey_are_those_of_its_tensor() -> None:
    found = surveyed("residual", kv_mixer={"name": "depth_attention"})
    axes = dm.plot.value_matrix(found, head=1)
    np.testing.assert_array_equal(drawn(axes), lower(found.tensors["values_mean"][1]))
    assert "head 1" in axes.get_xlabel()


def test_what_a_survey_lacks_or_a_trace_cannot_know_is_said() -> None:
    found = surveyed("residual")
    with pytest.raises(ValueError, match="residual does not weight a list of sources; draw M with mixing_matrix"):
        dm.plot.source_weights(found)
    with pytest.raises(ValueError, match="this survey has no values"):
        dm.plot.value_matrix(found)
    with pytest.raises(ValueError, match="rows='attn': a trace does not hold the kinds of its sublayers"):
        dm.plot.mixing_matrix(dm.trace(model_of(), some_tokens(1, 3)), rows="attn")
    with pytest.raises(ValueError, match="rows='mpl'; expected one of 'all', 'attn', 'mlp'"):
        dm.plot.mixing_matrix(found, rows="mpl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quantity='M'; expected one of 'M_mean'"):
        dm.plot.mixing_matrix(found, quantity="M")  # type: ignore[arg-type]


def test_25_rows_at_a_columns_width_have_no_labels_that_overlap() -> None:
    found = survey(model_of("attnres", layers=12), [some_tokens(1, 4)])
    for draw in (dm.plot.mixing_matrix, dm.plot.source_weights):
        figure, axes = pyplot.subplots(figsize=(3.3, 3.0), layout="constrained")
        draw(found, axes)
        figure.canvas.draw()
        boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert len(boxes) > 4
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        names = axes.get_xticklabels()
        gaps = np.diff([axes.transData.transform((x, 0))[0] for x in axes.get_xticks()])
        assert min(gaps) > names[0].get_fontsize() * figure.dpi / 72, "names that lean stand further apart than a line"


# One token.


def heights(axes: Any) -> list[float]:
    return [bar.get_height() for bar in axes.patches]


def test_bars_are_one_row_of_one_token_and_lines_across_them_the_mean() -> None:
    trace = dm.trace(model_of("attnres"), some_tokens(2, 5))
    M = trace.M.flatten(0, 1).double()
    axes = dm.plot.token_row(trace, 7, 3)
    assert heights(axes) == M[7, 3, :4].tolist()
    np.testing.assert_allclose(axes.lines[-1].get_ydata(), M[:, 3, :4].mean(0))
    assert (axes.get_title(), axes.get_xlabel()) == ("token 7, sublayer 4", "source (line: mean of 10 tokens)")
    assert heights(dm.plot.token_row(trace, (1, 2), 3)) == heights(axes), "the third token of the second row"
    assert heights(dm.plot.token_row(trace, 7, -1)) == M[7, -1].tolist()


def test_a_row_of_weights_has_a_bar_for_each_source_that_it_reads() -> None:
    found = surveyed(options={"block_sublayers": 2})
    axes = dm.plot.token_row(found, 4, 3, quantity="weights")
    reads = found.figures["reads"][3]
    assert heights(axes) == found.tensors["table_weights"][4, 0, 3, reads].double().tolist()
    assert [t.get_text() for t in axes.get_xticklabels()] == [found.figures["source_names"][i] for i in reads]
    assert axes.get_title() == f"token 4 {found.figures['table']['tokens'][4]!r}, sublayer 4"


def test_bars_below_zero_have_another_colour() -> None:
    trace = dm.trace(model_of("attnres"), some_tokens(1, 2))
    trace.M[0, 0, 2, 1] = -0.5
    colours = [bar.get_facecolor() for bar in dm.plot.token_row(trace, 0, 2).patches]
    assert colours[0] == colours[2] != colours[1]


def test_tokens_and_rows_that_are_not_there_are_refused() -> None:
    trace = dm.trace(model_of("attnres"), some_tokens(2, 5))
    with pytest.raises(ValueError, match="token=10; expected a whole number from 0 to 9"):
        dm.plot.token_row(trace, 10, 0)
    with pytest.raises(ValueError, match=r"token=\(2, 0\); expected 2 whole numbers from 0, at most \(1, 4\)"):
        dm.plot.token_row(trace, (2, 0), 0)
    with pytest.raises(ValueError, match="row=7; expected a whole number from 0 to 6"):
        dm.plot.token_row(trace, 0, 7)
    with pytest.raises(ValueError, match="residual does not weight a list of sources"):
        dm.plot.token_row(surveyed("residual"), 0, 0, quantity="weights")
    with pytest.raises(TypeError, match="token_row got a Tensor; expected a Trace"):
        dm.plot.token_row(trace.M, 0, 0)  # type: ignore[arg-type]
    assert pyplot.get_fignums() == []


# Ranks.


def test_ranks_are_drawn_in_a_row_for_each_model() -> None:
    named = {"one": surveyed("residual"), "other": surveyed("attnres"), "operators": surveyed("ddl")}
    axes = dm.plot.ranks(named)
    assert [t.get_text() for t in axes.get_yticklabels()] == ["one", "other", "operators"]
    lines = {line.get_label(): line for line in axes.lines}
    known = [named[name].figures["rank"] for name in ("one", "other")]
    means = lines["semiseparable: mean to largest"]
    assert (list(means.get_xdata()), list(means.get_ydata())) == ([rank["mean"] for rank in known], [0, 1])
    assert list(lines["allowed by the formula"].get_xdata()) == [r["declared"] for r in known if r["declared"]]
    assert [(text.get_text(), text.get_position()[1]) for text in axes.texts] == [("no rank: operators", 2)]


def test_ranks_of_operators_alone_or_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="none of these models has a rank"):
        dm.plot.ranks(surveyed("ddl"))
    with pytest.raises(ValueError, match="surveys is empty"):
        dm.plot.ranks({})
    with pytest.raises(TypeError, match="ranks got a Trace; expected a Survey"):
        dm.plot.ranks({"a": dm.trace(model_of(), some_tokens(1, 2))})  # type: ignore[dict-item]
