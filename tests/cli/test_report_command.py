"""`depthmix report` as it is typed: files, messages, exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from depthmix.cli import main
from depthmix.training import train
from tests.runs import tiny_run

STUDY = Path(__file__).parents[2] / "docs" / "results" / "first_study"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for mixer in ("block_attnres", "residual"):
        train(tiny_run(folder / mixer, mixer))
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for mixer in ("block_attnres", "residual"):
        shutil.copytree(trained / mixer, tmp_path / mixer)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def document_in(path: Path) -> Any:
    page = path.read_text()
    start = page.index('id="document">') + len('id="document">')
    return json.loads(page[start : page.index("</script>", start)])


def test_a_run_is_measured_and_its_page_lies_in_its_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "block_attnres", "--tokens", "128"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("block_attnres/report.html (")
    assert out[-1].endswith(" MB)")
    document = document_in(runs / "block_attnres" / "report.html")
    assert document["runs"][0]["trace"]["tokens"] == 128
    assert document["runs"][0]["missing"] == []
    assert {path.name for path in (runs / "block_attnres").iterdir()} >= {
        *("trace.json", "trace.safetensors", "ablation.json"),
    }


def test_saved_only_measures_nothing_and_says_so(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "block_attnres", "--saved-only", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert not (runs / "block_attnres" / "trace.json").exists()
    assert "without --saved-only measures it" in printed["missing"]["block_attnres"][0]
    assert printed["bytes"] == (runs / "block_attnres" / "report.html").stat().st_size
    assert set(printed["health"]["block_attnres"].values()) <= {"good", "notice", "problem", "unknown"}


def test_several_runs_go_into_one_page_in_the_current_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["report", "block_attnres", "residual", "--saved-only"]
    monkeypatch.setattr("sys.argv", ["depthmix", *words])
    assert main(words) == 0
    document = document_in(runs / "report.html")
    assert [run["name"] for run in document["runs"]] == ["block_attnres", "residual"]
    assert document["title"] == "2 runs: block_attnres, residual"
    assert document["made"]["command"] == "depthmix report block_attnres residual --saved-only"


def test_a_published_study_is_reported_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "below" / "study.html"
    published = (STUDY / "report.html").stat().st_mtime_ns
    assert main(["report", str(STUDY), "--output", str(target)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(str(target))
    document = document_in(target)
    assert document["title"] == "Study first_study"
    assert len(document["runs"]) == 6
    assert len(document["findings"]) == 16
    assert (STUDY / "report.html").stat().st_mtime_ns == published


def test_figures_are_written_as_png_and_svg(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["report", "block_attnres", "residual", "--tokens", "64", "--figures", "figures"]) == 0
    names = {path.name for path in (runs / "figures").iterdir()}
    wanted = ("losses", "state_norm", "gradient_norm", "block_attnres-M", "block_attnres-weights", "residual-routes")
    assert names >= {f"{stem}.{kind}" for stem in (*wanted, "block_attnres-importance") for kind in ("png", "svg")}
    assert (runs / "figures" / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert not [name for name in names if name.endswith(".part")]


def test_without_matplotlib_the_page_is_still_written(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    assert main(["report", "residual", "--saved-only", "--figures", "figures"]) == 0
    assert "pip install 'depthmix[figures]'" in capsys.readouterr().err
    assert (runs / "residual" / "report.html").is_file()


def test_a_problem_of_health_is_printed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs / "block_attnres" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "depth"][-1]
    last["query_norm"] = [0.0] * len(last["query_norm"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", "block_attnres", "--saved-only"]) == 0
    assert "block_attnres: dead queries: " in capsys.readouterr().out


def test_names_with_escapes_do_not_reach_the_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "residual").rename(runs / "\x1b[31mred")
    assert main(["report", "\x1b[31mred", "--saved-only"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert document_in(runs / "\x1b[31mred" / "report.html")["title"] == "\x1b[31mred"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no folder is given"),
        (["nowhere"], "nowhere does not exist; expected the folder of a `depthmix train` run"),
        (["residual", "--text", "none.txt"], "text=none.txt is not a file"),
        (["residual", "--text", "here.txt", "--saved-only"], "expected only one of them"),
        (["residual", "--tokens", "1"], "tokens=1; expected at least 2"),
        (["residual", "--output", "block_attnres"], "output=block_attnres is a folder; expected a file such as"),
        (["residual", "--device", "nowhere"], "device='nowhere' is not available"),
        (["residual", str(STUDY)], "is a study and not the only folder"),
    ],
)
def test_wrong_input_ends_with_code_2_before_anything_is_measured(
    words: list[str], message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "here.txt").write_text("a text")
    assert main(["report", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (runs / "residual" / "trace.json").exists()
    assert not (runs / "residual" / "report.html").exists()
