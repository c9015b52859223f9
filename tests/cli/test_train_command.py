"""The verbs `train` and `eval` as typed: what a folder, a file and flags mean together, and whose files are touched."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.cli import main
from depthmix.training import BadLoss, TrainConfig, load_run, loop, override, read_config, score, train
from depthmix.training.estimate import estimate_seconds
from tests.runs import lines, tiny_run, weights


def printed(capsys: pytest.CaptureFixture[str], *given: object) -> TrainConfig:
    """What `--print-config` resolves."""
    assert main(["train", "--print-config", *map(str, given)]) == 0
    return TrainConfig.from_toml(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flag", "value", "key"),
    [
        ("--lr", "0.002", "optimizer.lr"),
        ("--batch", "3", "data.rows"),
        ("--context", "40", "data.tokens_per_row"),
        ("--device", "meta", "run.device"),
        ("--precision", "bfloat16", "run.precision"),
        ("--steps", "7", "run.steps"),
        ("--seed", "5", "run.seed"),
        ("--data", "some/folder", "data.source"),
        ("--tokenizer", "bpe:300", "data.tokenizer"),
    ],
)
def test_a_dial_is_the_same_as_its_key(flag: str, value: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    by_flag = printed(capsys, "--depth", "4", flag, value)
    assert by_flag == printed(capsys, "--depth", "4", "--set", f"{key}={value}")
    assert by_flag != printed(capsys, "--depth", "4")
    assert main(["train", flag, value, "--set", f"{key}={value}"]) == 2
    message = capsys.readouterr().err
    assert f"{flag} {value} and --set {key}=…; expected only one of them: they set the same field" in message


def test_compile_is_a_switch(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--compile").run.compile is True
    assert printed(capsys).run.compile is False


def test_training_says_before_it_starts_how_much_and_how_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(tiny_run(tmp_path / "run", run__steps=4).to_toml())
    assert main(["train", "--config", str(file)]) == 0
    shown = capsys.readouterr().err.splitlines()
    start = next(k for k, line in enumerate(shown) if line.startswith("model: "))
    model, training, duration, first = shown[start : start + 4]
    assert re.fullmatch(r"model: [\d,]+ parameters; 2 blocks of 2 sublayers", model)
    config = read_config(tmp_path / "run")
    found = re.fullmatch(r"training: ([\d,]+) tokens in 4 steps of ([\d,]+), (\S+) epochs of ([\d,]+) tokens", training)
    assert found is not None, training
    tokens, per_step, corpus = (int(found[k].replace(",", "")) for k in (1, 2, 4))
    assert (tokens, per_step) == (4 * config.tokens_per_step, config.tokens_per_step)
    assert float(found[3]) == pytest.approx(tokens / corpus, rel=1e-2)
    assert re.fullmatch(r"estimated time: \d+ s, from the speed of matrix products on this machine", duration)
    assert "step 1/4, loss " in first


def test_a_run_of_days_must_be_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal it takes --yes; elsewhere there is a warning, and training starts."""
    monkeypatch.setattr("depthmix.cli.train.estimate_seconds", lambda config: lambda steps: steps * 86_400.0)
    file = tmp_path / "c.toml"
    file.write_text(tiny_run(tmp_path / "run", run__steps=2).to_toml())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["train", "--config", str(file)]) == 2
    message = " ".join(capsys.readouterr().err.split())  # on a terminal it is wrapped
    want = "this run will take roughly 2 days 0 h on this machine. Add --yes to start it, or choose a smaller budget"
    assert want in message
    assert not (tmp_path / "run").exists(), "nothing was started"
    assert main(["train", "--config", str(file), "--set", "run.steps=1"]) == 0, "a day is not more than a day"
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    assert main(["train", "--config", str(file), "--folder", str(tmp_path / "other")]) == 0
    assert "this run will take roughly 2 days 0 h on this machine; a smaller budget" in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["train", "--folder", str(tmp_path / "other")]) == 0, "nothing is left of a complete run"
    assert main(["train", "--config", str(file), "--folder", str(tmp_path / "third"), "--yes"]) == 0


