"""The decoder as a model of transformers: its numbers, generation and training are the decoder's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from tests.decoders import VOCABULARY, some_tokens, tiny, tiny_config

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from depthmix.hf import DepthmixConfig, DepthmixForCausalLM  # noqa: E402
from tests.hf.own_models import EVERY_KIND, wrapped  # noqa: E402

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
PROMPTS = [[5, 9, 2, 60, 33], [7], [1, 2, 3, 4, 5, 6, 7]]


def left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    valid = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return tokens, valid


def gradients(model: torch.nn.Module, loss: Tensor) -> list[Tensor]:
    parameters = [*model.parameters()]
    return [torch.zeros(()) if g is None else g for g in torch.autograd.grad(loss, parameters, allow_unused=True)]


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "child", "name"),
    [
        *[("dense", "mixer", name) for name in dm.list_mechanisms()],
        *[("dense", "kv_mixer", name) for name in dm.list_mechanisms(kind="kv")],
        *[(form, "mixer", "attnres") for form in ("moe", "looped")],
    ],
)
def test_logits_are_the_decoders_bit_for_bit_and_a_cache_changes_no_text(form: str, child: str, name: str) -> None:
    decoder = tiny(form, torch.float32, **{child: name})
    model, tokens = DepthmixForCausalLM.from_decoder(decoder), some_tokens(2, 7)
    assert torch.equal(model(tokens).logits, decoder(tokens))
    text = model.generate(tokens, **GREEDY)
    assert torch.equal(text, model.generate(tokens, use_cache=False, **GREEDY))
    assert text[:, 7:].tolist() == dm.generate(decoder, tokens, max_new_tokens=6)
    assert len(text.unique()) > 4, "a text that repeats one token would hide errors"


@EVERY_KIND
@torch.no_grad()
def test_a_static_cache_beams_and_samples_give_what_no_cache_gives(kind: str) -> None:
    model, tokens = wrapped(kind), some_tokens(2, 5)
    greedy = model.generate(tokens, **GREEDY)
    assert torch.equal(model.generate(tokens, cache_implementation="static", **GREEDY), greedy)
    looked_up = {**GREEDY, "prompt_lookup_num_tokens": 2, "eos_token_id": VOCABULARY - 1}
    twice = torch.cat([tokens, tokens], 1)[:1]
    expected = model.generate(twice, **GREEDY, eos_token_id=VOCABULARY - 1)
    assert torch.equal(model.generate(twice, **looked_up), expected)
    for options in ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 20, "temperature": 1.5}):
        texts = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            texts.append(model.generate(tokens, use_cache=use_cache, **{**GREEDY, **options}))
        assert torch.equal(*texts)
        assert not torch.equal(texts[0], greedy), options


@EVERY_KIND
@torch.no_grad()
def test_left_padded_prompts_continue_as_alone_and_as_in_dm_generate(kind: str) -> None:
    model = wrapped(kind)
    tokens, valid = left_padded(PROMPTS)
    texts = model.generate(tokens, attention_mask=valid, **GREEDY)[:, tokens.shape[1] :].tolist()
    assert texts == dm.generate(model.decoder, PROMPTS, max_new_tokens=6)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        alone = torch.tensor([prompt])
        assert model.generate(alone, **GREEDY)[0, len(prompt) :].tolist() == text
    logits = model(tokens, attention_mask=valid).logits
    assert torch.allclose(logits[valid.bool()], model.decoder(tokens, valid=valid)[valid.bool()], atol=1e-12)


@EVERY_KIND
def test_the_loss_of_labels_and_its_gradients_are_the_decoders(kind: str) -> None:
    changes = {"moe": {**tiny_config("moe").to_dict()["moe"], "balance": "loss"}} if kind == "experts" else {}
    model, tokens = wrapped(kind, **changes).train(), some_tokens(3, 8)
    expected = model.decoder.loss(tokens)
    out = model(tokens, labels=tokens)
    assert out.past_key_values is None, "a model in training mode returns no cache"
    assert torch.allclose(out.loss.double(), expected, atol=1e-6)  # transformers computes it in float32
    for ours, theirs in zip(gradients(model, out.loss), gradients(model, expected), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    halves = [model(part, labels=part, num_items_in_batch=21).loss for part in tokens.split([1, 2])]
    means = [model.decoder.loss(part).item() for part in tokens.split([1, 2])]
    assert float(sum(half.detach() for half in halves)) == pytest.approx((means[0] + 2 * means[1]) / 3, abs=1e-5)
    labels = tokens.clone()
    labels[:, 1:4] = -100
    assert model(tokens, labels=labels).loss != out.loss


@EVERY_KIND
def test_checkpointed_gradients_are_those_of_a_plain_pass(kind: str) -> None:
    model, tokens = wrapped(kind).train(), some_tokens(2, 6)
    plain = gradients(model, model(tokens, labels=tokens).loss)
    switch(model, use_reentrant=False)
    assert model.gradient_checkpointing
    again = model(tokens, labels=tokens, use_cache=True)
    assert again.past_key_values is None
    with pytest.raises(ValueError, match="got past_key_values with gradient checkpointing"):
        model(tokens, past_key_values=transformers.DynamicCache(config=model.config))
    for one, other in zip(gradients(model, again.loss), plain, strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    model.gradient_checkpointing = False
    with pytest.raises(ValueError, match="use_reentrant=True; expected False"):
        switch(model, use_reentrant=True)


def switch(model: Any, **options: Any) -> None:
    """Enable checkpointing under the name that this version of transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


