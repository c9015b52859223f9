"""A wrapped model computes what it did until training moves its mixers, and gives its own weights back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import depthmix as dm

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from depthmix.hf.families import FAMILIES, REFUSED, family_of  # noqa: E402
from depthmix.hf.wrapped_model import obstacle_to_values  # noqa: E402
from tests.hf.family_models import (  # noqa: E402
    DEFAULT_AND_FULL,
    DIM,
    LAYERS,
    SEQUENTIAL,
    kv_mixer_for,
    mixers_of,
    move_mixers,
    some_tokens,
    tiny_model,
    wrapped,
)

GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
KEPT = ("residual", "block_attnres", "attnres", "denseformer", "hyper_connections", "mhc")
EVERY_FAMILY = pytest.mark.parametrize("model_type", DEFAULT_AND_FULL)
EVERY_FORM = pytest.mark.parametrize(("model_type", "fields"), [*SEQUENTIAL.items()], ids=str)


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def check_function(model_type: str, **fields: Any) -> None:
    """Logits and texts with each mechanism at its start are those of the model without it."""
    plain, tokens = tiny_model(model_type, **fields), some_tokens(2, 9)
    logits, text = plain(tokens).logits, plain.generate(tokens, **GREEDY)
    assert len(text[:, 9:].unique()) > 2, "a text that repeats one token would hide errors"
    for name in KEPT:
        with no_warning():
            model = dm.wrap(tiny_model(model_type, **fields), name)
        error = (model(tokens).logits - logits).abs().max() / logits.abs().max()
        assert error <= 1e-5, f"{name}: {error}"
        assert torch.equal(model.generate(tokens, **GREEDY), text), name


@EVERY_FAMILY
@torch.no_grad()
def test_at_their_start_mixers_keep_logits_and_texts(model_type: str) -> None:
    check_function(model_type)


@pytest.mark.full
@EVERY_FORM
@torch.no_grad()
def test_other_forms_of_a_family_keep_theirs(model_type: str, fields: dict[str, Any]) -> None:
    check_function(model_type, **fields)


@EVERY_FAMILY
def test_training_moves_queries_and_logits_and_unwrap_gives_the_frozen_weights_back(model_type: str) -> None:
    model, tokens = tiny_model(model_type), some_tokens(2, 9)
    before, names = copy.deepcopy(model.state_dict()), [type(m).__name__ for m in model.modules()]
    with torch.no_grad():
        logits = model(tokens).logits
    dm.wrap(model, "block_attnres", freeze_base=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in mixers_of(model)}
    optimizer = torch.optim.AdamW(trained, lr=0.1, weight_decay=0.0)
    for _ in range(3):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    queries = [p for name, p in model.named_parameters() if name.endswith(".query")]
    assert (
        len(queries) == family_of(model.config).sites * LAYERS
    )  # the first sublayer reads one source, the head reads all
    assert all(query.abs().max() > 0.05 for query in queries), "every query was read and trained"
    with torch.no_grad():
        assert (model(tokens).logits - logits).abs().max() > 1e-3 * logits.abs().max()
    with pytest.warns(UserWarning, match="had left the plain residual"):
        assert dm.unwrap(model) is model
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert [type(m).__name__ for m in model.modules()] == names
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, logits)


@EVERY_FAMILY
def test_unwrap_before_training_restores_the_model_without_a_warning(model_type: str) -> None:
    model, tokens = tiny_model(model_type), some_tokens(2, 9)
    classes, config = [type(m) for m in model.modules()], model.config.to_dict()
    kind = type(model.config)
    with torch.no_grad():
        logits = model(tokens).logits
        with no_warning():
            dm.unwrap(dm.wrap(model, "attnres", kv_mixer=kv_mixer_for(model_type)))
        assert torch.equal(model(tokens).logits, logits)
    assert [type(m) for m in model.modules()] == classes
    assert type(model.config) is kind
    assert model.config.to_dict() == config
    assert not [name for m in model.modules() for name in vars(m) if name == "plan" or "depthmix" in name]
    assert not any(hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks))


@EVERY_FAMILY
@torch.no_grad()
def test_moved_mixers_generate_with_a_cache_what_they_generate_without(model_type: str) -> None:
    model = wrapped(model_type, dtype=torch.float32, kv_mixer=kv_mixer_for(model_type))
    tokens = some_tokens(2, 9)
    text = model.generate(tokens, **GREEDY)
    assert torch.equal(text, model.generate(tokens, use_cache=False, **GREEDY))
    plain = tiny_model(model_type)
    assert not torch.equal(text, plain.generate(tokens, **GREEDY))
    changed = model(tokens).logits
    for mixer in mixers_of(model):  # every one of them is read
        before = mixer.clone()
        mixer.add_(torch.randn_like(mixer))
        assert not torch.equal(model(tokens).logits, changed)
        mixer.copy_(before)


def test_the_three_families_that_are_always_tested_are_among_all() -> None:
    assert [p if isinstance(p, str) else p.values[0] for p in DEFAULT_AND_FULL] == sorted(FAMILIES)
    assert not FAMILIES.keys() & REFUSED.keys()


@torch.no_grad()
def test_mechanisms_that_change_the_model_say_so() -> None:
    tokens = some_tokens(2, 6)
    logits = tiny_model("llama")(tokens).logits
    for name, options in (("highway", {}), ("ddl", {}), ("depth_attention", {"blend": False})):
        with pytest.warns(UserWarning, match=rf"{name} with .* changes what the model computes from the start"):
            model = dm.wrap(tiny_model("llama"), name, **options)
        assert (model(tokens).logits - logits).abs().max() > 1e-3 * logits.abs().max()
    with pytest.warns(UserWarning, match=r"up to the eps of its norms only; scale_by_count=True keeps it"):
        model = dm.wrap(tiny_model("llama"), "attnres", scale_by_count=False)
    assert (model(tokens).logits - logits).abs().max() < 1e-3 * logits.abs().max()
    with pytest.warns(UserWarning, match="delta_attnres with these options keeps .* up to the eps of its norms only"):
        model = dm.wrap(tiny_model("llama"), "delta_attnres")
    assert (model(tokens).logits - logits).abs().max() < 1e-3 * logits.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("name", sorted({*dm.list_mechanisms()} - {"highway", "ddl", "delta_attnres"}))
def test_all_other_mechanisms_keep_the_function_by_their_defaults(name: str) -> None:
    tokens = some_tokens(2, 6)
    for model_type in ("qwen3", "olmo2"):  # the second does not normalise what its sublayers read
        logits = tiny_model(model_type)(tokens).logits
        with no_warning():
            model = dm.wrap(tiny_model(model_type), name)
        assert (model(tokens).logits - logits).abs().max() <= 1e-5 * logits.abs().max()


def test_the_start_of_streams_and_counts_is_the_one_that_keeps_the_model_unless_told_otherwise() -> None:
    assert wrapped("llama", "attnres").config.depthmix["mixer"]["scale_by_count"] is True
    assert wrapped("llama", "attnres", scale_by_count=False).config.depthmix["mixer"]["scale_by_count"] is False
    assert wrapped("llama", "attnres", mixing="sigmoid").config.depthmix["mixer"]["mixing"] == "sigmoid"


@torch.no_grad()
def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model, tokens = wrapped("qwen3", kv_mixer="depth_attention"), some_tokens(2, 6)
    other = copy.deepcopy(model)
    logits = model(tokens).logits
    assert torch.equal(other(tokens).logits, logits)
    move_mixers(other)
    assert not torch.equal(other(tokens).logits, logits)
    assert torch.equal(model(tokens).logits, logits)


@torch.no_grad()
def test_a_ready_stack_is_used_with_its_parameters() -> None:
    stack = dm.DepthStack("block_attnres", dim=DIM, depth=2 * LAYERS, num_blocks=2).double()
    for parameter in stack.parameters():
        parameter.normal_()
    with pytest.warns(UserWarning, match="scale_by_count=True keeps it"):
        model = dm.wrap(tiny_model("qwen3", torch.float64), stack)
    assert torch.equal(model.model.layers[2].depthmix.mixers["5"].query, stack.mixers["5"].query)
    assert model.config.depthmix["mixer"]["num_blocks"] == 2 or model.config.depthmix["mixer"]["block_sublayers"] == 4


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        ("atnres", {}, "attnres"),
        ("attnres", {"block_sublayers": 2}, "block_sublayers"),
        (dm.DepthStack("attnres", dim=DIM + 1, depth=8), {}, "dim=33 and depth=8; expected a whole one with dim=32"),
        (dm.DepthStack("attnres", dim=DIM, depth=6), {}, "depth=6; expected a whole one with dim=32 and depth=8"),
        (dm.DepthStack("attnres", dim=DIM, depth=8).slice(0, 4), {}, "sublayers 0 to 3 of it; expected a whole one"),
        (dm.DepthStack("attnres", dim=DIM, depth=8), {"window": 2}, "options of a mechanism"),
        ("residual", {"kv_mixer": "atention"}, "atention"),
        ("mhc", {"streams": 0}, "streams=0"),
    ],
)
def test_wrong_input_is_an_error_and_the_model_is_untouched(mixer: Any, options: dict[str, Any], message: str) -> None:
    check_untouched(tiny_model("llama"), (TypeError, ValueError), message, mixer, **options)


def check_untouched(model: Any, errors: Any, message: str, mixer: Any = "attnres", **options: Any) -> None:
    tokens = some_tokens(1, 5)
    state, classes, config = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()], model.config
    kind, fields, gradients = type(config), config.to_dict(), [p.requires_grad for p in model.parameters()]
    with torch.no_grad():
        before = model(tokens)[0]
        with pytest.raises(errors, match=message):
            dm.wrap(model, mixer, freeze_base=True, **options)
        assert torch.equal(model(tokens)[0], before)
    assert [type(m) for m in model.modules()] == classes
    assert type(model.config) is kind
    assert model.config.to_dict() == fields
    assert [p.requires_grad for p in model.parameters()] == gradients
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_models_that_cannot_be_wrapped_are_refused_with_the_reason() -> None:
    wide = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    opt = transformers.OPTForCausalLM(transformers.OPTConfig(**wide, ffn_dim=16, word_embed_proj_dim=16))
    check_untouched(opt.eval(), ValueError, "'opt' cannot be wrapped: its layers reshape the stream")
    xglm = transformers.XGLMForCausalLM(
        transformers.XGLMConfig(vocab_size=64, d_model=16, attention_heads=2, num_layers=1, ffn_dim=16)
    )
    check_untouched(
        xglm.eval(), ValueError, "'xglm' is not known.*Expected one of arcee, .*DepthStack into its forward"
    )
    check_untouched(tiny_model("llama").model, TypeError, "got a LlamaModel; expected a LlamaForCausalLM")
    check_untouched(tiny_model("olmo2"), ValueError, "pass scale_by_count=True", scale_by_count=False)
    latent = tiny_model("deepseek_v3")
    check_untouched(latent, ValueError, "expected None: its attention does not cache keys", kv_mixer="depth_attention")
    if obstacle_to_values(tiny_model("nemotron")):  # before some version, it has a class for each implementation
        check_untouched(tiny_model("nemotron"), ValueError, "A newer version may not", kv_mixer="depth_attention")
    with pytest.raises(TypeError, match=r"got a Linear; expected a causal language model of transformers"):
        dm.wrap(torch.nn.Linear(2, 2))
    t5 = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="'t5' is an encoder and a decoder; expected a decoder alone"):
        dm.wrap(transformers.T5ForConditionalGeneration(t5))
    for name in REFUSED:
        config = transformers.PreTrainedConfig()
        config.model_type = name
        with pytest.raises(ValueError, match=f"{name!r} cannot be wrapped: "):
            family_of(config)


def test_a_second_wrap_and_a_model_with_its_own_mixers_are_refused() -> None:
    from tests.hf.own_models import wrapped as own

    check_untouched(wrapped("llama"), ValueError, r"wrapped already; call dm\.unwrap\(model\) first")
    with pytest.raises(ValueError, match="has mixers of its own; choose its mechanism in its configuration"):
        dm.wrap(own("mhc"), "attnres")
    with pytest.raises(TypeError, match=r"expected a model that dm\.wrap has returned"):
        dm.unwrap(tiny_model("llama"))


def test_mixers_stay_in_float32_beside_bfloat16_weights() -> None:
    model = wrapped("qwen3", dtype=torch.bfloat16, kv_mixer="value_residual", moved=False)
    assert {parameter.dtype for parameter in mixers_of(model)} == {torch.float32}
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
