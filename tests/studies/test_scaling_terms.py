"""A law is told with the terms that were fitted, on the console and on the page."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from depthmix.cli.scaling import print_scaling
from depthmix.studies.page import Provenance
from depthmix.studies.scaling import Law
from depthmix.studies.scaling_page import fit_scaling, render
from tests.studies.test_scaling import COMPUTE, point

ABOUT = Provenance(command="depthmix scaling", machine="a machine", data="stdlib")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def told(irreducible: float, fitted: bool, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Console and page of a study whose losses have this irreducible term."""
    law = Law(a=1.5, b=0.2, irreducible=irreducible, unit=1e16)
    points = [point("residual", str(k), c, law.loss(c)) for k, c in enumerate(COMPUTE)]
    found = fit_scaling(points, irreducible=fitted)
    print_scaling(found, cast(Any, SimpleNamespace(failures={})), Path("scaling.md"))
    laws = render(found, {}, ABOUT, {}, Path()).split("## Laws")[1].split("## Sizes")[0]
    return [" ".join(text.split()) for text in (capsys.readouterr().out, laws)]


def test_a_term_that_was_not_fitted_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    for text in told(1.2, False, capsys):
        assert "L(C) = a (C / unit)^(−b)" in text
        assert "irreducible" not in text


@pytest.mark.parametrize("value", [1.2, 0.0])
def test_a_term_that_was_fitted_is_told_even_where_it_is_zero(value: float, capsys: pytest.CaptureFixture[str]) -> None:
    console, page = told(value, True, capsys)
    for text in (console, page):
        assert "L(C) = irreducible + a (C / unit)^(−b)" in text
        assert text.count("irreducible") == 2, "formula and heading"
        assert f" {value:.4f} " in text
