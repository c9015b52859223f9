"""`depthmix eval --tasks` as typed: which flags belong together, and what is said without lm-eval."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from depthmix.cli import main
from depthmix.training import train
from tests.runs import tiny_run


@pytest.fixture
def without_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)


@pytest.mark.usefixtures("without_harness")
def test_without_lm_eval_tasks_name_the_extra_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path), "--tasks", "arc_easy"]) == 2
    said = capsys.readouterr()
    assert said.err == ("depthmix: depthmix eval --tasks needs the package lm_eval: pip install 'depthmix[harness]'\n")
    assert said.out == ""


@pytest.mark.usefixtures("without_harness")
def test_without_lm_eval_the_function_names_the_extra_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import depthmix as dm

    with pytest.raises(ModuleNotFoundError, match=r"needs the package lm_eval: pip install 'depthmix\[harness\]'"):
        dm.hf.evaluate(tmp_path, "arc_easy")


@pytest.mark.usefixtures("without_harness")
def test_the_loss_needs_no_harness(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny_run(tmp_path / "run", run__steps=1))
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given",
    [
        ("--limit", "3"),
        ("--shots", "0"),
        ("--batch", "2"),
        ("--allow-code",),
        ("--output", "o"),
        ("--task-folder", "."),
    ],
)
def test_a_flag_of_tasks_without_tasks_is_refused(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "run", *given]) == 2
    assert f"{given[0]} without --tasks; expected both" in capsys.readouterr().err


@pytest.mark.parametrize("given", [("--file", "x"), ("--rows", "0"), ("--export", "x"), ("--tp", "2"), ("--pp", "2")])
def test_a_flag_of_the_loss_with_tasks_is_refused(given: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "run", "--tasks", "arc_easy", *given]) == 2
    said = capsys.readouterr().err
    assert f"{given[0]} with --tasks; expected one of them" in said
    assert ("--batch" in said) == (given[0] == "--rows")


def test_tasks_run_in_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["eval", "run", "--tasks", "arc_easy"]) == 2
    assert "--tasks on 2 processes; expected one" in capsys.readouterr().err


def test_the_help_names_the_suites(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from depthmix.hf.tasks import SUITES, expand

    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    out = capsys.readouterr().out
    assert all(suite in out for suite in SUITES)
    assert [len(tasks) for tasks in SUITES.values()] == [15, 8]
    assert expand(["hellaswag", *SUITES])["hellaswag"] is None, "named by itself, and once"
    assert len(expand(SUITES)) == 21, "the suites share two tasks"


def test_the_page_lists_every_task_of_the_suites() -> None:
    pytest.importorskip("transformers")
    from depthmix.hf.tasks import SUITES

    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    sections = re.split(r"^### ", page, flags=re.M)
    for suite, tasks in SUITES.items():
        (section,) = [part for part in sections if part.startswith(f"`{suite}`")]
        assert re.findall(r"^\| [^|]+ \| `([\w-]+)` \|", section, re.M) == list(tasks)


def test_the_command_without_tasks_imports_no_package_of_hugging_face() -> None:
    code = "import sys, depthmix.cli.eval; print({'transformers', 'lm_eval', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
