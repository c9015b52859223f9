"""A model on disk and from the command line: what was saved comes back, and damage has a name."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

from depthmix.cli import main
from depthmix.data import ByteTokenizer
from depthmix.inference import generate
from depthmix.models import Decoder
from depthmix.models.io import load_model, save_model
from depthmix.support.files import digest
from tests.decoders import some_tokens, tiny

FILES = {"config.json", "model.safetensors"}


def assert_same_model(a: Decoder, b: Decoder) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# There and back


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("dense", {"tie_embeddings": True}),
        ("dense", {"mixer": {"name": "block_attnres", "block_sublayers": 2}, "kv_mixer": "value_residual"}),
        ("moe", {"mixer": "mhc", "kv_mixer": {"name": "depth_attention", "sources": (0,), "window": 1}}),
        ("looped", {"mixer": "attnres", "kv_mixer": "depth_attention"}),
    ],
)
@torch.no_grad()
def test_a_saved_model_comes_back_bit_for_bit(form: str, options: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model, tokens = tiny(form, dtype, **options), some_tokens(2, 5)
    for name, buffer in model.named_buffers():
        if name.endswith("balance_bias"):
            buffer.normal_()
    save_model(model, tmp_path / "new" / "model")
    found = load_model(tmp_path / "new" / "model")
    assert names_in(tmp_path / "new" / "model") == FILES
    assert_same_model(found, model)
    assert json.dumps(found.config.saved()) == json.dumps(model.config.saved())
    assert torch.equal(found(tokens), model(tokens))
    assert all(p.requires_grad for p in found.parameters())
    assert not found.training
    assert not any(tensor.is_meta for tensor in (*found.parameters(), *found.buffers()))
    save_model(found, tmp_path / "again")
    assert_same_model(load_model(tmp_path / "again"), model)


def test_a_loaded_model_can_be_trained(tmp_path: Path) -> None:
    save_model(tiny("moe", torch.float32), tmp_path)
    found = load_model(tmp_path).train()
    found.loss(some_tokens(2, 5)).backward()
    assert all(p.grad is not None for p in found.parameters())
    assert any(b.sum() > 0 for n, b in found.named_buffers() if n.endswith("load"))


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    for tied in (True, False):
        save_model(tiny(tie_embeddings=tied), tmp_path / str(tied))
    tied, untied = (load_file(tmp_path / name / "model.safetensors") for name in ("True", "False"))
    assert untied.keys() - tied.keys() == {"head.weight"}


def test_a_dtype_changes_parameters_and_leaves_counters(tmp_path: Path) -> None:
    save_model(tiny("moe", torch.float32), tmp_path)
    found = load_model(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}
    assert {b.dtype for n, b in found.named_buffers() if n.endswith("balance_bias")} == {torch.float32}


def test_the_configuration_is_plain_json_with_a_format(tmp_path: Path) -> None:
    save_model(tiny(), tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["format"] == 2
    assert about["model"]["mixer"] == {"name": "residual"}
    assert about["weights"]["bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert about["depthmix"]


# An interrupted save


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_save_that_is_interrupted_leaves_one_model_whole(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the weights are renamed it is the old model, after that the new one."""
    old, new = tiny(layers=2), tiny(layers=3)
    save_model(old, tmp_path)
    rename, done = Path.replace, []

    def until_the_power_fails(self: Path, target: Path) -> Path:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", until_the_power_fails)
        with pytest.raises(KeyboardInterrupt):
            save_model(new, tmp_path)
    assert_same_model(load_model(tmp_path), new if renames == 2 else old)
    save_model(new, tmp_path)
    assert names_in(tmp_path) == FILES
    assert_same_model(load_model(tmp_path), new)


def test_a_disk_that_fills_up_leaves_the_older_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tiny(layers=2)
    save_model(old, tmp_path)

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises(OSError, match="No space"):
        save_model(tiny(layers=3), tmp_path)
    assert names_in(tmp_path) == FILES
    assert_same_model(load_model(tmp_path), old)


