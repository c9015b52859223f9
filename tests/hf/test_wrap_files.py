"""Files of wrapped models: what is saved is loaded by the Auto classes, and what is missing gets its start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import depthmix as dm

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from depthmix.hf.families import FAMILIES  # noqa: E402
from tests.hf.family_models import DEFAULT_AND_FULL, LAYERS, kv_mixer_for, mixers_of, some_tokens, tiny_model, wrapped  # noqa: E402

QUERY = "model.layers.1.depthmix.mixers.3.query"
AUTO = transformers.AutoModelForCausalLM
NEW_PROCESS = """
import sys, torch
{imports}
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    tokens, logits = torch.load(folder + "/expected.pt", weights_only=True)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        got = model(tokens).logits
    assert (got - logits).abs().max() <= 1e-5 * logits.abs().max(), folder
    print(type(model).__name__, model.config.model_type, type(transformers.AutoConfig.from_pretrained(folder)).__name__)
"""


def load_in_a_new_process(folders: list[Path], imports: str) -> list[str]:
    command = [sys.executable, "-c", NEW_PROCESS.format(imports=imports), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def save(model: Any, folder: Path, **options: Any) -> Any:
    """Save a model and what it computes."""
    tokens = some_tokens(2, 7)
    model.save_pretrained(folder, **options)
    with torch.no_grad():
        torch.save((tokens, model(tokens).logits), folder / "expected.pt")
    return model


@pytest.mark.parametrize("imports", ["import depthmix, transformers", "import transformers, depthmix"])
def test_a_new_process_loads_models_with_either_order_of_imports(imports: str, tmp_path: Path) -> None:
    kinds = {"llama": "mhc", "qwen3": "block_attnres", "gpt2": "residual"}
    for family, mixer in kinds.items():
        kv = None if family == "llama" else "depth_attention"
        save(wrapped(family, mixer, torch.float32, kv_mixer=kv), tmp_path / family)
    lines = load_in_a_new_process([tmp_path / family for family in kinds], imports)
    assert lines == [
        "DepthmixLlamaForCausalLM llama DepthmixLlamaConfig",
        "DepthmixQwen3ForCausalLM qwen3 DepthmixQwen3Config",
        "DepthmixGPT2LMHeadModel gpt2 DepthmixGPT2Config",
    ]


@pytest.mark.full
def test_a_new_process_loads_every_family(tmp_path: Path) -> None:
    known = [family for family in sorted(FAMILIES) if family in transformers.CONFIG_MAPPING]
    for family in known:
        kv = kv_mixer_for(family, "value_residual")
        save(wrapped(family, dtype=torch.float32, kv_mixer=kv), tmp_path / family)
        assert not [*(tmp_path / family).glob("*.bin")]
    lines = load_in_a_new_process([tmp_path / family for family in known], "import depthmix, transformers")
    assert [line.split()[1] for line in lines] == known


@pytest.mark.parametrize("model_type", DEFAULT_AND_FULL)
def test_a_loaded_model_has_the_same_weights_also_from_shards_and_is_unwrapped(model_type: str, tmp_path: Path) -> None:
    model = wrapped(model_type, dtype=torch.float32)
    for size in ("1GB", "30KB"):
        model.save_pretrained(tmp_path / size, max_shard_size=size)
        loaded = AUTO.from_pretrained(tmp_path / size)
        assert loaded.config.depthmix == model.config.depthmix
        for (name, one), other in zip(loaded.state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(one, other), name
    assert len([*(tmp_path / "30KB").glob("*.safetensors")]) >= 3
    with pytest.warns(UserWarning, match="had left the plain residual"):
        plain = dm.unwrap(loaded)
    assert type(plain) is type(tiny_model(model_type))
    plain.save_pretrained(tmp_path / "plain")
    again = AUTO.from_pretrained(tmp_path / "plain")
    expected = tiny_model(model_type).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_the_file_names_family_and_mechanism_and_the_model_keeps_its_type(tmp_path: Path) -> None:
    model = wrapped("llama", "block_attnres", torch.float32, kv_mixer="depth_attention", num_blocks=2)
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["model_type"] == "depthmix_wrapped"
    assert fields["base_model_type"] == "llama"
    assert fields["architectures"] == ["DepthmixLlamaForCausalLM"]
    mixer = fields["depthmix"]["mixer"]
    assert mixer["name"] == "block_attnres"
    assert mixer["scale_by_count"] is True
    assert mixer.keys() >= {"query", "mixing", "key_norm", "heads", "eps"}, "every option, whatever later defaults are"
    assert fields["depthmix"]["kv_mixer"]["name"] == "depth_attention"
    assert fields["depthmix"]["blend"] is True
    assert model.config.model_type == "llama"
    assert model.config.to_dict()["model_type"] == "llama"


def test_a_card_is_written_beside_the_model_and_ones_own_text_is_kept(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    wrapped("llama", "block_attnres", torch.float32, num_blocks=4).save_pretrained(tmp_path)
    text = card.read_text()
    for words in ("# llama with block_attnres\n", "4 blocks of 2 sublayers", "`num_blocks=4`", "arXiv 2603.15031"):
        assert words in text
    wrapped("llama", "mhc", torch.float32, kv_mixer="value_residual").save_pretrained(tmp_path)
    text = card.read_text()
    for words in ("# llama with mhc and value_residual\n", "`start=parted`", "g times the change"):
        assert words in text
    card.write_text("# My model\n")
    wrapped("llama", "mhc", torch.float32).save_pretrained(tmp_path)
    assert card.read_text() == "# My model\n"
    wrapped("llama", "mhc", torch.float32).save_pretrained(tmp_path / "rank", is_main_process=False)
    assert not (tmp_path / "rank" / "README.md").exists()


@torch.no_grad()
def test_mixers_that_a_file_lacks_take_their_start_and_others_are_kept(tmp_path: Path) -> None:
    model = wrapped("qwen3", "block_attnres", torch.float32, kv_mixer="depth_attention")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({name: t for name, t in tensors.items() if name != QUERY}, path, {"format": "pt"})
    loaded, report = AUTO.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {QUERY}
    assert not loaded.get_parameter(QUERY).any()
    others = {name: parameter for name, parameter in model.named_parameters() if name != QUERY}
    assert all(torch.equal(loaded.get_parameter(name), parameter) for name, parameter in others.items())

    plain = tiny_model("qwen3")  # a folder with the plain model's weights alone: what continued pretraining starts from
    save_file({n: t for n, t in tensors.items() if "depthmix" not in n}, path, {"format": "pt"})
    loaded, report = AUTO.from_pretrained(tmp_path, output_loading_info=True)
    assert len(report["missing_keys"]) == len(mixers_of(loaded)) + 2 * LAYERS  # each with two records of options
    tokens = some_tokens(2, 7)
    expected = plain(tokens).logits
    assert (loaded(tokens).logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_bfloat16_weights_are_loaded_with_mixers_in_float32(tmp_path: Path) -> None:
    wrapped("qwen3", dtype=torch.float32, kv_mixer="value_residual").save_pretrained(tmp_path)
    model = AUTO.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in mixers_of(model)} == {torch.float32}
    assert model.lm_head.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert model(some_tokens(1, 4)).logits.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "again")
    again = AUTO.from_pretrained(tmp_path / "again")
    assert {parameter.dtype for parameter in mixers_of(again)} == {torch.float32}


def test_pickles_disks_and_functions_in_files_are_refused(tmp_path: Path) -> None:
    model = wrapped("llama", dtype=torch.float32)
    save(model, tmp_path)
    with pytest.raises(ValueError, match="use_safetensors=False; expected True"):
        AUTO.from_pretrained(tmp_path, use_safetensors=False)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((tmp_path / "config.json").read_text())
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AUTO.from_pretrained(pickled)
    with pytest.raises(ValueError, match="expected no 'disk'"):
        AUTO.from_pretrained(tmp_path, device_map={"": "disk"})
    fields = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"mixer": {"name": "attnres", "mixing": "linear", "kernel": "os:getcwd"}}, r"names the function os:getcwd"),
        ({"mixer": "attnres", "more": 1}, "expected the fields blend, format, kv_mixer, mixer"),
        ({"mixer": {"name": "attnres"}, "format": 99}, "format"),
    ):
        text = {**fields, "depthmix": {"format": 1, "kv_mixer": None, "blend": True, **change}}
        (tmp_path / "config.json").write_text(json.dumps(text))
        with pytest.raises(ValueError, match=message):
            AUTO.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**fields, "base_model_type": "llamma"}))
    with pytest.raises(ValueError, match="base_model_type='llamma' in this configuration; expected a family"):
        AUTO.from_pretrained(tmp_path)


def test_without_depthmix_the_error_is_about_the_model_type(tmp_path: Path) -> None:
    wrapped("llama", dtype=torch.float32).save_pretrained(tmp_path)
    code = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "model type `depthmix_wrapped`" in done.stderr


def test_the_pipeline_of_transformers_writes_with_a_wrapped_model(tmp_path: Path) -> None:
    from depthmix.hf.tokenizer import byte_level

    model = dm.wrap(tiny_model("llama", vocab_size=256), "attnres")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), pad_token="\x00")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    pipe = transformers.pipeline("text-generation", model=str(tmp_path), tokenizer=str(tmp_path), device="cpu")
    (answer,) = pipe("depth", max_new_tokens=4, do_sample=False)
    ids = model.generate(torch.tensor([list(b"depth")]), max_new_tokens=4, do_sample=False)[0]
    assert answer["generated_text"] == tokenizer.decode(ids)
