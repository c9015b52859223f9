"""Files of the decoder as a model of transformers: what is saved is loaded, and what is missing gets its start."""

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
from tests.decoders import some_tokens, tiny, tiny_config

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from depthmix.hf import DepthmixConfig, DepthmixForCausalLM  # noqa: E402
from tests.hf.own_models import EVERY_KIND, KINDS, wrapped  # noqa: E402

QUERY = "decoder.depth.mixers.3.query"


def load(folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model without keys that were missing, unexpected or of another shape, unless they are returned."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    return model, {what: keys for what, keys in report.items() if keys}


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to rounding: transformers maps a file into memory with another alignment, which changes last bits."""
    return torch.allclose(one, other, atol=1e-5)


def without(folder: Path, *names: str) -> None:
    """Remove tensors from the saved model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in names:
        del tensors[name]
    save_file(tensors, path, {"format": "pt"})


@EVERY_KIND
@torch.no_grad()
def test_a_saved_model_is_loaded_whole_also_from_shards(kind: str, tmp_path: Path) -> None:
    model, tokens = wrapped(kind, torch.float32), some_tokens(2, 6)
    for size, shards in (("1GB", 1), ("20KB", 3)):
        folder = tmp_path / size
        model.save_pretrained(folder, max_shard_size=size)
        assert len([*folder.glob("*.safetensors")]) >= shards
        assert not [*folder.glob("*.bin")]
        loaded, problems = load(folder)
        assert problems == {}
        assert type(loaded) is DepthmixForCausalLM
        assert loaded.decoder.config.saved() == model.decoder.config.saved()
        for (name, one), other in zip(loaded.state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(one, other), name
        assert close(loaded(tokens).logits, model(tokens).logits)


ORDERS = {
    "depthmix first": "import depthmix\nassert 'transformers' not in sys.modules\nimport transformers",
    "transformers first": "from transformers import AutoModelForCausalLM, LlamaForCausalLM\nimport depthmix",
    "depthmix between": "import transformers\nimport depthmix\nfrom transformers import PreTrainedModel, AutoTokenizer",
}
LOAD = """
import os, sys, torch
torch.set_num_threads(1)
tokens, logits = torch.load(sys.argv[2], weights_only=True)
for order in sys.argv[3:]:
    sys.stdout.flush()
    if os.fork() == 0:  # each order in a process of its own, after torch
        exec(order)
        import transformers
        assert transformers.AutoConfig.from_pretrained(sys.argv[1]).model_type == "depthmix"
        model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
        assert torch.allclose(model(tokens).logits, logits, atol=1e-5)
        print(model.generate(tokens, max_new_tokens=2, do_sample=False, pad_token_id=0).tolist(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, order
"""


def test_a_new_process_loads_the_model_in_whatever_order_it_imports_both_packages(tmp_path: Path) -> None:
    model, tokens = wrapped("block_attnres", torch.float32), some_tokens(2, 6)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        torch.save((tokens, model(tokens).logits), tmp_path / "expected")
    files = [tmp_path / "model", tmp_path / "expected"]
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", LOAD, *files, *ORDERS.values()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = model.generate(tokens, max_new_tokens=2, do_sample=False, pad_token_id=0).tolist()
    assert done.stdout.splitlines() == [str(expected)] * len(ORDERS)


def test_depthmix_models_and_folders_become_models_of_transformers_and_back(tmp_path: Path) -> None:
    decoder = tiny(dtype=torch.float32, **KINDS["block_attnres"])
    dm.save_model(decoder, tmp_path / "ours")
    model = DepthmixForCausalLM.from_decoder(dm.load_model(tmp_path / "ours"))
    assert not model.training
    model.save_pretrained(tmp_path / "theirs")
    loaded, _ = load(tmp_path / "theirs")
    dm.save_model(loaded.decoder, tmp_path / "again")
    tokens = some_tokens(2, 6)
    assert torch.equal(dm.load_model(tmp_path / "again")(tokens), decoder(tokens))
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "ours" / "config.json").read_text()


def test_the_file_states_every_option_and_sizes_that_other_tools_read(tmp_path: Path) -> None:
    model = wrapped("looped, value_residual")
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["model_type"] == "depthmix"
    assert fields["architectures"] == ["DepthmixForCausalLM"]
    assert fields["depthmix"] == json.loads(json.dumps(model.decoder.config.saved()))
    assert fields["depthmix"]["mixer"]["block_sublayers"] == 2, "the default, stated"
    assert (fields["num_hidden_layers"], fields["hidden_size"], fields["num_key_value_heads"]) == (4, 32, 2)
    assert not (tmp_path / "model.safetensors").read_bytes().startswith(b"PK"), "no pickle"


@pytest.mark.parametrize("mixer", ["attnres", "mhc"])
def test_mixers_that_a_checkpoint_lacks_take_their_start_with_a_warning(
    mixer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = DepthmixForCausalLM.from_decoder(tiny(dtype=torch.float32, mixer=mixer, kv_mixer="value_residual"))
    model.save_pretrained(tmp_path)
    fresh = dict(DepthmixForCausalLM(model.config).named_parameters())
    missing = [name for name in fresh if ".depth." in name or ".kv_mixers." in name]
    without(tmp_path, *missing)
    transformers.logging.enable_propagation()
    loaded, problems = load(tmp_path)
    transformers.logging.disable_propagation()
    assert set(problems) == {"missing_keys"}
    assert "MISSING" in caplog.text
    assert set(problems["missing_keys"]) == set(missing)
    for name, parameter in loaded.named_parameters():
        if name not in missing:
            assert torch.equal(parameter, model.get_parameter(name)), name
        elif not name.endswith("projection"):  # random
            assert torch.equal(parameter, fresh[name]), name
        assert parameter.isfinite().all()


def test_one_missing_query_is_zero_and_what_its_site_has_is_kept(tmp_path: Path) -> None:
    model = DepthmixForCausalLM.from_decoder(tiny("moe", torch.float32, mixer="attnres"))
    model.save_pretrained(tmp_path)
    expert, bias = "decoder.sublayers.1.gate_proj", "decoder.sublayers.3.balance_bias"
    without(tmp_path, QUERY, expert, bias)
    torch.manual_seed(1)
    loaded, problems = load(tmp_path)
    assert set(problems["missing_keys"]) == {QUERY, expert, bias}
    assert not loaded.get_parameter(QUERY).any()
    assert not loaded.get_buffer(bias).any()
    assert 0.01 < loaded.get_parameter(expert).std() < 0.03, "init_std"
    key = QUERY.replace("query", "key_weight")
    assert torch.equal(loaded.get_parameter(key), model.get_parameter(key))
    assert not any(buffer.any() for name, buffer in loaded.named_buffers() if name.endswith("load"))


def test_a_checkpoint_without_records_of_options_loads_and_names_them(tmp_path: Path) -> None:
    model = wrapped("block_attnres", torch.float32)
    model.save_pretrained(tmp_path)
    records = {"decoder._extra_state", "decoder.depth._extra_state"}
    without(tmp_path, *records)
    loaded, problems = load(tmp_path)
    assert set(problems["missing_keys"]) == records
    tokens = some_tokens(1, 5)
    assert close(loaded(tokens).logits, model(tokens).logits)


@EVERY_KIND
@torch.no_grad()
def test_bfloat16_keeps_mixers_and_balance_in_float32(kind: str, tmp_path: Path) -> None:
    model, tokens = wrapped(kind, torch.float32), some_tokens(2, 6)
    model.save_pretrained(tmp_path / "a")
    narrow, _ = load(tmp_path / "a", dtype=torch.bfloat16)
    narrow.save_pretrained(tmp_path / "b")
    again, problems = load(tmp_path / "b")
    assert problems == {}
    for loaded in (narrow, again):
        for name, tensor in [*loaded.named_parameters(), *loaded.named_buffers()]:
            wide = any(part in name for part in (".depth.", ".kv_mixers.", "balance_bias"))
            expected = torch.int64 if name.endswith("load") else torch.float32 if wide else torch.bfloat16
            assert tensor.dtype == expected, name
            if wide:
                assert torch.equal(tensor, dict(model.state_dict())[name]), name
    logits = narrow(tokens).logits
    assert logits.dtype == torch.bfloat16
    assert torch.allclose(again(tokens).logits, logits, atol=0.05)
    wide_logits = model(tokens).logits
    assert (logits - wide_logits).abs().max() < 0.1 * wide_logits.abs().max()


def test_weights_of_another_function_are_refused(tmp_path: Path) -> None:
    model = wrapped("block_attnres", torch.float32)
    model.save_pretrained(tmp_path)
    other = DepthmixConfig(depthmix=tiny_config(mixer={"name": "block_attnres", "num_blocks": 3}).to_dict())
    with pytest.raises(Exception, match="belongs to a different function"):
        load(tmp_path, config=other)


def test_a_file_that_names_a_function_runs_nothing(tmp_path: Path) -> None:
    wrapped("block_attnres", torch.float32).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["depthmix"]["mixer"] = {"name": "attnres", "mixing": "linear", "kernel": "this:that"}
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="names the function this:that"):
        load(tmp_path)
    assert "this" not in sys.modules


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    model = wrapped("mhc", torch.float32)
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(OSError, match="safetensors"):
        load(tmp_path)
    with pytest.raises(ValueError, match="depthmix reads no pickled weights"):
        load(tmp_path, use_safetensors=False)


def test_a_model_divided_among_devices_is_refused(tmp_path: Path) -> None:
    for device_map in ({"decoder.embed": "cpu", "": "cuda:0"}, {"": "disk"}):
        with pytest.raises(ValueError, match="expected one device for the whole model"):
            DepthmixForCausalLM.from_pretrained(tmp_path, device_map=device_map)


@torch.no_grad()
def test_a_device_map_loads_the_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="device maps need accelerate")
    model, tokens = wrapped("depth_attention", torch.float32), some_tokens(2, 6)
    model.save_pretrained(tmp_path)
    for device_map in ("cpu", "auto", {"": "cpu"}):
        loaded, problems = load(tmp_path, device_map=device_map)
        assert problems == {}
        assert close(loaded(tokens).logits, model(tokens).logits)
