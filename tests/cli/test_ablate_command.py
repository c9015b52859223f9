"""`depthmix ablate`: what it prints, where it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import depthmix as dm
from depthmix.cli import main
from depthmix.training import train
from tests.runs import tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablate") / "run"
    train(tiny_run(folder, "block_attnres", depth=6, run__steps=2))
    return folder


def test_the_whole_ablation_is_kept_beside_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", str(run), "--rows", "4", "--routes", "3", "--controls", "1"]) == 0
    printed = capsys.readouterr()
    found = dm.Ablation.load(run / "ablation.json")
    assert found.rows == 4
    assert found.text["source"].startswith("validation data of ")
    assert found.text["context"] == 16
    for effect in found.effects:
        assert effect.name in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80
    assert "ablation.json" in printed.err


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--cut", "embedding"], "cuts"),
        (["--renormalise", "--routes", "0"], "renormalised"),
        (["--prompt", "what a layer reads and what it does not", "--routes", "0"], "prompt"),
        (["--cut", "2->4", "--cut", "3->head", "--renormalise"], "cuts-renormalised"),
    ],
)
def test_chosen_cuts_and_texts_do_not_replace_it(
    words: list[str], place: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", str(run), "--rows", "4", "--routes", "2", "--controls", "0"]) == 0
    before = (run / "ablation.json").read_bytes()
    capsys.readouterr()
    assert main(["ablate", str(run), "--rows", "4", "--controls", "1", *words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert json.loads((run / "measured" / place / "ablation.json").read_text()) == content
    assert (run / "ablation.json").read_bytes() == before


def test_few_rows_are_pointed_out(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ablate", str(run), "--rows", "2", "--cut", "recent", "--output", str(tmp_path)]
    assert main(words) == 0
    assert "use at least 4" in capsys.readouterr().err
    assert (tmp_path / "ablation.json").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cut", "embeding"], "Did you mean 'embedding'"),
        (["--cut", "value 1->2"], "does not mix values over depth"),
        (["--prompt", "x"], "has 1 tokens; expected at least 2"),
        (["--rows", "0"], "rows=0"),
        (["--prompt", "a", "--text", "b"], "expected at most one"),
    ],
)
def test_wrong_input_ends_with_a_message(
    words: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", str(run), *words]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