# Damage


def edit(folder: Path, **changes: Any) -> None:
    about = json.loads((folder / "config.json").read_text())
    about.update(changes)
    (folder / "config.json").write_text(json.dumps(about))


def edit_model(folder: Path, **changes: Any) -> None:
    edit(folder, model={**json.loads((folder / "config.json").read_text())["model"], **changes})


def rewrite(folder: Path, change: Any) -> None:
    """Other weights, with a configuration that names them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    edit(folder, weights={"bytes": path.stat().st_size, "sha256": digest(path)})


def truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("rb+") as file:
        file.truncate(1000)


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def no_safetensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"no tensors in here")
    edit(folder, weights={"bytes": path.stat().st_size, "sha256": digest(path)})


def another_save(folder: Path) -> None:
    save_model(tiny(layers=1), folder / "other")
    (folder / "other" / "model.safetensors").replace(folder / "model.safetensors")


def widen(tensors: dict[str, Any]) -> None:
    tensors["norm.weight"] = torch.ones(33)


def to_integers(tensors: dict[str, Any]) -> None:
    tensors["norm.weight"] = torch.ones(32, dtype=torch.int64)


DAMAGES: list[tuple[Any, type[Exception], str]] = [
    (lambda f: (f / "config.json").unlink(), FileNotFoundError, r"no config\.json in"),
    (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, r"no model\.safetensors in"),
    (truncate, ValueError, r"has 1000 bytes; config\.json expects \d+\. It is truncated"),
    (flip_a_bit, ValueError, "damaged or from another save: its SHA-256"),
    (another_save, ValueError, "from another save"),
    (no_safetensors, ValueError, "damaged or not a safetensors file"),
    (lambda f: (f / "config.json").write_text('{"format": 1,'), ValueError, "is damaged: it is not valid JSON"),
    (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), ValueError, "is damaged: it is not valid UTF-8"),
    (lambda f: (f / "config.json").write_text("[1]"), ValueError, "no field 'format'"),
    (lambda f: edit(f, format=3, depthmix="9.0"), ValueError, "format 3, written by depthmix 9.0; this version reads"),
    (lambda f: edit(f, weights={}), ValueError, "is damaged: the field 'weights' is missing or incomplete"),
    (lambda f: edit(f, model=None), ValueError, "is damaged: the field 'model' is missing or incomplete"),
    (
        lambda f: edit_model(f, mixer={"name": "atnres"}),
        ValueError,
        "unknown mechanism 'atnres'. Did you mean",
    ),
    (lambda f: edit_model(f, mixer={"name": "attnres", "size": 3}), ValueError, "is not a valid configuration.*size"),
    (lambda f: edit_model(f, colour=3), ValueError, "unknown fields colour"),
    (lambda f: edit_model(f, moe={"wings": 2}), ValueError, "is not a valid configuration.*wings"),
    (lambda f: edit_model(f, dim="wide"), ValueError, "dim='wide'"),
    (lambda f: edit_model(f, hidden=41), ValueError, r"gate_proj.weight has shape \[40, 32\], expected \[41, 32\]"),
    (lambda f: edit_model(f, layers=2), ValueError, r"extra: sublayers\.4\.\S+.*Nothing was loaded"),
    (lambda f: rewrite(f, lambda t: t.pop("norm.weight")), ValueError, r"missing: norm\.weight\. Nothing"),
    (lambda f: rewrite(f, lambda t: t.update(odd=torch.ones(1))), ValueError, r"extra: odd\. Nothing"),
    (lambda f: rewrite(f, widen), ValueError, r"norm\.weight has shape \[33\], expected \[32\]"),
    (lambda f: rewrite(f, to_integers), ValueError, r"norm\.weight is torch\.int64, expected torch\.float32"),
]


@pytest.mark.parametrize(("damage", "kind", "words"), DAMAGES)
def test_every_damage_has_its_error(damage: Any, kind: type[Exception], words: str, tmp_path: Path) -> None:
    save_model(tiny(), tmp_path)
    damage(tmp_path)
    with pytest.raises(kind, match=words):
        load_model(tmp_path)


def test_a_missing_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist or is no folder"):
        load_model(tmp_path / "nowhere")


# The command line


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes."""
    folder = tmp_path_factory.mktemp("model")
    save_model(tiny(dtype=torch.float32, vocab_size=256, mixer="attnres", kv_mixer="depth_attention"), folder)
    return folder