def test_an_estimate_is_of_the_size_of_the_truth(tmp_path: Path) -> None:
    """Within a factor of ten on any machine and under any load; the text says "estimated"."""
    config = tiny_run(tmp_path / "run", "residual", depth=4, model__dim=64, run__steps=100)
    seconds = estimate_seconds(config)
    assert seconds(6) == pytest.approx(3 * seconds(2))
    result = train(config)
    assert result.seconds / 20 < seconds(100) < result.seconds * 10


def test_to_begin_anew_trains_the_model_that_the_folder_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run(tmp_path / "run", "block_attnres+value_residual", run__steps=2)
    train(config)
    before = weights(tmp_path / "run")
    assert main(["train", "--folder", str(tmp_path / "run"), "--restart", "--set", "run.seed=1"]) == 0
    assert read_config(tmp_path / "run") == override(config, "run.seed", 1)
    assert weights(tmp_path / "run") != before
    assert "already complete" not in capsys.readouterr().err


def test_a_mechanism_beside_a_file_is_the_whole_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(tiny_run(tmp_path / "run", "attnres+depth_attention").to_toml())
    base = printed(capsys, "--config", file, "--mixer", "residual").model
    assert (base.mixer.name, base.kv_mixer) == ("residual", None)
    alone = printed(capsys, "--config", file, "--mixer", "value_residual").model
    assert alone.kv_mixer is not None
    assert (alone.mixer.name, alone.kv_mixer.name) == ("residual", "value_residual")
    same = printed(capsys, "--config", file).model
    assert same.kv_mixer is not None
    assert (same.mixer.name, same.kv_mixer.name) == ("attnres", "depth_attention")


