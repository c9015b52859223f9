"""A wrapped model beside other code: hooks, replaced parts, threads, shared configurations, edited files."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from tests.hf.family_models import some_tokens, tiny_model, wrapped  # noqa: E402


@torch.no_grad()
def test_a_copied_reader_or_writer_belongs_to_its_layer_and_a_new_one_is_an_error() -> None:
    """PEFT copies submodules with their hooks and puts the copy into the layer."""
    model, tokens = wrapped("llama", "attnres", kv_mixer="depth_attention"), some_tokens(2, 7)
    expected = model(tokens).logits
    size = sum(p.numel() for p in model.parameters())
    for name in ("post_attention_layernorm", "mlp", "self_attn"):
        for layer in model.model.layers:
            setattr(layer, name, copy.deepcopy(getattr(layer, name)))
        assert torch.equal(model(tokens).logits, expected), name
    assert sum(p.numel() for p in model.parameters()) == size
    for name in ("post_attention_layernorm", "mlp"):
        broken = copy.deepcopy(model)
        layer = broken.model.layers[1]
        part = copy.deepcopy(getattr(layer, name))
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
        setattr(layer, name, part)
        with pytest.raises(RuntimeError, match=rf"If .*{name}.* of a layer was replaced after dm\.wrap"):
            broken(tokens)


@torch.no_grad()
def test_threads_share_a_model() -> None:
    model, tokens = wrapped("llama", "attnres", kv_mixer="depth_attention"), some_tokens(2, 7)
    expected, wrong = model(tokens).logits, []

    def work() -> None:
        with torch.no_grad():
            for _ in range(25):
                try:
                    if not torch.equal(model(tokens).logits, expected):
                        wrong.append("other logits")
                except Exception as error:
                    wrong.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@torch.no_grad()
def test_hooks_of_users_change_what_is_written_and_see_what_is_read() -> None:
    plain, tokens = tiny_model("llama"), some_tokens(2, 7)
    model = dm.wrap(copy.deepcopy(plain), "residual")
    seen: list[Tensor] = []
    for each in (plain, model):
        for layer in each.model.layers:
            layer.mlp.register_forward_hook(lambda module, args, out: 0.5 * out)
            layer.post_attention_layernorm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    expected = plain(tokens).logits
    count = len(seen)
    assert torch.equal(model(tokens).logits, expected)
    assert all(torch.equal(one, other) for one, other in zip(seen[:count], seen[count:], strict=True))


def test_two_models_of_one_configuration_stay_two() -> None:
    config = tiny_model("llama").config
    first, second = (transformers.LlamaForCausalLM(config) for _ in range(2))
    dm.wrap(first, "attnres")
    assert type(second.config) is transformers.LlamaConfig
    assert first.model.layers[0].self_attn.config is first.config
    dm.wrap(second, "mhc")
    assert (first.config.depthmix["mixer"]["name"], second.config.depthmix["mixer"]["name"]) == ("attnres", "mhc")


@pytest.mark.parametrize("change", [{"rule": "uniform"}, {"stride": 3}, {"window": 1}])
def test_an_edited_option_of_a_kv_mechanism_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    wrapped("llama", "attnres", torch.float32, kv_mixer={"name": "depth_attention", "stride": 2}).save_pretrained(
        tmp_path
    )
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["depthmix"]["kv_mixer"].update(change)
    path.write_text(json.dumps(fields))
    (name,) = change
    with pytest.raises(ValueError, match=f"{name} is .* in the state dict and .* here"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_scale_that_is_set_later_is_used() -> None:
    plain = tiny_model("granite")
    model, tokens = dm.wrap(copy.deepcopy(plain), "residual"), some_tokens(2, 5)
    for each in (plain, model):
        for layer in each.model.layers:
            layer.residual_multiplier = 0.1
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_an_attention_function_of_ones_own_is_refused_with_values_and_nothing_is_changed() -> None:
    transformers.AttentionInterface.register("mine", transformers.AttentionInterface()["sdpa"])
    model = tiny_model("llama")
    model.config._attn_implementation_internal = "mine"
    with pytest.raises(ValueError, match=r"its attn_implementation is 'mine'\. Values can be mixed in eager, sdpa"):
        dm.wrap(model, "attnres", kv_mixer="depth_attention", freeze_base=True)
    assert type(model) is transformers.LlamaForCausalLM
    assert all(parameter.requires_grad for parameter in model.parameters())
    dm.wrap(model, "attnres")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blend": "false"}, "blend='false'; expected True or False"),
        ({"freeze_base": 1}, "freeze_base=1; expected True or False"),
        ({"mixer": "residual", "freeze_base": True}, "nothing would be trained"),
    ],
)
def test_flags_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        dm.wrap(tiny_model("llama"), **{"mixer": "attnres", **options})


def test_a_derived_configuration_class_is_an_error_that_names_it() -> None:
    class OwnConfig(transformers.LlamaConfig):
        pass

    model = tiny_model("llama")
    model.config.__class__ = OwnConfig
    with pytest.raises(TypeError, match="LlamaForCausalLM has a OwnConfig; expected the family's own"):
        dm.wrap(model, "attnres")


def test_a_configuration_without_all_fields_is_refused(tmp_path: Path) -> None:
    wrapped("llama", dtype=torch.float32).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "depthmix": {"mixer": {"name": "attnres"}}}))
    with pytest.raises(ValueError, match="expected the fields blend, format, kv_mixer, mixer"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_adapters_that_copy_norms_keep_the_mechanism() -> None:
    peft = pytest.importorskip("peft", reason="adapters need peft")
    model, tokens = wrapped("llama", "attnres", torch.float32), some_tokens(2, 7)
    with torch.no_grad():
        expected = model(tokens).logits
    for modules in (["post_attention_layernorm"], ["mlp"]):
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=modules)
        adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
        with torch.no_grad():
            assert torch.allclose(adapted(tokens).logits, expected, atol=1e-5), modules


def test_the_mixers_of_a_saved_model_are_converted(tmp_path: Path) -> None:
    from depthmix.cli import main
    from depthmix.models.names import read_checkpoint

    model = wrapped("llama", "block_attnres", torch.float32, num_blocks=4, scale_by_count=False)
    model.save_pretrained(tmp_path / "model")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "fla"), "--to", "fla"]) == 0
    stack = read_checkpoint(tmp_path / "fla", "fla").module
    assert torch.equal(stack.mixers["5"].query, model.model.layers[2].depthmix.mixers["5"].query)
