"""`dm.plot.routes` and `dm.plot.importance`: arcs, colours and points are those of the survey and the ablation."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba

import depthmix as dm
from depthmix.analysis import Survey, ablate, survey
from tests.decoders import some_tokens, tiny

pyplot = pytest.importorskip("matplotlib.pyplot")
ROOT = Path(__file__).parent.parent.parent
BLUE, ORANGE, BLACK, PALE = "#0072B2", "#D55E00", "#000000", "#d4d4d4"


@pytest.fixture(autouse=True)
def _no_figure_is_left_open() -> Iterator[None]:
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def found() -> Survey:
    """Of six sublayers; each share is another one, and some are negative."""
    made = survey(tiny(mixer="attnres"), [some_tokens(1, 4)])
    share = torch.zeros(7, 7)
    share[0, 0] = 1
    share[1, 0], share[2, 1], share[3, 0], share[4, 4], share[6, 2] = 0.9, 0.2, 0.4, -0.3, 0.1
    made.tensors["share"] = share
    return made


def effect(kind: str, name: str, mass: float, change: float, **others: Any) -> dict[str, Any]:
    spread = {"mean": change, "low": change - 0.01, "high": change + 0.03}
    blank = {"sources": None, "row": None, "source": None, "edges": 1, "controls": None}
    kl = {"mean": 2 * change, "low": None, "high": None}
    return {"kind": kind, "name": name, "mass": mass, "loss": spread, "kl": kl, **blank, **others}


ABLATION: dict[str, Any] = {
    "effects": [
        effect("family", "embedding", 0.5, 1.0, controls={"count": 2, "loss": [0.1, 0.3], "kl": [0.2, 0.6]}),
        effect("source", "source 2", 0.2, 0.05, source=2),
        effect("route", "route 0→2", 0.9, 0.2, row=1, source=0),
        effect("route", "route 1→3", 0.2, -0.1, row=2, source=1),
        effect("value", "value 1→2", 0.3, 0.02, row=1, source=0),
    ]
}


def arcs(axes: Any) -> dict[str, Any]:
    return {patch.get_gid(): patch for patch in axes.patches}


# Routes.


def test_the_strongest_routes_are_arcs_as_wide_as_their_share(found: Survey) -> None:
    drawn = arcs(dm.plot.routes(found, most=4))
    assert set(drawn) == {"route 0→2", "route 0→4", "route 4→5", "route 1→3"}, "not the first row's, and not the fifth"
    unit = drawn["route 0→2"].get_linewidth() / 0.9
    for name, share in {"route 0→4": 0.4, "route 4→5": 0.3, "route 1→3": 0.2}.items():
        assert drawn[name].get_linewidth() == pytest.approx(unit * share), name
    assert [name for name, arc in drawn.items() if arc.get_linestyle() == "--"] == ["route 4→5"], "a negative share"


def test_an_arc_ends_at_its_reader_above_for_attention_and_below_for_an_mlp(found: Survey) -> None:
    axes = dm.plot.routes(found)
    for name, kind in {"route 0→2": "mlp", "route 1→3": "attn", "route 0→4": "mlp", "route 2→7": "head"}.items():
        arc = arcs(axes)[name]
        (start, low), *_, (end, high) = arc.get_path().vertices
        assert f"route {start:g}→{end:g}" == name
        assert low == high == 0
        peak = arc.get_path().interpolated(50).vertices[:, 1]
        assert (peak[np.abs(peak).argmax()] < 0) == (kind == "mlp")
        assert arc.get_edgecolor()[:3] == to_rgba({"attn": BLUE, "mlp": ORANGE, "head": BLACK}[kind])[:3]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0", "2", "4", "head"]
    low, high = axes.get_ylim()
    assert low < -2 * 0.9
    assert high > math.sqrt(5), "the arc from 2 to the head is inside"


def test_colours_are_measured_effects_and_what_was_not_cut_is_pale(found: Survey) -> None:
    axes = dm.plot.routes(found, ABLATION)
    drawn = arcs(axes)
    assert drawn["route 0→2"].get_edgecolor()[:3] == pytest.approx(to_rgba(ORANGE)[:3], abs=0.01)
    red, green, blue = drawn["route 1→3"].get_edgecolor()[:3]
    assert blue > green > red, "the loss falls without it"
    assert drawn["route 0→4"].get_edgecolor()[:3] == to_rgba(PALE)[:3]
    assert len(axes.figure.axes) == 2, "a colour bar"
    clipped = arcs(dm.plot.routes(found, ABLATION, limit=0.1, colorbar=False))
    assert clipped["route 1→3"].get_edgecolor()[:3] == pytest.approx(to_rgba(BLUE)[:3], abs=0.01)


def test_an_ablation_of_the_same_model_finds_its_routes_by_row_and_source() -> None:
    model, tokens = tiny(mixer="attnres"), some_tokens(4, 6)
    cuts = ablate(model, tokens, ["route 0→2", "route 3→5"], controls=0)
    drawn = arcs(dm.plot.routes(survey(model, [tokens]), cuts, most=100))
    pale = to_rgba(PALE)[:3]
    assert {name for name, arc in drawn.items() if arc.get_edgecolor()[:3] != pale} == {"route 0→2", "route 3→5"}


def test_routes_of_nothing_are_refused(found: Survey) -> None:
    with pytest.raises(TypeError, match="routes got a Trace; expected a Survey"):
        dm.plot.routes(dm.trace(tiny(mixer="attnres"), some_tokens(1, 2)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="most=0; expected a whole number above 0"):
        dm.plot.routes(found, most=0)
    with pytest.raises(ValueError, match="none of the 1 strongest routes was cut in this ablation"):
        dm.plot.routes(found, {"effects": ABLATION["effects"][3:]}, most=1)
    with pytest.raises(TypeError, match="routes got a list; expected an Ablation"):
        dm.plot.routes(found, [])  # type: ignore[arg-type]
    empty = copy.deepcopy(found)
    empty.tensors["share"].fill_(float("nan"))
    with pytest.raises(ValueError, match="this survey has no routes"):
        dm.plot.routes(empty)
    assert pyplot.get_fignums() == []


# Importance.


def points(axes: Any) -> dict[str, tuple[str, list[tuple[float, float]]]]:
    """Markers and places of each entry of the legend."""
    containers = {c.get_label(): c.lines[0] for c in axes.containers}
    plain = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    lines = {**plain, **containers}
    return {name: (line.get_marker(), [tuple(p) for p in line.get_xydata().tolist()]) for name, line in lines.items()}


def test_each_kind_of_cut_has_a_marker_at_its_mass_and_its_change_of_the_loss() -> None:
    assert points(dm.plot.importance(ABLATION)) == {
        "random cuts of as many": ("_", [(0.5, 0.1), (0.5, 0.3)]),
        "family of sources": ("D", [(0.5, 1.0)]),
        "source": ("o", [(0.2, 0.05)]),
        "route": ("^", [(0.9, 0.2), (0.2, -0.1)]),
        "route of values": ("s", [(0.3, 0.02)]),
    }


def test_bars_are_the_intervals_and_none_where_there_is_none() -> None:
    def ends(axes: Any, name: str) -> list[Any]:
        (container,) = [c for c in axes.containers if c.get_label() == name]
        return [segment[:, 1].tolist() for segment in container.lines[2][0].get_segments()]

    np.testing.assert_allclose(ends(dm.plot.importance(ABLATION), "route"), [[0.19, 0.23], [-0.11, -0.07]])
    assert ends(dm.plot.importance(ABLATION, measure="kl"), "route") == [[0.4, 0.4], [-0.2, -0.2]]


def test_divergence_has_its_own_points_and_controls() -> None:
    axes = dm.plot.importance(ABLATION, measure="kl", log=True)
    assert points(axes)["random cuts of as many"][1] == [(0.5, 0.2), (0.5, 0.6)]
    assert points(axes)["source"][1] == [(0.2, 0.1)]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "symlog")
    assert axes.get_ylabel() == "divergence (nats per token)"


def test_the_largest_effects_are_named_and_a_survey_says_their_kind(found: Survey) -> None:
    assert [text.get_text() for text in dm.plot.importance(ABLATION, labels=2).texts] == ["embedding", "0→2"]
    names = [text.get_text() for text in dm.plot.importance(ABLATION, found).texts]
    assert names == ["embedding", "0→2 (mlp)", "1→3 (attn)", "2 (mlp)", "1→2"]
    assert len(dm.plot.importance(ABLATION, labels=0).texts) == 0


def test_names_cover_no_other_name_and_no_point() -> None:
    many = [effect("route", f"route {k}→{k + 9}", 0.3 + 0.01 * (k % 5), 0.01 * (k % 4)) for k in range(30)]
    figure, axes = pyplot.subplots(figsize=(3.3, 2.6), layout="constrained")
    dm.plot.importance({"effects": many}, ax=axes, labels=30)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert 2 < len(boxes) < 30, "some find no room"
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    places = axes.transData.transform([(e["mass"], e["loss"]["mean"]) for e in many])
    assert not any(box.contains(*place) for box in boxes for place in places)


def test_what_is_no_ablation_or_another_models_is_refused(found: Survey) -> None:
    with pytest.raises(TypeError, match="importance got a mapping without effects; expected an Ablation"):
        dm.plot.importance({})
    with pytest.raises(ValueError, match="importance got an ablation without effects"):
        dm.plot.importance({"effects": []})
    with pytest.raises(TypeError, match="importance got a int; expected a Survey"):
        dm.plot.importance(ABLATION, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="measure='mass'; expected one of 'loss', 'kl'"):
        dm.plot.importance(ABLATION, measure="mass")  # type: ignore[arg-type]
    other = {"effects": [effect("route", "route 0→9", 0.1, 0.1, row=8, source=0)]}
    with pytest.raises(ValueError, match="'route 0→9' is no cut of the survey's model: that has 6 sublayers"):
        dm.plot.importance(other, found)


# The page's figures.


def test_the_script_draws_every_figure_of_the_page_from_its_own_runs(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of {i * i % 97}" for i in range(4000)))
    script = ROOT / "examples" / "figures.py"
    given = ["out", "--depth", "4", "--dim", "16", "--tokens", "8192", "--source", "text.txt"]
    done = subprocess.run([sys.executable, script, *given], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = set(re.findall(r"\]\(images/figures/(\w+\.png)\)", (ROOT / "docs" / "figures.md").read_text()))
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "out" / "figures").iterdir()}
    assert set(drawn) == shown
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 3000 for picture in drawn.values())
    kept = {path.name: path.stat().st_size for path in (ROOT / "docs" / "images" / "figures").iterdir()}
    assert set(kept) == shown
    assert max(kept.values()) < 60_000


def test_a_picture_of_vectors_stays_small(found: Survey, tmp_path: Path) -> None:
    for name, draw in {"m": dm.plot.mixing_matrix, "w": dm.plot.source_weights, "r": dm.plot.routes}.items():
        figure, axes = pyplot.subplots(figsize=(3.3, 2.6), layout="constrained")
        draw(found, ax=axes)
        figure.savefig(tmp_path / f"{name}.pdf")
        assert (tmp_path / f"{name}.pdf").stat().st_size < 40_000