def test_texts_that_look_like_something_else_stay_texts(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", run__tracker="tensorboard")
    assert override(config, "run.tracker", "none").run.tracker == "none"
    assert override(config, "data.folder", "20240501").data.folder == "20240501"
    assert override(config, "data.folder", "none").data.folder is None
    assert override(config, "data.field", "true").data.field == "true"
    with pytest.raises(ValueError, match=r"run\.steps='many': steps='many'; expected a whole number"):
        override(config, "run.steps", "many")


@pytest.mark.parametrize("more", [(), ("--restart",)], ids=["begun", "restarted"])
def test_folders_of_others_are_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """A project may have a config.toml and checkpoints of its own."""
    run = tmp_path / "run"
    config = tiny_run(run, run__steps=1)
    (tmp_path / "asked.toml").write_text(config.to_toml())
    for name in ("checkpoints", "final", "tensorboard"):
        (run / name).mkdir(parents=True)
        (run / name / "mine").write_text("precious")
    (run / "config.toml").write_text("[project]\nname = 'theirs'\n")
    assert main(["train", "--config", str(tmp_path / "asked.toml"), "--folder", str(run), *more]) == 2
    assert "unknown sections project" in capsys.readouterr().err
    assert all((run / name / "mine").is_file() for name in ("checkpoints", "final", "tensorboard"))
    assert "theirs" in (run / "config.toml").read_text()


def test_a_configuration_that_was_written_by_hand_into_the_folder_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_run(run, run__steps=1)
    run.mkdir()
    (run / "config.toml").write_text("# why: a trial\n" + config.to_toml())
    assert main(["train", "--folder", str(run)]) == 0
    assert (run / "config.toml").read_text().startswith("# why: a trial\n")
    assert len(lines(run, "train")) == 1


def test_a_run_inside_its_own_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run(tmp_path / "run")
    inside = override(config, "run.folder", str(tmp_path / "text" / "runs" / "run"))
    with pytest.raises(ValueError, match=r"is inside data\.source=.*Choose a folder outside"):
        train(inside)
    assert not (tmp_path / "text" / "runs").exists()
    study = ["--folder", str(tmp_path / "text" / "study"), "--data", str(tmp_path / "text")]
    assert main(["compare", "--depth", "2", "--tokens", "1000", *study]) == 2
    assert "is inside data.source=" in capsys.readouterr().err


def test_weights_that_a_last_step_broke_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a step is taken before its update: only validation sees what the last one did."""
    inner = loop.Optimizers.step

    def breaking(self: Any, rate: float) -> None:
        inner(self, rate)
        next(iter(self.names)).data.fill_(math.nan)

    config = tiny_run(tmp_path / "run", run__steps=4, run__checkpoint_every=3)
    train(override(config, "run.folder", str(tmp_path / "good")))
    steps = iter([inner, inner, inner, breaking])
    monkeypatch.setattr(loop.Optimizers, "step", lambda self, rate: next(steps)(self, rate))
    with pytest.raises(BadLoss, match=r"step 4: the validation loss is nan\. .*step-00000003"):
        train(config)
    assert not (tmp_path / "run" / "result.json").exists()
    monkeypatch.undo()
    train(config)
    assert weights(tmp_path / "run") == weights(tmp_path / "good"), "it goes on from before the break"


def test_eval_refuses_tokens_of_another_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run(tmp_path / "run", run__steps=1)
    train(config)
    (tmp_path / "text" / "0.txt").write_text("another text " * 100)
    for file in (tmp_path / "tokens").iterdir():
        file.unlink()
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert "are not those that" in capsys.readouterr().err


def test_trouble_with_files_ends_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    place = tmp_path / "file" / "tokens"
    given = ["--data", str(tmp_path / "file"), "--set", f"data.folder={place}", "--folder", str(tmp_path / "study")]
    assert main(["compare", "--depth", "2", "--tokens", "1000", *given]) == 1
    said = capsys.readouterr().err
    assert said.startswith("depthmix: ")
    assert "file" in said


def test_eval_judges_a_run_and_any_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny_run(tmp_path / "run"))
    file = tmp_path / "bytes"
    file.write_bytes(bytes(range(256)) * 2)  # no text: every byte counts all the same
    assert main(["eval", str(tmp_path / "run"), "--file", str(file), "--json", "--export", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    model = load_run(tmp_path / "run")
    assert found["tokens"] == 511
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    whole = score(model, torch.arange(256).repeat(2), 512, 600, 1)
    with torch.no_grad():
        assert whole.loss == pytest.approx(float(model.loss(torch.arange(256).repeat(1, 2))), rel=1e-5)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights(tmp_path / "run")
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "nowhere")]) == 2


@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="tokenizers is not installed")
def test_eval_tokenises_as_training_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ready tokenizer may cut texts and put tokens around them, which training does not do."""
    import tokenizers

    ready = tokenizers.Tokenizer(tokenizers.models.BPE())
    ready.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    ready.train_from_iterator(
        ["depth mixes what a layer reads"] * 9,
        tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["[CLS]", "[SEP]"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    ready.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    bare = len(ready.encode("what a layer reads " * 40, add_special_tokens=False).ids)
    ready.enable_truncation(16)
    ready.save(str(tmp_path / "ready.json"))
    config = TrainConfig.from_dial(4, tokenizer=str(tmp_path / "ready.json"), dim=16, heads=2, hidden=24)
    assert config.model.vocab_size == ready.get_vocab_size()
    tiny = tiny_run(tmp_path / "run", data__tokenizer=str(tmp_path / "ready.json"), run__steps=1)
    train(dataclasses.replace(tiny, model=config.model))
    (tmp_path / "file").write_bytes(b"what a layer reads " * 40)
    assert main(["eval", str(tmp_path / "run"), "--file", str(tmp_path / "file"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == bare - 1
    (tmp_path / "file").write_bytes(b"no \xff text")
    assert main(["eval", str(tmp_path / "run"), "--file", str(tmp_path / "file")]) == 0
    for path in (tmp_path / "run" / "final", tmp_path / "tokens"):
        (path / "tokenizer.json").unlink()
    assert main(["eval", str(tmp_path / "run"), "--file", str(tmp_path / "file")]) == 2
    assert "expected the tokenizer that" in capsys.readouterr().err