@pytest.mark.skipif(
    not hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable"),
    reason="this version of transformers has no such options",
)
def test_forms_of_checkpointing_that_the_decoder_does_not_have_are_refused() -> None:
    for options in ({"offload": True}, {"every_n_layers": 2}):
        with pytest.raises(ValueError, match=r"set model\.decoder\.checkpoint_every"):
            wrapped("mhc").activation_checkpointing_enable(**options)


@EVERY_KIND
@torch.no_grad()
def test_hidden_states_are_what_each_attention_reads_and_what_the_head_reads(kind: str) -> None:
    model, tokens = wrapped(kind), some_tokens(2, 6)
    out = model(tokens, output_hidden_states=True)
    layers = len(model.decoder.config.layer_order)
    assert len(out.hidden_states) == layers + 1 == model.config.num_hidden_layers + 1
    trace = dm.trace(model, tokens)
    for layer in range(layers):
        assert torch.allclose(out.hidden_states[layer], trace.inputs[2 * layer], atol=1e-12)
    assert torch.equal(out.hidden_states[-1], model.decoder.norm(model.decoder.hidden(tokens)[0]))
    assert torch.equal(out.logits, model(tokens).logits)
    assert model(tokens).hidden_states is None


@torch.no_grad()
def test_embeddings_last_logits_tuples_and_packed_documents_are_those_of_the_decoder() -> None:
    model, tokens = wrapped("looped, value_residual"), some_tokens(2, 6)
    expected = model.decoder(tokens)
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(tokens)).logits, expected)
    assert torch.allclose(model(tokens, logits_to_keep=2).logits, expected[:, -2:], atol=1e-12)
    assert torch.allclose(model(tokens, logits_to_keep=torch.tensor([1, 4])).logits, expected[:, [1, 4]], atol=1e-12)
    assert torch.equal(model(tokens, return_dict=False)[0], expected)
    documents = torch.tensor([[0, 0, 1, 1, 1, 2]]).expand(2, -1)
    positions = torch.tensor([[0, 1, 0, 1, 2, 0]])
    packed = model(tokens, position_ids=positions, use_cache=False).logits
    assert torch.allclose(packed, model.decoder(tokens, documents=documents), atol=1e-12)
    with pytest.raises(ValueError, match="both or neither of input_ids and inputs_embeds"):
        model(tokens, inputs_embeds=model.decoder.embed(tokens))
    with pytest.raises(ValueError, match=f"expected ids from 0 to {VOCABULARY - 1}"):
        model(tokens + VOCABULARY)


@pytest.mark.parametrize("kind", ["attnres, tied", "looped, value_residual"])
@torch.no_grad()
def test_a_resized_vocabulary_keeps_the_logits_of_its_tokens(kind: str) -> None:
    model, tokens = wrapped(kind, torch.float32), some_tokens(2, 6)
    before = model(tokens).logits
    embed = model.resize_token_embeddings(70)
    assert embed is model.decoder.embed
    after = model(tokens).logits
    assert after.shape == (2, 6, 70)
    assert torch.allclose(after[..., :VOCABULARY], before, atol=1e-6)
    assert model.decoder.config.vocab_size == model.config.vocab_size == model.config.depthmix["vocab_size"] == 70
    model(torch.full((1, 3), 69))


