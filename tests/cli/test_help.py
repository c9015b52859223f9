"""What `--help` prints: one line for each verb, groups, real defaults, examples that run, and no broken word."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from pathlib import Path

import pytest

from depthmix.cli import VERBS, main
from depthmix.support.files import version
from tests import fuzz


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return capsys.readouterr().out


def test_the_overview_has_one_line_for_each_verb(capsys: pytest.CaptureFixture[str]) -> None:
    out = help_of(capsys)
    assert set(VERBS) == set(fuzz.verbs())
    for verb, meaning in VERBS.items():
        assert re.search(rf"^  {verb} +{re.escape(meaning)}$", out, re.M)
    assert max(map(len, out.splitlines())) <= 80
    assert main(["--help"]) == 0
    assert main([]) == 2, "no verb is wrong input"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"depthmix {version()}\n"


def test_an_unknown_verb_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "unknown verb 'trian'. Did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_help_fits_80_columns_and_breaks_no_word(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    wide = help_of(capsys, verb)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = help_of(capsys, verb)
    assert max(map(len, narrow.splitlines())) <= 80
    words = {text: {word for word in re.findall(r"[^\s│]+", text) if word.strip("-─")} for text in (wide, narrow)}
    assert words[narrow] - words[wide] == set(), "a word is broken"


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_help_has_every_option_and_no_none(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = help_of(capsys, verb)
    assert "None" not in out
    assert "(default: )" not in out
    assert all(option.flag in out for option in fuzz.OPTIONS[verb])


@pytest.mark.parametrize("verb", ["train", "generate", "compare", "scaling", "bench"])
def test_verbs_with_many_options_group_them(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    groups = re.findall(r"^[ ╭─]*(\w+) options[ ─╮]*$", help_of(capsys, verb), re.M)
    assert len(groups) >= 3, groups


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_help_ends_with_its_two_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = importlib.import_module(f"depthmix.cli.{verb}").EXAMPLES
    assert help_of(capsys, verb).splitlines()[-3:] == ["examples:", *(f"  {line}" for line in examples)]


def test_the_examples_of_every_verb_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the overview: `eval` and `generate` use the run that an example of `train` leaves."""
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("A text to evaluate on.\n" * 20)
    for verb in VERBS:
        for line in importlib.import_module(f"depthmix.cli.{verb}").EXAMPLES:
            before, _, command = line.rpartition("| ")
            if before:
                text = before.removeprefix("echo ").strip() + "\n"
                monkeypatch.setattr("sys.stdin", io.StringIO(text))
            words = shlex.split(command)
            assert words[:2] == ["depthmix", verb]
            words += ["--idle", "0.1"] if verb == "explore" else []  # it would serve until Ctrl-C
            assert main(words[1:]) == 0, f"{line}\n{capsys.readouterr().err}"
            assert capsys.readouterr().out, line
