"""`trace` as typed: which model and which text it reads, what it writes and prints, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import depthmix as dm
from depthmix.analysis import Survey
from depthmix.cli import main
from depthmix.data import sources
from depthmix.training import load_run, train
from tests.runs import tiny_run

TEXT = "what a layer reads depth mixes " * 40


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(tiny_run(folder))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy, so that each test writes into its own folder; the tokens stay beside the original."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def traced(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["trace", *map(str, words), "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def test_a_run_is_traced_on_its_validation_data_into_its_own_folder(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = traced(capsys, run, "--tokens", 100)
    written = Survey.load(run)
    assert written.figures == figures == json.loads((run / "trace.json").read_text())
    assert figures["tokens"] == 96, "whole rows"
    assert (figures["text"]["context"], figures["mechanism"]) == (16, "block_attnres")
    assert figures["text"]["source"].startswith("validation data of ")
    assert figures["table"]["tokens"][:3] == [chr(i) for i in figures["table"]["ids"][:3]]
    assert (written["share"].sum(-1) - 1).abs().max() <= 1e-5


def test_a_file_is_read_to_its_last_token_whatever_the_size_of_its_pieces(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT.replace("mixes", "mixes\n") + "depth")
    whole = traced(capsys, run, "--text", file)
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    parts = traced(capsys, run, "--text", file)
    assert whole["tokens"] == len(file.read_bytes()) == parts["tokens"]
    assert whole["tokens"] % 16, "the last row is short"
    assert whole["text"] == parts["text"]
    assert whole["loss"] == pytest.approx(parts["loss"], rel=1e-6)
    assert main(["eval", str(run), "--file", str(file), "--json"]) == 0
    assert whole["loss"] == pytest.approx(json.loads(capsys.readouterr().out)["loss"], rel=0.2), "other rows"


def test_the_figures_are_those_of_the_runs_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced(capsys, run, "-p", TEXT[:32], "--context", 32)
    M = dm.trace(load_run(run), torch.tensor([list(TEXT[:32].encode())])).M[0].double()
    assert (Survey.load(run / "measured" / "prompt")["M_mean"][0] - M.mean(0)).abs().max() <= 1e-6
    assert not (run / "trace.json").exists(), "a text of one's own does not replace the run's trace"


def test_an_unfinished_run_and_a_saved_model_are_traced_too(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = traced(capsys, run, "-p", TEXT)
    saved = traced(capsys, run / "final", "-p", TEXT, "--output", tmp_path / "out", "--context", 16)
    assert saved == whole
    assert Survey.load(tmp_path / "out").figures == saved
    assert not (run / "final" / "trace.json").exists()
    shutil.rmtree(run / "final")
    assert main(["trace", str(run), "-p", TEXT, "--json"]) == 0
    captured = capsys.readouterr()
    assert "is unfinished: using its checkpoint of step 12" in captured.err
    assert json.loads(captured.out)["loss"] == whole["loss"]


def test_the_summary_fits_80_columns_and_names_what_was_measured(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["trace", str(run), "-p", TEXT]) == 0
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 80
    assert lines[0] == "block_attnres, 4 sublayers; M: weight of each source"
    figures = Survey.load(run / "measured" / "prompt").figures
    for words in ("strongest routes", f"loss {figures['loss']:.4f}", "read most", "rank", "norm of reads", "gradient"):
        assert words in text
    assert f"{figures['rank']['mean']:.2f}, effective {figures['effective_rank']['mean']:.2f}" in text


@pytest.mark.parametrize("mixer", ["ddl", "mrla", "residual+value_residual"])
def test_every_kind_of_trace_has_a_summary(mixer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, _, kv = mixer.partition("+")
    config = dm.DecoderConfig(vocab_size=256, dim=16, layers=2, heads=2, hidden=24, mixer=name, kv_mixer=kv or None)
    dm.save_model(dm.Decoder(config), tmp_path)
    assert main(["trace", str(tmp_path), "-p", TEXT]) == 0
    assert capsys.readouterr().out.startswith(f"{name}{' + ' + kv if kv else ''}, 4 sublayers; M: ")


def test_terminal_escapes_and_markup_in_names_are_printed_as_text(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a\x1b[31m[bold]b.txt"
    file.write_text("\x1b[2J[red]" + TEXT)
    output = tmp_path / "out\x1b]0;x\x07"
    assert main(["trace", str(run), "--text", str(file), "--output", str(output)]) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "\x07" not in captured.err
    assert "a\\x1b[31m[bold]b.txt" in captured.out.replace("\n", "")
    assert main(["trace", str(run), "--text", str(file), "--json"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert json.loads(printed)["table"]["tokens"][:2] == ["\x1b", "["]


def test_what_cannot_be_read_is_refused_with_a_message(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "nothing").mkdir()
    model = run / "final"
    for words, message in (
        ([run, "-p", "a"], "the text has 1 tokens; expected at least 2"),
        ([run, "-p", ""], "the text has 0 tokens; expected at least 2"),
        ([run, "--text", tmp_path / "short.txt"], "the text has 1 tokens"),
        ([run, "--text", tmp_path / "empty.txt"], "the text has 0 tokens"),
        ([run, "--text", tmp_path / "absent.txt"], "absent.txt is not a file; expected a text file"),
        ([run, "--text", tmp_path], "is not a file; expected a text file"),
        ([run, "--text", tmp_path / "short.txt", "-p", "ab"], "expected at most one of them"),
        ([run, "-p", TEXT, "--tokens", 1], "tokens=1; expected at least 2"),
        ([run, "-p", TEXT, "--context", 1], "context=1; expected at least 2"),
        ([model], "is a saved model without validation data; give a text with --text or --prompt"),
        ([tmp_path / "nothing"], "is neither the folder of a run"),
        ([tmp_path / "absent"], "does not exist or is not a folder"),
        ([run, "-p", TEXT, "--device", "nowhere"], "nowhere"),
    ):
        assert main(["trace", *map(str, words)]) == 2
        assert message in capsys.readouterr().err
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints")
    assert main(["trace", str(run), "-p", TEXT]) == 2
    assert "has neither a final model nor a checkpoint" in capsys.readouterr().err
    assert not (run / "trace.json").exists()


def test_a_run_of_an_unknown_mechanism_is_refused_by_its_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('"block_attnres"', '"blok_attnres"'))
    assert main(["trace", str(run), "-p", TEXT]) == 2
    assert "blok_attnres" in capsys.readouterr().err
