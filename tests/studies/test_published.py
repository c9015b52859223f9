"""A paper's own points and laws, drawn and listed beside one's own and part of no fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from depthmix.cli import main
from depthmix.studies.page import Provenance
from depthmix.studies.published import PUBLISHED, draw_published
from depthmix.studies.scaling import Law
from depthmix.studies.scaling_page import Scaling, draw_scaling, fit_scaling, render
from tests.studies.test_scaling import COMPUTE, point

PAPER = PUBLISHED["attnres-paper"]
ABOUT = Provenance(command="depthmix scaling", machine="a machine", data="stdlib")
# arXiv 2603.15031, Table 2: millions of active parameters, billions of tokens, PreNorm, Block, Full, mHC-lite
TABLE_2 = [
    (194, 38.7, 1.931, 1.909, 1.899, 1.906),
    (241, 45.4, 1.895, 1.875, 1.874, 1.869),
    (296, 62.1, 1.829, 1.809, 1.804, 1.807),
    (436, 87.9, 1.766, 1.746, 1.737, 1.747),
    (528, 119.0, 1.719, 1.693, 1.692, 1.694),
]


def study() -> Scaling:
    law = Law(a=3.0, b=0.06, unit=1e16)
    return fit_scaling([point("residual", str(k), c, law.loss(c)) for k, c in enumerate(COMPUTE)])


def test_the_table_is_the_papers_cell_by_cell() -> None:
    columns = [*PAPER.losses.values()]
    cells = [*zip(PAPER.parameters, PAPER.tokens, *columns, strict=True)]
    assert cells == [(n * 1e6, d * 1e9, *losses) for n, d, *losses in TABLE_2]
    days = [compute / (1e15 * 24 * 3600) for compute in PAPER.compute]
    assert days == pytest.approx([0.5214, 0.7598, 1.2765, 2.6614, 4.3633], abs=1e-4)


def test_a_refit_of_the_table_gives_its_exponents() -> None:
    exponents = {arm: round(f.law.b, 4) for arm, f in PAPER.refit().items()}
    assert exponents == {"PreNorm": 0.0549, "Block AttnRes": 0.0565, "Full AttnRes": 0.0558, "mHC-lite": 0.0549}
    for arm, (_, b) in PAPER.printed.items():
        assert exponents[arm] == pytest.approx(b, abs=0.0025)


def test_the_printed_laws_count_more_than_6_n_d() -> None:
    """The compute at which a printed law has a row's loss, over 6 · N · D: 1.2 to 1.4, as the note says."""
    ratios = [
        Law(a=a, b=b).compute(loss) / (compute / 8.64e19)  # type: ignore[operator]
        for arm, (a, b) in PAPER.printed.items()
        for loss, compute in zip(PAPER.losses[arm], PAPER.compute, strict=True)
    ]
    assert (round(min(ratios), 1), round(max(ratios), 1)) == (1.2, 1.4)
    assert "1.2 to 1.4 times 6·N·D" in PAPER.note


def test_what_is_beside_is_listed_as_the_papers_and_moves_no_fit(tmp_path: Path) -> None:
    own = study()
    both = dataclasses.replace(own, beside=PAPER)
    assert (both.fits, both.factors, both.verdicts) == (own.fits, own.factors, own.verdicts)
    pages = [render(scaling, {}, ABOUT, {}, tmp_path) for scaling in (own, both)]
    assert "arXiv 2603.15031" not in pages[0]
    before, _, after = pages[1].partition("## For comparison: arXiv 2603.15031, Table 2\n")
    assert "AttnRes" not in before
    assert "These numbers are the paper's. No law or factor above uses them." in after
    assert "| attnres-436m | 436M | 87.9B | 2.3e+20 | 2.66 | 1.766 | 1.746 | 1.737 | 1.747 |" in after
    assert "| Block AttnRes | 1.841 | 0.0565 | 1.870 C^(−0.058) |" in after
    assert "| mHC-lite | 1.838 | 0.0549 |  |" in after
    told = json.loads(json.dumps(both.to_dict()))
    assert told["beside"]["losses"]["Full AttnRes"][-1] == 1.692
    assert round(told["beside"]["refit"]["PreNorm"]["b"], 4) == 0.0549
    assert own.to_dict()["beside"] is None


def test_the_papers_points_are_drawn_at_their_compute_with_their_name(tmp_path: Path) -> None:
    from depthmix.analysis.figures import new_figure

    drawn = draw_published(new_figure().subplots(), PAPER)
    named = [line for line in drawn if not line.get_label().startswith("_")]
    assert [line.get_label() for line in named] == [
        "arXiv 2603.15031, PreNorm: b = 0.0549",
        "arXiv 2603.15031, Block AttnRes: b = 0.0565",
        "arXiv 2603.15031, Full AttnRes: b = 0.0558",
        "arXiv 2603.15031, mHC-lite: b = 0.0549",
    ]
    for line, losses in zip(named, PAPER.losses.values(), strict=True):
        assert tuple(line.get_xdata()) == PAPER.compute
        assert tuple(line.get_ydata()) == losses
    sizes = []
    for beside in (None, PAPER):
        draw_scaling(dataclasses.replace(study(), beside=beside), tmp_path)
        sizes.append((tmp_path / "scaling.png").stat().st_size)
    assert sizes[0] != sizes[1]


def test_a_name_that_nobody_published_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scaling", "--beside", "atnres-paper", "--folder", str(tmp_path / "study")]) == 2
    assert "unknown beside='atnres-paper'. Did you mean 'attnres-paper'?" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()
