"""A run with planted routes: trace, routes on the page and ablation name the same one, and what has no effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import depthmix as dm
from depthmix.analysis import Survey
from depthmix.cli import main
from depthmix.training import train
from tests.report.browser import Watched, check_installed
from tests.runs import tiny_run
from tools.chromium import launched

SURE = 40.0  # a logit beside which the others have no weight


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sublayer 7 reads only source 2; sublayer 5 reads only source 1, but what it computes is thrown away."""
    folder = tmp_path_factory.mktemp("planted") / "run"
    train(tiny_run(folder, "attnres", depth=8, run__steps=2, model__mixer__mixing="static"))
    model = dm.load_model(folder / "final")
    with torch.no_grad():
        for mixer in model.depth.all_mixers():
            if mixer.site.index:
                mixer.logits.zero_()
        model.depth[6].logits[2] = model.depth[4].logits[1] = SURE
        model.sublayers[4].o_proj.weight.zero_()
        for parameter in (*model.sublayers.parameters(), *model.head.parameters()):
            parameter.mul_(3)
    dm.save_model(model, folder / "final")
    assert main(["report", str(folder), "--tokens", "512"]) == 0
    return folder


def test_the_trace_names_the_planted_route(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    share = Survey.load(planted)["share"]
    assert share[6].tolist() == pytest.approx([0, 0, 1, 0, 0, 0, 0, 0, 0], abs=1e-5)
    assert main(["trace", str(planted), "--tokens", "256", "--output", str(planted.parent / "again")]) == 0
    printed = capsys.readouterr().out
    assert any("2" in line and "7" in line and "100" in line for line in printed.splitlines()), printed


def test_the_ablation_tells_it_from_a_route_without_effect(planted: Path) -> None:
    effects = {e["name"]: e for e in json.loads((planted / "ablation.json").read_text())["effects"]}
    matters, idle = effects["route 2→7"], effects["route 1→5"]
    assert matters["mass"] == pytest.approx(1)
    assert idle["mass"] == pytest.approx(1)
    assert matters["kl"]["low"] > 1e-4
    assert abs(idle["loss"]["mean"]) < 1e-6
    assert abs(idle["kl"]["mean"]) < 1e-6


def test_the_page_lists_and_draws_it_among_the_strongest(planted: Path) -> None:
    check_installed()
    with launched() as browser, Watched(browser, (planted / "report.html").as_uri()) as shown:
        rows = shown.page.locator("#routes table tbody tr").all_inner_texts()
        assert sorted(row.split("\t")[:3] for row in rows[:2]) == [
            ["1 (attention)", "5 (attention)", "100 %"],
            ["2 (MLP)", "7 (attention)", "100 %"],
        ]
        arcs: Any = shown.all("route").evaluate_all("(nodes) => nodes.map((n) => [n.dataset.row, n.dataset.source])")
        assert ["6", "2"] in arcs
