"""`convert` as typed: what is read and written, from which folders, and what is left alone."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import depthmix as dm
from depthmix.cli import main
from depthmix.training import Interrupted, TrainConfig, load_run, loop, override, train
from tests.decoders import tiny
from tests.models.test_names import STACKS
from tests.models.test_stack_files import assert_same, random_stack
from tests.runs import SMALL, tiny_run


def convert(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["convert", *map(str, words), "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["convert", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_goes_there_and_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mechanism, options = STACKS[name]
    stack = random_stack(mechanism, **options)
    dm.save_stack(stack, tmp_path / "stack")
    there = convert(capsys, tmp_path / "stack", tmp_path / "theirs", "--to", name)
    back = convert(capsys, tmp_path / "theirs", tmp_path / "ours", "--from", name)
    assert_same(dm.load_stack(tmp_path / "ours"), stack)
    assert (there["to"], there["from"], back["to"], back["from"]) == (name, None, None, name)
    for figures in (there, back):
        assert (figures["mechanism"], figures["dim"], figures["depth"]) == (mechanism, 8, 6)
        assert figures["parameters"] == sum(parameter.numel() for parameter in stack.parameters())
        assert figures["tensors"] == len(load_file(tmp_path / "theirs" / "model.safetensors"))
        assert figures["options"]["eps"] == options["eps"]
    assert there["units"] == back["units"]


def test_a_run_is_a_source_finished_or_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, inner = tmp_path / "run", loop.step
    config = tiny_run(run, optimizer__lr=0.05)

    def stopping(state: Any) -> None:
        inner(state)
        if state.progress.step == 4:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "step", stopping)
        with pytest.raises(Interrupted):
            train(config)
    half = load_run(run).depth
    convert(capsys, run, tmp_path / "half", "--to", "fla")
    train(config)
    figures = convert(capsys, run, tmp_path / "whole", "--to", "fla")
    assert any("only the mixers were written" in note for note in figures["notes"])
    for folder, stack in (("half", half), ("whole", dm.load_model(run / "final").depth)):
        query = load_file(tmp_path / folder / "model.safetensors")["model.res_proj.weight"]
        assert torch.equal(query[0], stack.out.query)
    assert main(["convert", str(run / "final"), str(tmp_path / "final"), "--to", "fla"]) == 0
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "final" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_what_is_printed_has_mechanism_options_units_and_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dm.save_model(tiny(mixer={"name": "block_attnres", "block_sublayers": 4}), tmp_path / "model")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "k3"), "--to", "kimi_k3"]) == 0
    captured = capsys.readouterr()
    out = " ".join(captured.out.split())
    assert "block_attnres, D = 32, 6 sublayers: 14 tensors of kimi_k3 written, 384 parameters" in out
    assert "block_sublayers=4" in out
    assert "attn_res_block_size (layers) 2 = block_sublayers 4" in out
    assert f"written to {tmp_path / 'k3'}: model.safetensors, config.json" in " ".join(captured.err.split())


def test_converting_again_replaces_what_was_converted_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        stack = random_stack("attnres")
        with torch.no_grad():
            stack.out.query.fill_(seed)
        dm.save_stack(stack, tmp_path / "stack")
        convert(capsys, tmp_path / "stack", tmp_path / "fla", "--to", "fla")
        convert(capsys, tmp_path / "fla", tmp_path / "back", "--from", "fla")
        assert_same(dm.load_stack(tmp_path / "back"), stack)
    before = (tmp_path / "stack" / "config.json").read_bytes()
    assert "is not empty: it holds stack" in refusal(capsys, tmp_path / "stack", tmp_path / "stack", "--to", "fla")
    assert "is not empty: it holds fla" in refusal(capsys, tmp_path / "fla", tmp_path / "fla", "--from", "fla")
    assert (tmp_path / "stack" / "config.json").read_bytes() == before


def test_exactly_one_direction_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "expected exactly one of --from NAME and --to NAME. Names: kimi_k3, fla, deepseek_v4"
    assert f"got neither; {words}" in refusal(capsys, tmp_path, tmp_path / "new")
    both = refusal(capsys, tmp_path, tmp_path / "new", "--from", "fla", "--to", "kimi_k3")
    assert f"got --from fla and --to kimi_k3; {words}" in both
    assert "Did you mean 'fla'?" in refusal(capsys, tmp_path, tmp_path / "new", "--from", "flaa")


def test_a_source_that_does_not_fit_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    assert "does not exist or is not a folder" in refusal(capsys, tmp_path / "none", new, "--to", "fla")
    assert "is neither the folder of a run of `depthmix train`" in refusal(capsys, tmp_path, new, "--to", "fla")
    dm.save_model(tiny(mixer="mhc"), tmp_path / "mhc")
    assert "a stack of mhc cannot be written as fla" in refusal(capsys, tmp_path / "mhc", new, "--to", "fla")
    assert "mhc with readout='mean' cannot" in refusal(capsys, tmp_path / "mhc", new, "--to", "deepseek_v4")
    dm.save_stack(random_stack("block_attnres", block_sublayers=3), tmp_path / "odd")
    odd = refusal(capsys, tmp_path / "odd", new, "--to", "kimi_k3")
    assert "block_sublayers=3 cannot be written as kimi_k3: expected an even number" in odd
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "theirs" / "model.safetensors").write_bytes(b"half")
    truncated = refusal(capsys, tmp_path / "theirs", new, "--from", "fla")
    assert "model.safetensors is truncated, damaged or not a safetensors file" in truncated
    assert "describes another project's model" in refusal(capsys, tmp_path / "theirs", new, "--to", "fla")
    assert not new.exists()


def test_functions_of_the_source_are_not_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack = random_stack("attnres", mixing="linear", kernel="torch.nn.functional:softplus")
    dm.save_stack(stack, tmp_path / "stack")
    error = refusal(capsys, tmp_path / "stack", tmp_path / "new", "--to", "fla")
    assert "names the function torch.nn.functional:softplus" in error


def test_what_load_model_refuses_names_a_command_that_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dm.save_stack(random_stack("attnres"), tmp_path / "stack")
    convert(capsys, tmp_path / "stack", tmp_path / "theirs", "--to", "fla")
    with pytest.raises(ValueError, match=r"another project's model .* depthmix convert SOURCE TARGET --from NAME"):
        dm.load_model(tmp_path / "theirs")
    convert(capsys, tmp_path / "theirs", tmp_path / "ours", "--from", "fla")
    assert_same(dm.load_stack(tmp_path / "ours"), dm.load_stack(tmp_path / "stack"))


# A whole model


def kimi(mixer: str = "residual") -> dm.Decoder:
    config = dm.DecoderConfig.from_depth(8, backbone="kimi_linear", dim=16, heads=2, hidden=24, mixer=mixer)
    return dm.Decoder(config)


def test_a_whole_model_goes_there_in_shards_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = kimi()
    dm.save_model(model, tmp_path / "model")
    words = ("convert", tmp_path / "model", tmp_path / "theirs", "--to", "kimi_linear", "--shard-size", "20KB")
    assert main([*map(str, words)]) == 0
    captured = capsys.readouterr()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    out, err = (" ".join(text.split()) for text in captured)
    assert f"residual, D = 16, 8 sublayers: 151 tensors of kimi_linear written, {parameters:,} parameters" in out
    assert f"written to {tmp_path / 'theirs'}: model-00001-of-" in err
    back = convert(capsys, tmp_path / "theirs", tmp_path / "back", "--from", "kimi_linear")
    assert (back["tensors"], back["parameters"], back["mechanism"]) == (151, parameters, "residual")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()


def test_a_run_of_a_whole_model_is_a_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, sizes = tmp_path / "run", kimi().config.to_dict()
    tiny_run(run, "residual")  # its texts
    config = TrainConfig.from_dial(8, "residual", backbone="kimi_linear", folder=str(run), dim=16, heads=2, hidden=24)
    changes = {**SMALL, "run.steps": 2, "data.source": str(tmp_path / "text"), "data.folder": str(tmp_path / "tokens")}
    for key, value in {**changes, "data.validation": 0.2}.items():
        config = override(config, key, value)
    train(config)
    convert(capsys, run, tmp_path / "theirs", "--to", "kimi_linear")
    convert(capsys, tmp_path / "theirs", tmp_path / "back", "--from", "kimi_linear")
    back, final = dm.load_model(tmp_path / "back"), dm.load_model(run / "final")
    assert back.config.attention == tuple(sizes["attention"])
    assert all(torch.equal(tensor, final.state_dict()[name]) for name, tensor in back.state_dict().items())


def test_shards_are_for_whole_models_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dm.save_model(kimi("block_attnres"), tmp_path / "model")
    new = tmp_path / "new"
    for words in (("--to", "kimi_k3"), ("--from", "kimi_linear")):
        message = refusal(capsys, tmp_path / "model", new, *words, "--shard-size", "1GB")
        assert "--shard-size 1GB without --to kimi_linear" in message
    assert "shard size 'many'; expected" in refusal(
        capsys, tmp_path / "model", new, "--to", "kimi_linear", "--shard-size", "many"
    )
    message = refusal(capsys, tmp_path / "model", new, "--to", "kimi_linear")
    assert "mixer='block_attnres' cannot be written as kimi_linear" in message
    assert "--to kimi_k3" in message
    dm.save_stack(random_stack("attnres"), tmp_path / "stack")
    assert "of which kimi_linear has nothing" in refusal(capsys, tmp_path / "stack", new, "--to", "kimi_linear")
    assert not new.exists()
