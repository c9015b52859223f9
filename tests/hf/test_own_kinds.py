"""Decoders of KDA and MLA as models of transformers: texts with a cache are those without, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from tests.decoders import some_tokens

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from depthmix.hf import DepthmixForCausalLM  # noqa: E402
from tests.hf.own_models import KIMI_KINDS, wrapped  # noqa: E402
from tests.hf.test_own import GREEDY, PROMPTS, left_padded  # noqa: E402

# The others repeat the first one's claims for pure and mixed decoders and for a loop.
KINDS = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] if kind != "kimi" else []) for kind in KIMI_KINDS]
)
LONG = 20  # tokens that KDA computes as a chunk
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 2},
}


def texts(model: DepthmixForCausalLM, tokens: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(3)
    return model.generate(tokens, **{**GREEDY, **options})


@KINDS
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.full) if "sample" in way else way for way in WAYS])
@torch.no_grad()
def test_texts_with_a_cache_are_those_without_alone_and_left_padded(kind: str, way: str) -> None:
    model, tokens = wrapped(kind), some_tokens(2, LONG)
    with_cache = texts(model, tokens, **WAYS[way])
    assert torch.equal(with_cache, texts(model, tokens, use_cache=False, **WAYS[way]))
    assert len(with_cache[:, LONG:].unique()) > 3, "a text that repeats one token would hide errors"
    padded, valid = left_padded(PROMPTS)
    given = {"attention_mask": valid, **WAYS[way]}
    assert torch.equal(texts(model, padded, **given), texts(model, padded, use_cache=False, **given))


@KINDS
@torch.no_grad()
def test_left_padded_prompts_continue_as_in_dm_generate_in_one_piece_and_in_chunks(kind: str) -> None:
    model = wrapped(kind)
    prompts = [*PROMPTS, some_tokens(1, LONG)[0].tolist()]
    tokens, valid = left_padded(prompts)
    want = dm.generate(model.decoder, prompts, max_new_tokens=6)
    for options in ({}, {"prefill_chunk_size": 6}):
        text = texts(model, tokens, attention_mask=valid, **options)
        assert text[:, tokens.shape[1] :].tolist() == want


@torch.no_grad()
def test_beams_reorder_the_state() -> None:
    model, tokens = wrapped("kimi"), some_tokens(3, LONG)
    cache = model(tokens).past_key_values
    order, new = torch.tensor([2, 0, 0]), some_tokens(3, 1)
    cache.reorder_cache(order)
    whole = model(torch.cat([tokens[order], new], 1), use_cache=False).logits[:, -1]
    assert torch.allclose(model(new, past_key_values=cache).logits[:, -1], whole, atol=1e-11)


@torch.no_grad()
def test_rows_of_a_cache_are_repeated_and_selected() -> None:
    model, tokens, new = wrapped("kimi"), some_tokens(2, 5), some_tokens(4, 1)
    cache = model(tokens).past_key_values
    cache.batch_repeat_interleave(2)
    rows = torch.cat([tokens.repeat_interleave(2, 0), new], 1)
    whole = model(rows, use_cache=False).logits[:, -1]
    chosen = torch.tensor([3, 1])
    cache.batch_select_indices(chosen)
    assert torch.allclose(model(new[chosen], past_key_values=cache).logits[:, -1], whole[chosen], atol=1e-11)


@KINDS
@torch.no_grad()
def test_an_empty_dynamic_cache_is_filled_in_place_and_a_copy_goes_its_own_way(kind: str) -> None:
    model, tokens = wrapped(kind), some_tokens(2, LONG + 8)
    whole = model(tokens, use_cache=False).logits
    for cache in (transformers.DynamicCache(), transformers.DynamicCache(config=model.config)):
        first = model(tokens[:, :LONG], past_key_values=cache)
        assert first.past_key_values is cache
        assert cache.get_seq_length() == LONG
        prefix = copy.deepcopy(cache)
        for past in (cache, prefix):
            parts = [model(part, past_key_values=past).logits for part in tokens[:, LONG:].split([1, 4, 3], 1)]
            assert torch.allclose(torch.cat([first.logits, *parts], 1), whole, atol=1e-11)


@KINDS
@torch.no_grad()
def test_a_returned_cache_continues_a_conversation(kind: str) -> None:
    model = wrapped(kind)
    first = model.generate(some_tokens(2, LONG), return_dict_in_generate=True, **GREEDY)
    more = torch.cat([first.sequences, some_tokens(2, 3)], 1)
    text = texts(model, more, past_key_values=first.past_key_values)
    assert torch.equal(text, texts(model, more, use_cache=False))


@torch.no_grad()
def test_right_padding_in_a_cache_is_not_in_the_state() -> None:
    model, tokens, new = wrapped("kimi"), some_tokens(2, LONG), some_tokens(2, 1)
    valid = torch.ones(2, LONG + 1)
    valid[0, 15:LONG] = 0
    cache = model(tokens, attention_mask=valid[:, :-1]).past_key_values
    padded = model(new, attention_mask=valid, past_key_values=cache).logits[0, -1]
    alone = model(torch.cat([tokens[:1, :15], new[:1]], 1)).logits[0, -1]
    assert torch.allclose(padded, alone, atol=1e-11)


@pytest.mark.full
def test_a_compiled_forward_pass_is_the_eager_one_also_with_padding() -> None:
    model = wrapped("kimi")
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    tokens, valid = left_padded([*PROMPTS, some_tokens(1, LONG)[0].tolist()])
    for options in ({}, {"attention_mask": valid}):
        ours, theirs = (forward(tokens, use_cache=False, **options).logits for forward in (compiled, model))
        assert torch.allclose(ours[valid.bool()], theirs[valid.bool()], atol=1e-11)


def test_gradients_through_a_cache_are_those_of_one_pass() -> None:
    model, tokens = wrapped("kimi"), some_tokens(2, LONG)
    leaves = [*model.parameters()]
    whole = model(tokens, use_cache=False).logits[:, -4:].square().sum()
    first = model(tokens[:, :-4], use_cache=True)
    pieces = model(tokens[:, -4:], past_key_values=first.past_key_values).logits.square().sum()
    for one, other in zip(*(torch.autograd.grad(x, leaves) for x in (pieces, whole)), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_state_is_float32_in_a_narrow_model_and_does_not_grow() -> None:
    model, tokens = wrapped("kimi", torch.bfloat16), some_tokens(2, 5)
    cache = model(tokens).past_key_values
    layer = cache.layers[0]
    before = (layer.keys.shape, layer.values.shape)
    assert (layer.keys.dtype, layer.values.dtype) == (torch.float32, torch.bfloat16)
    model(tokens, past_key_values=cache)
    assert (layer.keys.shape, layer.values.shape) == before
    kept = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    own = dm.DynamicCache()
    model.decoder(tokens.repeat(1, 2), cache=own)
    assert kept == own.nbytes


@torch.no_grad()
def test_tokens_cannot_be_removed_from_a_state() -> None:
    model, tokens = wrapped("kimi"), some_tokens(1, 6)
    cache = model(tokens).past_key_values
    with pytest.raises(ValueError, match=r"crop\(-2\) of a cache of 6 tokens with attention 'kda'; expected to keep"):
        cache.crop(-2)
    assert cache.get_seq_length() == 6
    for options in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": model}):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            model.generate(tokens, **GREEDY, **options)


@torch.no_grad()
def test_latents_fit_into_a_static_cache_and_can_be_removed() -> None:
    model, tokens = wrapped("mla"), some_tokens(1, 8)
    greedy = texts(model, tokens)
    for options in ({"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 2}):
        assert torch.equal(texts(model, tokens, **options), greedy)


@torch.no_grad()
def test_caches_without_a_place_for_states_are_refused_by_name() -> None:
    model, tokens = wrapped("kimi"), some_tokens(2, 5)
    with pytest.raises(ValueError, match=r"a StaticCache with attention 'kda' and 'mla'; expected a DynamicCache"):
        texts(model, tokens, cache_implementation="static")
    others = wrapped("block_attnres")(tokens).past_key_values
    with pytest.raises(ValueError, match=r"the cache holds keys and values for it; expected a cache filled by this"):
        model(tokens, past_key_values=others)
    ours = model(tokens).past_key_values
    with pytest.raises(TypeError, match="keys and values were written to the state of KDA"):
        wrapped("block_attnres")(tokens, past_key_values=ours)


@torch.no_grad()
def test_without_a_cache_padding_and_packed_documents_are_those_of_the_decoder() -> None:
    model = wrapped("kimi")
    tokens, valid = left_padded(PROMPTS)
    assert torch.equal(model(tokens).logits, model.decoder(tokens))
    padded = model(tokens, attention_mask=valid).logits
    torch.testing.assert_close(padded[valid.bool()], model.decoder(tokens, valid=valid)[valid.bool()])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    packed = model.decoder(tokens, documents=torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 3))
    torch.testing.assert_close(model(tokens, position_ids=positions, use_cache=False).logits, packed)


@torch.no_grad()
def test_a_mask_that_is_not_of_all_tokens_is_refused() -> None:
    model, tokens = wrapped("kimi"), some_tokens(3, 7)
    with pytest.raises(ValueError, match=r"attention_mask of shape \[3, 1, 7, 7\] with attention 'kda'; .*\[B, 7\]"):
        model(tokens, attention_mask=torch.ones(3, 1, 7, 7, dtype=torch.bool))
    cache = model(tokens).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask of shape \[3, 1\] with attention 'kda'; expected \[B, 8\]"):
        model(tokens[:, :1], attention_mask=torch.ones(3, 1), past_key_values=cache)


def test_decays_stay_float32_in_a_narrow_model(tmp_path: Path) -> None:
    wrapped("kimi", torch.float32).save_pretrained(tmp_path)
    decoder = DepthmixForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).decoder
    kda = decoder.sublayers[0]
    assert (kda.A_log.dtype, kda.dt_bias.dtype, kda.q_conv.dtype) == (torch.float32, torch.float32, torch.bfloat16)