def test_traces_cuts_and_surveys_take_the_model() -> None:
    model, tokens = wrapped("block_attnres", torch.float32), some_tokens(4, 8)
    ours, theirs = dm.trace(model, tokens), dm.trace(model.decoder, tokens)
    assert torch.equal(ours.M, theirs.M)
    assert not torch.equal(ours.M[0, 3], ours.M[1, 5]), "queries are random: weights vary over tokens"
    cut, expected = (dm.ablate(m, tokens, ["embedding"], controls=0).to_dict() for m in (model, model.decoder))
    assert cut == expected
    scale = torch.ones(7, 7)
    scale[3, 0] = 0
    with torch.no_grad(), dm.editing(model, scale):
        edited = model(tokens).logits
    assert not torch.allclose(edited, model(tokens).logits)
    switch(model.train(), use_reentrant=False)
    surveys = [dm.survey(m, [tokens]) for m in (model, model.decoder)]
    for name in ("loss", "rows", "magnitudes"):
        assert surveys[0].figures[name] == surveys[1].figures[name], name
    assert surveys[0].figures["magnitudes"]["gradient_norm"]
    assert model.decoder.checkpoint_every == 2


@torch.no_grad()
def test_kda_and_mla_run_without_a_cache_of_transformers_which_is_refused() -> None:
    model = wrapped("kimi").eval()
    tokens, valid = left_padded(PROMPTS)
    assert torch.equal(model(tokens).logits, model.decoder(tokens))
    padded = model(tokens, attention_mask=valid).logits
    torch.testing.assert_close(padded[valid.bool()], model.decoder(tokens, valid=valid)[valid.bool()])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    packed = model.decoder(tokens, documents=torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 3))
    torch.testing.assert_close(model(tokens, position_ids=positions).logits, packed)
    text = model.generate(tokens, attention_mask=valid, use_cache=False, **GREEDY)
    assert text[:, tokens.shape[1] :].tolist() == dm.generate(model.decoder, PROMPTS, max_new_tokens=6)
    with pytest.raises(ValueError, match="a cache of transformers with attention 'kda' and 'mla'; expected use_cache"):
        model.generate(tokens, **GREEDY)
    with pytest.raises(ValueError, match=r"attention_mask of shape \[3, 1, 7, 7\] with attention 'kda'"):
        model(tokens, attention_mask=torch.ones(3, 1, 7, 7, dtype=torch.bool))


def test_decays_stay_float32_in_a_narrow_model(tmp_path: Path) -> None:
    wrapped("kimi", torch.float32).save_pretrained(tmp_path)
    decoder = DepthmixForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).decoder
    kda = decoder.sublayers[0]
    assert (kda.A_log.dtype, kda.dt_bias.dtype, kda.q_conv.dtype) == (torch.float32, torch.float32, torch.bfloat16)


def test_attention_weights_and_other_attentions_are_refused() -> None:
    model, tokens = wrapped("mhc"), some_tokens(1, 4)
    with pytest.raises(ValueError, match="output_attentions=True; expected False: attention runs fused"):
        model(tokens, output_attentions=True)
    config = DepthmixConfig(depthmix=tiny_config().to_dict(), attn_implementation="eager")
    with pytest.raises(ValueError, match="attn_implementation='eager'; expected 'sdpa'"):
        DepthmixForCausalLM(config)


def test_a_new_model_draws_the_decoders_weights() -> None:
    config = tiny_config("moe", mixer="mhc", kv_mixer="value_residual", output_init=0.1)
    torch.manual_seed(4)
    model = DepthmixForCausalLM(DepthmixConfig(depthmix=config.to_dict()))
    torch.manual_seed(4)
    for one, other in zip(model.decoder.parameters(), dm.Decoder(config).parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fields", [["vocab_size"], "block_attnres", dm.DecoderConfig])
def test_fields_that_are_no_dictionary_are_refused(fields: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="depthmix"):
        DepthmixConfig(depthmix=fields)


@pytest.mark.parametrize(
    ("fields", "others", "message"),
    [
        ({"dim": 33}, {}, "heads=4"),
        ({"width": 1}, {}, "unknown fields width"),
        ({"mixer": "attnress"}, {}, "attnres"),
        ({}, {"hidden_size": 64}, "hidden_size=64, but the field `depthmix` makes it 32"),
        ({}, {"depthmix_format": 99}, "has format 99"),
    ],
)
def test_a_wrong_configuration_is_an_error_that_names_the_value(
    fields: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DepthmixConfig(depthmix={**tiny_config().to_dict(), **fields}, **others)


def test_a_configuration_without_a_decoder_and_a_model_that_is_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"depthmix=None; expected the fields of a decoder"):
        DepthmixForCausalLM(DepthmixConfig())
    with pytest.raises(TypeError, match=r"got a Linear; expected a depthmix\.Decoder"):
        DepthmixForCausalLM.from_decoder(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    config = DepthmixConfig(depthmix=tiny_config().to_dict())
    config.vocab_size = 99
    with pytest.raises(ValueError, match="vocab_size=99, but the field `depthmix` makes it 61"):
        DepthmixForCausalLM(config)