def text_of(folder: Path, *prompts: str, **options: Any) -> list[str]:
    bytes_ = ByteTokenizer()
    rows = generate(load_model(folder), [bytes_.encode(p) for p in prompts], **{"max_new_tokens": 9, **options})
    return [bytes_.decode(row) for row in rows]


def test_a_prompt_is_continued_on_stdout_and_the_speed_is_on_stderr(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(saved), "-p", "Öde", "-n", "9"]) == 0
    captured = capsys.readouterr()
    assert captured.out == text_of(saved, "Öde")[0] + "\n"
    assert "9 tokens, " in captured.err
    assert "tokens/s" in captured.err
    assert "first token after" in captured.err


def test_the_folder_of_a_run_stands_for_its_final_model(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = saved.parent / "run"
    run.mkdir()
    (run / "final").symlink_to(saved, target_is_directory=True)
    assert main(["generate", str(run), "-p", "a", "-n", "9"]) == 0
    assert capsys.readouterr().out == text_of(saved, "a")[0] + "\n"


def test_several_prompts_run_as_a_batch_with_every_option(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-n", "9", "--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--seed", "4"]
    options += ["--cache", "preallocated", "--chunk", "2"]
    assert main(["generate", str(saved), "-p", "one", "-p", "two more", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = text_of(saved, "one", "two more", temperature=0.8, top_k=40, top_p=0.95, seed=4)
    assert [answer["text"] for answer in found["answers"]] == expected
    assert found["new_tokens"] == 18
    assert found["tokens_per_second"] > 0
    assert found["seconds_to_first_token"] > 0
    assert main(["generate", str(saved), "-p", "one", "-p", "two more", *options]) == 0
    assert capsys.readouterr().out == f"[1] {expected[0]}\n[2] {expected[1]}\n"


def test_a_stop_text_ends_the_answer(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = generate(load_model(saved), [list(b"stop")], max_new_tokens=9, temperature=2.0, seed=2)[0]
    ascii_ids = [i for i in ids if i < 128]
    assert ascii_ids, "choose another seed"
    arguments = ["generate", str(saved), "-p", "stop", "-n", "9", "--temperature", "2", "--seed", "2", "--json"]
    assert main([*arguments, "--stop", chr(ascii_ids[0])]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["tokens"] == ids[: ids.index(ascii_ids[0])]


@pytest.mark.parametrize("arguments", [[], ["-p", "-"]])
def test_a_prompt_comes_from_stdin(
    arguments: list[str], saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert main(["generate", str(saved), "-n", "9", *arguments]) == 0
    assert capsys.readouterr().out == text_of(saved, "from a pipe")[0] + "\n"


def test_the_installed_command_generates(saved: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "depthmix", "generate", str(saved), "-n", "9"],
        input=b"from a pipe\n",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == text_of(saved, "from a pipe")[0] + "\n"
    assert b"tokens/s" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", ""], "prompt 0 is empty"),
        (["-p", "x", "--top-p", "2"], "top_p=2.0"),
        (["-p", "x", "--stop", "ab"], "stop='ab' is 2 tokens"),
        (["-p", "x", "--cache", "dynamic", "--compiled"], "expected a preallocated cache"),
        (["-p", "x", "--device", "nowhere"], "nowhere"),
    ],
)
def test_wrong_input_ends_with_its_message(
    arguments: list[str], words: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(saved), *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


def test_a_missing_model_ends_with_its_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path / "nowhere"), "-p", "x"]) == 2
    assert "does not exist or is no folder" in capsys.readouterr().err
