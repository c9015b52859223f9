"""Files carry their meaning: what was saved computes the same when defaults have changed since."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import depthmix as dm
from depthmix.cli import main
from depthmix.mechanisms import kv_mechanism, list_mechanisms, mechanism
from depthmix.mechanisms.block_attnres import BlockAttnResConfig
from depthmix.models import Decoder, DecoderConfig
from depthmix.models.io import load_model, save_model
from depthmix.training import TrainConfig, load_run, override, read_config, train
from depthmix.training.folder import finished_result
from depthmix.training.identity import difference
from tests.runs import lines, tiny_run

OLD = Path(__file__).parents[1] / "fixtures" / "v0_1_0"
MODELS = sorted(path.name for path in (OLD / "models").iterdir())
ALL = [*list_mechanisms(), *list_mechanisms(kind="kv")]
OF_0_1_0 = (  # fixed: files of that version can name these and no others
    *("attnres", "block_attnres", "ddl", "delta_attnres", "denseformer", "depth_attention", "highway"),
    *("hyper_connections", "linear_attention", "mhc", "mhc_lite", "mrla", "residual", "scaled_residual"),
    "value_residual",
)


def config_class(name: str) -> Any:
    return (kv_mechanism if name in list_mechanisms(kind="kv") else mechanism)(name).Config


@contextlib.contextmanager
def other_defaults() -> Iterator[None]:
    """A later version, as far as files can tell: blocks of two sublayers, other numbers, other choices."""
    changed = {
        "block_attnres": {"eps": 1e-2, "scale": 2.0},
        "attnres": {"eps": 1e-2, "window": 2},
        "ddl": {"eps": 1e-2, "key_eps": 1e-2},
        "mhc": {"eps": 1e-2, "iterations": 1, "readout": "sum", "start": "lite", "output_scale": 0.5},
        "depth_attention": {"window": 2, "rule": "uniform"},
        "value_residual": {"learned": False, "own": 3.0},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, defaults in changed.items():
            inner = config_class(name).__init__

            def init(self: Any, *, _inner: Any = inner, _defaults: Any = defaults, **options: Any) -> None:
                _inner(self, **{**_defaults, **options})

            patch.setattr(config_class(name), "__init__", init)
        size = BlockAttnResConfig.size
        patch.setattr(
            BlockAttnResConfig,
            "size",
            lambda self, depth: 2 if self.block_sublayers is self.num_blocks is None else size(self, depth),
        )
        yield


def expected(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "expected.safetensors")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(OLD / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs"


def assert_ends_as_0_1_0(folder: Path, runs: Path) -> None:
    found, want = (load_file(path / "final" / "model.safetensors") for path in (folder, OLD / "runs" / "finished"))
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    for kind in ("train", "validation"):
        losses = [[line["loss"] for line in lines(path, kind)] for path in (folder, OLD / "runs" / "finished")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# Models


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_of_0_1_0_computes_what_it_did(name: str, later: bool) -> None:
    with other_defaults() if later else contextlib.nullcontext():
        model = load_model(OLD / "models" / name, dtype=torch.float64)
        want = expected(OLD / "models" / name)
        torch.testing.assert_close(model(want["tokens"]), want["logits"], rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore:loading a state dict that does not contain its options")
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_fixtures_can_tell_other_defaults(name: str) -> None:
    """Else the test above would say nothing."""
    given = json.loads((OLD / "models" / name / "config.json").read_text())["model"]
    want = expected(OLD / "models" / name)
    weights = load_file(OLD / "models" / name / "model.safetensors")
    with other_defaults(), contextlib.suppress(RuntimeError):  # or other parameters
        model = Decoder(DecoderConfig.from_dict(given)).double()
        model.load_state_dict(weights)
        assert (model(want["tokens"]) - want["logits"]).abs().max() > 1e-7


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_saved_again_a_model_says_every_option_and_later_defaults_do_not_touch_it(name: str, tmp_path: Path) -> None:
    save_model(load_model(OLD / "models" / name), tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["format"] == 2
    for child in ("mixer", "kv_mixer"):
        if (found := about["model"][child]) is not None:
            assert set(found) == {"name", *(f.name for f in dataclasses.fields(config_class(found["name"])))}
    with other_defaults():
        want = expected(OLD / "models" / name)
        model = load_model(tmp_path, dtype=torch.float64)
        torch.testing.assert_close(model(want["tokens"]), want["logits"], rtol=1e-11, atol=1e-11)


def test_values_that_follow_from_the_depth_are_written_out(tmp_path: Path) -> None:
    size = {"vocab_size": 13, "dim": 8, "heads": 1, "hidden": 8, "layers": 10}
    found = DecoderConfig(**size, mixer="block_attnres", kv_mixer="depth_attention").saved()
    blocks = found["mixer"]["block_sublayers"]
    assert f"blocks of {blocks} sublayers" in dm.DepthStack("block_attnres", dim=8, depth=20).facts.note
    assert found["mixer"]["num_blocks"] is None
    assert found["kv_mixer"]["stride"] == 5
    asked = DecoderConfig(**size, mixer={"name": "block_attnres", "num_blocks": 4}).saved()["mixer"]
    assert (asked["block_sublayers"], asked["num_blocks"]) == (None, 4)
    assert DecoderConfig(**size, mixer="mrla").saved()["mixer"]["head_dim"] == 8
    assert DecoderConfig(**size, mixer={"name": "scaled_residual", "gate": "channel"}).saved()["mixer"]["init"] == 0.1


def test_what_a_user_gave_stays_what_it_was() -> None:
    config = DecoderConfig(vocab_size=13, dim=8, heads=1, hidden=8, layers=2, mixer="block_attnres")
    config.saved()
    assert config.to_dict()["mixer"] == {"name": "block_attnres"}


@pytest.mark.parametrize("name", OF_0_1_0)
def test_the_table_of_0_1_0_has_every_option(name: str) -> None:
    """An option that is added later gets, in this table, the value with which the mechanism is that of 0.1.0."""
    from depthmix.mechanisms import legacy

    fields = {field.name for field in dataclasses.fields(config_class(name))}
    assert set(legacy.DEFAULTS) == set(OF_0_1_0)
    assert set(legacy.DEFAULTS[name]) == fields
    options = legacy.complete(name, {}, dim=64, depth=20)
    config_class(name)(**options).check(dim=64, depth=20)


@pytest.mark.parametrize(
    ("name", "options", "want"),
    [
        ("block_attnres", {}, {"num_blocks": 8, "block_sublayers": None}),
        ("block_attnres", {"block_sublayers": 5}, {"num_blocks": None, "block_sublayers": 5}),
        ("block_attnres", {"num_blocks": 3}, {"num_blocks": 3, "block_sublayers": None}),
        ("depth_attention", {}, {"stride": 10}),
        ("depth_attention", {"sources": (0,)}, {"stride": None, "sources": (0,)}),
        ("depth_attention", {"loop": "same_layer"}, {"stride": None}),
        ("mrla", {}, {"head_dim": 16}),
        ("scaled_residual", {}, {"init": 0.0}),
        ("scaled_residual", {"gate": "channel"}, {"init": 0.1}),
        ("ddl", {"key_eps": 0.5}, {"key_eps": 0.5, "eps": 1e-6}),
    ],
)
def test_an_old_file_is_completed_as_0_1_0_would_have(name: str, options: Any, want: Any) -> None:
    from depthmix.mechanisms import legacy

    found = legacy.complete(name, options, dim=48, depth=20)
    assert {key: found[key] for key in want} == want


def test_a_mechanism_that_0_1_0_did_not_have_needs_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    from depthmix.mechanisms import legacy

    monkeypatch.setitem(legacy.DEPTH, "brand_new", "depthmix.mechanisms.residual:Residual")
    with pytest.raises(ValueError, match=r"brand_new does not exist in depthmix 0\.1\.0.*Write `format = 2`"):
        legacy.complete("brand_new", {}, dim=8, depth=4)
    assert legacy.complete("of_another_package", {"a": 1}, dim=8, depth=4) == {"a": 1}


# Runs


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
def test_an_unfinished_run_of_0_1_0_ends_as_it_would_have(runs: Path, later: bool) -> None:
    with other_defaults() if later else contextlib.nullcontext():
        assert main(["train", "--folder", "unfinished"]) == 0
        assert_ends_as_0_1_0(runs / "unfinished", runs)
        found = json.loads((runs / "unfinished" / "result.json").read_text())
        old = json.loads((runs / "finished" / "result.json").read_text())
        assert found["format"] == 2
        assert found["mixer"]["num_blocks"] == 8
        assert found["config_digest"] == old["config_digest"]
        assert load_run(runs / "unfinished").depth.facts.note.startswith("7 blocks of 3 sublayers")


def test_an_unfinished_run_is_read_from_its_checkpoint(runs: Path, recwarn: pytest.WarningsRecorder) -> None:
    with other_defaults():
        assert load_run("unfinished").depth.facts.note.startswith("7 blocks of 3 sublayers")
    assert not [w for w in recwarn if issubclass(w.category, UserWarning) and "options" in str(w.message)]


def test_a_run_of_0_1_0_is_not_continued_with_the_blocks_of_today(runs: Path) -> None:
    with other_defaults():
        today = override(read_config("unfinished"), "model.mixer", "block_attnres")
        words = r"another configuration:\s+model\.mixer\.block_sublayers: was 3, is now 2"
        with pytest.raises(ValueError, match=words):
            train(today)


def test_a_finished_run_of_0_1_0_is_read(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in (runs / "finished").rglob("*") if path.is_file()}
    with other_defaults():
        assert main(["train", "--folder", "finished"]) == 0
        assert "already complete" in capsys.readouterr().err
        assert main(["eval", "finished", "--json"]) == 0
        loss = json.loads(capsys.readouterr().out)["loss"]
        assert loss == pytest.approx(lines(runs / "finished", "validation")[-1]["loss"], rel=0.05)
        assert main(["generate", "finished", "--prompt", "a", "-n", "2"]) == 0
    assert before == {path: path.read_bytes() for path in before}


def test_the_digest_of_a_run_of_0_1_0_is_known_whatever_options_it_was_given(runs: Path) -> None:
    """0.1.0 made digests of the options that were given, not of those that count."""
    given = TrainConfig.from_dict(read_config("finished").to_dict() | {"model": raw_model(runs)})
    for options in ({"num_blocks": 4}, {"block_sublayers": 3}, {"eps": 1e-6}):
        model = dataclasses.replace(given.model, mixer={"name": "block_attnres", **options})
        config = dataclasses.replace(given, model=model)
        write_as_0_1_0(runs / "finished", config)
        now = read_config("finished")
        assert now.model.saved()["mixer"] == DecoderConfig.from_saved(config.model.to_dict(), 1).saved()["mixer"]
        with other_defaults():
            assert finished_result(read_config("finished")) is not None


def test_the_published_runs_of_0_1_0_keep_their_digests() -> None:
    folders = sorted((Path(__file__).parents[2] / "docs" / "results" / "first_study" / "runs").iterdir())
    assert folders
    with other_defaults():
        for folder in folders:
            result = json.loads((folder / "result.json").read_text())
            assert read_config(folder).digest == result["config_digest"], folder.name


def raw_model(runs: Path) -> dict[str, Any]:
    return dict(json.loads((runs / "finished" / "final" / "config.json").read_text())["model"])


def write_as_0_1_0(folder: Path, config: TrainConfig) -> None:
    from depthmix.support.files import toml_lines
    from depthmix.training.identity import digest_of

    found = config.to_dict()
    (folder / "config.toml").write_text("\n".join(toml_lines(found, ())).strip() + "\n")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "config_digest": digest_of(found)}))


def test_a_configuration_without_a_format_has_the_defaults_of_0_1_0(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with other_defaults():
        assert main(["train", "--config", "unfinished/config.toml", "--print-config"]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("format = 2\n")
        assert "num_blocks = 8" in printed
        assert 'block_sublayers = "none"' in printed
        assert main(["train", "--depth", "20", "--mixer", "block_attnres", "--print-config"]) == 0
        assert "block_sublayers = 2" in capsys.readouterr().out


def test_a_saved_configuration_means_the_same_under_later_defaults(tmp_path: Path) -> None:
    for mixer in ("block_attnres", "attnres+depth_attention", "mhc+value_residual", "ddl"):
        config = tiny_run(tmp_path / "run", mixer, depth=20)
        text, want, digest = config.to_toml(), config.model.saved(), config.digest
        with other_defaults():
            found = TrainConfig.from_toml(text)
            assert found.model.saved() == want
            assert found.digest == digest
            assert difference(found, TrainConfig.from_toml(text)) == []


def test_the_digest_is_of_the_options_that_count_however_they_were_given(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", "block_attnres", depth=20, mixer__num_blocks=4)
    same = tiny_run(tmp_path / "run", "block_attnres", depth=20, mixer__block_sublayers=5, mixer__eps=1e-6)
    other = tiny_run(tmp_path / "run", "block_attnres", depth=20, mixer__num_blocks=3)
    assert same.digest == config.digest
    assert difference(config, same) == []
    assert other.digest != config.digest
    assert difference(config, other) == ["model.mixer.block_sublayers: was 5, is now 7"]


@pytest.mark.parametrize(
    ("mixer", "key", "value", "gone"),
    [
        ("block_attnres", "mixer.num_blocks", 4, "block_sublayers"),
        ("block_attnres", "mixer.block_sublayers", 4, "num_blocks"),
        ("depth_attention", "kv_mixer.sources", (0,), "stride"),
        ("depth_attention", "kv_mixer.loop", "same_layer", "stride"),
    ],
)
def test_an_option_of_a_file_gives_way_to_the_one_that_excludes_it(
    tmp_path: Path, mixer: str, key: str, value: Any, gone: str
) -> None:
    config = tiny_run(tmp_path / "run", mixer, depth=20)
    child, name = key.split(".")
    for text in (config.to_toml(), old_text(config)):
        found = getattr(override(TrainConfig.from_toml(text), key, value).model, child)
        assert found.options[name] == value
        assert found.options.get(gone) is None


def test_a_file_whose_value_is_not_the_default_gives_way_too(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", "block_attnres", depth=20, mixer__block_sublayers=7)
    read = TrainConfig.from_toml(config.to_toml())
    assert override(read, "mixer.num_blocks", "4").model.mixer.options == {"num_blocks": 4}
    assert override(read, "mixer.name", "attnres").model.mixer.options == {}
    assert override(read, "mixer.eps", 1e-3).model.mixer.options == {"block_sublayers": 7, "eps": 1e-3}


def test_both_of_two_options_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    both = ["--set", "mixer.num_blocks=4", "--set", "mixer.block_sublayers=2"]
    assert main(["train", "--mixer", "block_attnres", "--print-config", *both]) == 2
    config = DecoderConfig(vocab_size=13, dim=8, heads=1, hidden=8, layers=10)
    with pytest.raises(ValueError, match="expected only one of them"):
        dataclasses.replace(config, mixer={"name": "block_attnres", "num_blocks": 4, "block_sublayers": 2})


def old_text(config: TrainConfig) -> str:
    from depthmix.support.files import toml_lines

    return "\n".join(toml_lines(config.to_dict(), ())).strip() + "\n"


def test_sizes_of_a_file_can_be_changed_as_if_it_had_been_written_for_them(tmp_path: Path) -> None:
    for mixer in ("mrla", "scaled_residual", "block_attnres+depth_attention"):
        config = tiny_run(tmp_path / "run", mixer, depth=20)
        read = TrainConfig.from_toml(config.to_toml())
        for key, value in (("model.layers", 24), ("model.dim", 24)):
            assert override(read, key, value).model.saved() == override(config, key, value).model.saved()


def test_a_later_format_is_refused_with_what_to_do(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(load_model(OLD / "models" / "ddl"), tmp_path / "model")
    about = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**about, "format": 3, "depthmix": "9.0"}))
    words = r"has format 3, written by depthmix 9\.0; this version reads formats 1 to 2\. Install a newer depthmix"
    with pytest.raises(ValueError, match=r"config\.json " + words):
        load_model(tmp_path / "model")
    text = (runs / "unfinished" / "config.toml").read_text()
    (runs / "unfinished" / "config.toml").write_text(f"format = 3\n{text}")
    assert main(["train", "--folder", "unfinished"]) == 2
    assert "unfinished/config.toml has format 3" in capsys.readouterr().err
    result = json.loads((runs / "finished" / "result.json").read_text())
    (runs / "finished" / "result.json").write_text(json.dumps({**result, "format": 3, "more": 1}))
    for command in (["train", "--folder", "finished"], ["eval", "finished"]):
        assert main(command) == 2
        assert "finished/result.json has format 3" in capsys.readouterr().err
    with pytest.raises(ValueError, match="format 'new'; expected a whole number"):
        TrainConfig.from_toml(f'format = "new"\n{text}')
