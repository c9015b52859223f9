"""`generate` as typed: which model a folder stands for, and with which tokenizer."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import depthmix as dm
from depthmix.cli import main
from depthmix.inference import generate
from depthmix.training import Interrupted, TrainConfig, load_run, loop, train
from tests.runs import tiny_run

PROMPT = "what a layer reads"


def stop_after(step: int, config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train as far as `step`, where SIGTERM comes."""
    inner = loop.step

    def stopping(run: Any) -> None:
        inner(run)
        if run.progress.step == step:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "step", stopping)
        with pytest.raises(Interrupted, match=f"stopped after step {step} of"):
            train(config)


def written(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[list[int], str]:
    """The tokens that `generate` writes, and what it says."""
    assert main(["generate", str(folder), "-p", PROMPT, "-n", "8", "--json", *more]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out)["answers"][0]["tokens"], captured.err


def expected(model: dm.Decoder) -> list[int]:
    return generate(model, [list(PROMPT.encode())], max_new_tokens=8)[0]


def test_the_model_of_an_unfinished_run_is_that_of_its_newest_intact_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = tiny_run(run, optimizer__lr=0.05, run__checkpoint_every=3)
    stop_after(7, config, monkeypatch)
    at_seven = load_run(run)
    tokens, said = written(run, capsys)
    assert tokens == expected(at_seven)
    assert f"{run} is unfinished: using its checkpoint of step 7" in said
    assert main(["eval", str(run)]) == 0
    assert f"{run} is unfinished: using its checkpoint of step 7" in capsys.readouterr().err
    (run / "checkpoints" / "step-00000007" / "state.json").write_text("{}")
    tokens, said = written(run, capsys)
    assert "using its checkpoint of step 6" in said
    assert tokens == expected(load_run(run)) != expected(at_seven)
    train(config)
    tokens, said = written(run, capsys)
    assert tokens == expected(dm.load_model(run / "final"))
    assert "unfinished" not in said


def test_a_directory_of_save_model_is_taken_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = dm.Decoder(tiny_run(tmp_path / "run").model)
    dm.save_model(model, tmp_path / "saved")
    (tmp_path / "saved" / "config.toml").write_text("[project]\nname = 'theirs'\n")
    assert written(tmp_path / "saved", capsys)[0] == expected(model)


def test_the_dtype_is_that_of_the_parameters_for_checkpoints_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run(tmp_path / "run", optimizer__lr=0.05)
    stop_after(4, config, monkeypatch)
    tokens, _ = written(tmp_path / "run", capsys, "--dtype", "bfloat16")
    dm.save_model(load_run(tmp_path / "run"), tmp_path / "saved")
    assert tokens == expected(dm.load_model(tmp_path / "saved", dtype=torch.bfloat16))


def test_the_tokenizer_of_an_unfinished_run_is_the_one_beside_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers", reason="pip install 'depthmix[bpe]'")
    run = tmp_path / "run"
    tiny = tiny_run(run, data__tokenizer="bpe:300")
    stop_after(2, dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, vocab_size=300)), monkeypatch)
    text = json.loads((tmp_path / "tokens" / "tokenizer.json").read_text())
    assert text["model"]["type"] == "BPE"
    tokens, _ = written(run, capsys)
    assert len(tokens) == 8
    (tmp_path / "tokens" / "tokenizer.json").unlink()
    assert main(["generate", str(run), "-p", PROMPT]) == 2
    assert f"expected the tokenizer that {run} was trained with" in capsys.readouterr().err


def test_a_folder_that_is_neither_a_run_nor_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main(["generate", str(folder), "-p", PROMPT]) == 2
        err = capsys.readouterr().err
        assert f"{folder} is neither the folder of a run of `depthmix train` (it has no config.toml) nor" in err
        assert "a directory written by dm.save_model (it has no config.json)" in err
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").write_text(tiny_run(tmp_path / "begun").to_toml())
    assert main(["generate", str(tmp_path / "begun"), "-p", PROMPT]) == 2
    err = capsys.readouterr().err
    assert "has neither a final model nor a checkpoint; expected a run with at least one checkpoint" in err


def test_a_run_that_names_a_function_is_loaded_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    changes = {"model__mixer__mixing": "linear", "model__mixer__kernel": "torch.nn.functional:softplus"}
    stop_after(2, tiny_run(run, "attnres", **changes), monkeypatch)
    assert main(["generate", str(run), "-p", PROMPT]) == 2
    said = capsys.readouterr().err
    assert f"{run / 'config.toml'} names the function torch.nn.functional:softplus (mixer.kernel)" in said
    assert len(written(run, capsys, "--functions")[0]) == 8
