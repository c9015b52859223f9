"""Tiny finished runs, trained once, and the published study that is part of the repository."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from depthmix.training import train
from tests.runs import tiny_run

STUDY = Path(__file__).parents[2] / "docs" / "results" / "first_study"
MECHANISMS = ("residual", "block_attnres", "attnres")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each mechanism, which no test changes."""
    folder = tmp_path_factory.mktemp("report")
    for mixer in MECHANISMS:
        train(tiny_run(folder / mixer, mixer, depth=6))
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy of the runs that a test may change; their text and tokens stay where they are."""
    for mixer in MECHANISMS:
        shutil.copytree(trained / mixer, tmp_path / mixer)
    return tmp_path


@pytest.fixture(scope="session")
def study() -> Path:
    return STUDY
