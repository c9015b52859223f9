"""Damage to the files of a run is noticed, and the message names the file and what to do."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from depthmix.cli import main
from depthmix.studies.comparison import read_run
from depthmix.training import load_run, train
from depthmix.training.folder import finished_result
from tests.runs import tiny_run, weights


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    train(tiny_run(root / "run", run__steps=2, run__depth_every=0, run__snapshot_every=0))
    return root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_a_changed_byte_in_the_weights_of_a_complete_run_is_noticed_by_every_command(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "final" / "model.safetensors"
    flip_a_byte(path)
    for command in (["train", "--folder", str(run)], ["eval", str(run)], ["generate", str(run), "--prompt", "a"]):
        assert main(command) == 2, command
        out, err = capsys.readouterr()
        assert "already complete" not in out + err
        assert f"{path} is damaged or from another save: its SHA-256 is not the one in config.json" in err


def test_the_message_tells_how_to_make_the_weights_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = weights(run)
    flip_a_byte(run / "final" / "model.safetensors")
    assert main(["train", "--folder", str(run)]) == 2
    assert f"Or remove {run / 'result.json'}, and `depthmix train` creates both again" in capsys.readouterr().err
    (run / "result.json").unlink()
    assert main(["train", "--folder", str(run)]) == 0
    assert weights(run) == before


def test_weights_that_are_gone_are_noticed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "final")
    assert main(["train", "--folder", str(run)]) == 2
    assert f"no config.json in {run / 'final'}" in capsys.readouterr().err


BROKEN = {"cut": '{"steps": 2, "val', "no object": "[1]", "a field less": '{"steps": 2}', "no text": b"\xff\xfe{}"}


def write(path: Path, content: str | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_every_reader_of_a_damaged_result_names_it(run: Path, made: Path, content: Any) -> None:
    path = run / "result.json"
    write(path, content)
    config = tiny_run(made / "run", run__folder=str(run), run__steps=2)
    readers = (
        lambda: finished_result(config),
        lambda: load_run(run),
        lambda: read_run(run, arm="a", seed=0, lr=1.0),
    )
    for reader in readers:
        with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is damaged.*[Rr]emove"):
            reader()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"kind": "validation", "tok', ", line 2, is damaged: it is not valid JSON"),
        ("7", ", line 2, is damaged: '7' is not an object"),
        ('{"kind": "validation", "tokens": 3}', " is damaged: a validation line lacks seconds, loss"),
    ],
)
def test_damaged_metrics_are_named(run: Path, line: str, words: str) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match=re.escape(str(path) + words)):
        read_run(run, arm="a", seed=0, lr=1.0)


def test_a_configuration_that_is_no_text_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run / "config.toml", b"\xff\xfe")
    assert main(["train", "--folder", str(run)]) == 2
    assert f"{run / 'config.toml'} is damaged: it is not valid UTF-8" in capsys.readouterr().err
    assert main(["eval", str(run)]) == 2
    assert f"{run / 'config.toml'} is damaged: it is not valid UTF-8" in capsys.readouterr().err


def test_a_complete_run_is_only_read(run: Path) -> None:
    """Another folder or interval does not rewrite the files of a run that is done."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    assert main(["train", "--folder", str(run), "--set", "run.keep=7"]) == 0
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    assert json.loads((run / "result.json").read_text())["format"] == 2


@pytest.mark.parametrize("value", [0, -1, "many", None, [1]])
def test_a_cost_that_is_no_number_above_zero_is_named(value: object, tmp_path: Path) -> None:
    costs = {"flops": 1, "tokens_per_second": 2.0, "peak_memory_bytes": 3, "parameters": value}
    (tmp_path / "result.json").write_text(json.dumps(costs))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"result\.json is damaged: parameters=.*expected a finite number above 0"):
        read_run(tmp_path, arm="residual", seed=0, lr=1e-3)
