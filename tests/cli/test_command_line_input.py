"""What users type and hand in: paths, devices, sizes, KEY=VALUE, saved reports. Each ends with a message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.cli import main
from depthmix.models import DecoderConfig, save_model
from depthmix.models.decoder import Decoder
from depthmix.training import TrainConfig, override
from tests import fuzz

HUGE = str(2**62)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    fuzz.make_samples(folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(Decoder(DecoderConfig(vocab_size=256, dim=16, layers=1, heads=2, hidden=24)), tmp_path / "model")
    return tmp_path / "model"


def report(samples: Path) -> dict[str, Any]:
    return dict(json.loads((samples / "report.json").read_text()))


def print_report(values: Any, folder: Path) -> int:
    path = folder / "report.json"
    path.write_text(json.dumps(values))
    return main(["bench", "--from", str(path), "--markdown", str(folder / "page.md")])


@pytest.mark.parametrize("name", ["[/b]", "[bold]x[/bold]", "[red]", ":smile:", "[link=x]y"])
def test_a_name_that_looks_like_markup_is_printed_as_it_is(
    name: str, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = report(samples)
    values["rows"][0]["what"] = values["machine"] = values["notes"][0] = name
    assert print_report(values, tmp_path) == 0
    assert capsys.readouterr().out.count(name) == 3


def test_a_column_of_a_study_that_looks_like_markup_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    from depthmix.support.terminal import print_table

    print_table("[/title]", ["[/b] of a column"], [["[/i] in a cell"]])
    out = capsys.readouterr().out
    assert all(word in out for word in ("[/title]", "[/b]", "[/i]"))


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("sizes", "step", "depth"), None, ["sizes.step.depth=None", "whole number"]),
        (("sizes", "depth"), [], ["sizes.depth is []", "expected a list"]),
        (("sizes",), {}, ["sizes lacks", "step"]),
        (("rows", 0, "figure"), [1.0], ["rows[0].figure=[1.0]", "finite number"]),
        (("rows", 0, "samples"), [["x"]], ["rows[0].samples='x'", "finite number"]),
        (("rows", 0), 3, ["rows[0] is 3", "expected an object"]),
        (("notes",), "text", ["report.notes='text'", "expected a list"]),
        (("machine",), 1, ["report.machine=1", "expected a string"]),
    ],
)
def test_a_report_with_a_wrong_value_names_it(
    place: tuple[Any, ...],
    value: Any,
    words: list[str],
    samples: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values: Any = report(samples)
    spot = values
    for key in place[:-1]:
        spot = spot[key]
    spot[place[-1]] = value
    assert print_report(values, tmp_path) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in [*words, "report.json", "depthmix bench --output"])


@pytest.mark.parametrize("values", [[], None, 3, {}, {"rows": [[]]}])
def test_a_report_that_is_something_else_is_refused(
    values: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_report(values, tmp_path) == 2
    assert "is not a result of this version of the benchmark" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tokenizer", "--data"])
def test_the_home_of_an_unknown_user_is_told(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", option, "~nobody_here/x", "--depth", "2", "--dim", "16", "--steps", "1"]) == 2
    err = capsys.readouterr().err
    assert "'~nobody_here/x': this machine has no user 'nobody_here'. Write the full path, or put ./ in front" in err


@pytest.mark.parametrize("device", ["meta", "meta:1", "nowhere", "", "cpu:7"])
@pytest.mark.parametrize("verb", ["generate", "eval", "verify", "train"])
def test_a_device_that_does_not_compute_is_refused_by_every_verb(
    verb: str, device: str, samples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(samples)
    lines = {
        "generate": ["generate", "model", "--prompt", "a", "--device", device],
        "eval": ["eval", "half", "--device", device],
        "verify": ["verify", "residual", "--device", device],
        "train": ["train", "--config", "config.toml", "--set", f"run.device={device}"],
    }
    assert main(lines[verb]) == 2
    assert f"device='{device}' is not available; try cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["list", "--dim", HUGE], [f"dim={HUGE}", "1 to 1048576"]),
        (["list", "--depth", HUGE], [f"depth={HUGE}", "1 to 16384"]),
        (["show", "attnres", "--dim", HUGE], [f"dim={HUGE}", "1 to 1048576"]),
        (["show", "depth_attention", "--dim", HUGE], [f"dim={HUGE}", "1 to 1048576"]),
        (["show", "depth_attention", "--depth", "0"], ["depth=0", "1 to 16384"]),
        (["show", "mhc", "--options", f"streams={HUGE}"], [f"streams={HUGE}"]),
        (["show", "linear_attention", "--options", f"rank={HUGE}"], [f"rank={HUGE}"]),
        (["verify", "attnres", "--dim", HUGE], [f"dim={HUGE}", "up to 4096"]),
        (["train", "--dim", HUGE], [f"dim={HUGE}", "1 to 1048576"]),
        (["train", "--depth", HUGE], [f"depth={HUGE}", "2 to 16384"]),
        (["train", "--set", f"model.vocab_size={HUGE}"], [f"vocab_size={HUGE}"]),
        (["train", "--set", "model.loop.first=0", "--set", "model.loop.last=1"], ["model.loop.first"]),
        (["compare", "--shapes", f"4x{HUGE}"], [f"dim={HUGE}", "1 to 1048576"]),
        (["compare", "--seeds", HUGE, "--depth", "2", "--dim", "16"], [f"seeds={HUGE}", "1 to 1000"]),
        (["scaling", "--sizes", "4x16", f"{HUGE}x16"], [f"depth={HUGE}", "2 to 16384"]),
        (["bench", "--processes", HUGE], [f"processes={HUGE}", "1 to 100"]),
    ],
)
def test_a_size_beyond_all_machines_is_refused_before_anything_is_allocated(
    line: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err


def test_a_loop_that_repeats_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loop.repeats=4611686018427387904; expected 1 to 4096"):
        DecoderConfig(vocab_size=9, dim=8, layers=2, heads=1, hidden=8, loop={"first": 0, "last": 1, "repeats": 2**62})  # type: ignore[arg-type]


def test_a_cache_larger_than_the_machine_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(model), "-p", "a", "-n", HUGE, "--cache", "preallocated"]) == 2
    err = capsys.readouterr().err
    assert "keys and values of batch=1 × capacity=" in err
    assert "this machine has" in err


def test_a_model_larger_than_the_machine_is_refused(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(samples)
    line = [
        "train",
        "--depth",
        "2",
        "--dim",
        str(2**18),
        "--steps",
        "1",
        "--data",
        "text",
        "--folder",
        str(tmp_path / "x"),
    ]
    assert main([*line, "--set", "data.folder=tokens", "--set", "data.validation=0.3"]) == 2
    err = capsys.readouterr().err
    assert "parameters with their gradients" in err
    assert "Choose a smaller depth" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (MemoryError(), 1),
        (torch.OutOfMemoryError("CUDA out of memory"), 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 1),
    ],
)
def test_ctrl_c_and_a_lack_of_memory_end_with_a_message(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("depthmix.cli.verify.verify", fail)
    assert main(["verify", "residual", "--json"]) == code
    err = capsys.readouterr().err
    assert "depthmix: stopped" in err if code == 130 else "depthmix: not enough memory" in err


def test_other_errors_of_the_program_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("depthmix.cli.verify.verify", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        main(["verify", "residual", "--json"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("key_norm=false", False),
        ("key_norm=True", True),
        ("heads=2", 2),
        ("scale=1e-3", 0.001),
        ("window=none", None),
        ("mixing=sigmoid", "sigmoid"),
    ],
)
def test_show_reads_options_as_train_reads_settings(text: str, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "attnres", "--dim", "64", "--options", text, "--json"]) == 0
    key = text.partition("=")[0]
    assert json.loads(capsys.readouterr().out)["options"][key] == value
    trained = override(TrainConfig.from_dial(2, "attnres"), f"mixer.{key}", text.partition("=")[2])
    assert trained.model.mixer.options[key] == value


@pytest.mark.parametrize("pair", ["dim=3", "name=x", "depth=2", "kinds=x", "self=1"])
def test_show_takes_options_of_the_mechanism_only(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "attnres", "--options", pair]) == 2
    assert f"attnres has no option '{pair.partition('=')[0]}'" in capsys.readouterr().err


@pytest.mark.parametrize("pair", ["", "=", "=1", "x", " =1"])
@pytest.mark.parametrize("line", [["show", "attnres", "--options"], ["train", "--set"], ["compare", "--set"]])
def test_what_is_no_pair_is_told_by_every_verb(
    line: list[str], pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*line, pair]) == 2
    assert f"{pair!r}; expected KEY=VALUE, such as" in capsys.readouterr().err


def test_a_folder_that_no_file_can_name_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--depth", "2", "--dim", "16", "--folder", "\udcff"]) == 2
    assert "folder='\\udcff'; expected a string that is valid UTF-8" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "{"])
def test_eval_names_a_damaged_result(
    text: str, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(samples / "run", tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text(text)
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert f"{tmp_path / 'run' / 'result.json'} is damaged" in capsys.readouterr().err


def test_a_width_beyond_all_models_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dim", "9" * 30, "--depth", "2", "--print-config"]) == 2
    assert f"dim={'9' * 30}; expected 1 to {2**20}" in capsys.readouterr().err
