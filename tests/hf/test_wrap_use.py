"""What a wrapped model is used for: generation, checkpointing, compiling, traces and cuts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from tests.models.test_qwen3 import copied

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from tests.hf.family_models import (  # noqa: E402
    DEFAULT_AND_FULL,
    LAYERS,
    mixers_of,
    move_mixers,
    some_tokens,
    tiny_model,
    wrapped,
)

GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
KV = [
    "depth_attention",
    "value_residual",
    {"name": "depth_attention", "stride": 2},
    {"name": "value_residual", "learned": True},
]
SITES = [
    *((name, None) for name in dm.list_mechanisms()),
    *(("residual", kv) for kv in KV),
    ("block_attnres", "depth_attention"),
]
EVERY_SITE = pytest.mark.parametrize(("mixer", "kv_mixer"), SITES, ids=str)
EVERY_FAMILY = pytest.mark.parametrize("model_type", DEFAULT_AND_FULL)
SOME_SITES = pytest.mark.parametrize(
    ("mixer", "kv_mixer"), [("block_attnres", None), ("attnres", "depth_attention"), ("mhc", "value_residual")], ids=str
)
PROMPTS = [[5, 9, 2, 60, 33], [7], [1, 2, 3, 4, 5, 6, 7]]


def left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    return tokens, torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing, f"without a gradient: {missing}"
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@EVERY_SITE
@torch.no_grad()
def test_caches_beams_and_padding_give_what_no_cache_gives(mixer: str, kv_mixer: Any) -> None:
    model, tokens = wrapped("qwen3", mixer, kv_mixer=kv_mixer), some_tokens(2, 6)
    greedy = model.generate(tokens, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(tokens, **GREEDY), greedy)
    assert torch.equal(model.generate(tokens, cache_implementation="static", disable_compile=True, **GREEDY), greedy)
    beams = model.generate(tokens, num_beams=3, **GREEDY)
    assert torch.equal(beams, model.generate(tokens, num_beams=3, use_cache=False, **GREEDY))
    padded, valid = left_padded(PROMPTS)
    texts = model.generate(padded, attention_mask=valid, **GREEDY)[:, padded.shape[1] :]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        alone = model.generate(torch.tensor([prompt]), use_cache=False, **GREEDY)[0, len(prompt) :]
        assert torch.equal(text, alone), f"{mixer} with {kv_mixer}: {prompt}"


@EVERY_FAMILY
@torch.no_grad()
def test_padded_prompts_and_beams_of_every_family_continue_as_alone(model_type: str) -> None:
    model = wrapped(model_type, dtype=torch.float32)
    padded, valid = left_padded(PROMPTS)
    for options in ({}, {"num_beams": 2}):
        texts = model.generate(padded, attention_mask=valid, **GREEDY, **options)[:, padded.shape[1] :]
        for prompt, text in zip(PROMPTS, texts, strict=True):
            alone = torch.tensor([prompt])
            expected = model.generate(alone, attention_mask=torch.ones_like(alone), **GREEDY, **options)
            assert torch.equal(text, expected[0, len(prompt) :]), prompt


@SOME_SITES
@torch.no_grad()
def test_eager_and_fused_attention_agree_and_a_switch_keeps_the_mixers(mixer: str, kv_mixer: Any) -> None:
    model, tokens = wrapped("llama", mixer, kv_mixer=kv_mixer), some_tokens(2, 8)
    fused = model(tokens).logits
    model.set_attn_implementation("eager")
    assert torch.allclose(model(tokens).logits, fused, atol=1e-5)  # its softmax is in float32
    weights = model(tokens, output_attentions=True).attentions
    assert len(weights) == LAYERS
    assert torch.allclose(weights[2].sum(-1), torch.ones(()).double(), atol=1e-6)
    if kv_mixer is not None:
        model.config._attn_implementation = "eager"
        with pytest.raises(RuntimeError, match=r"ran without mixing values: set its .* with model\.set_attn_impl"):
            model(tokens)


@EVERY_FAMILY
def test_checkpointing_changes_no_gradient(model_type: str) -> None:
    kv = "depth_attention" if model_type in ("gpt2", "llama", "qwen3", "gpt_neox", "cohere") else None
    model, tokens = wrapped(model_type, dtype=torch.float32, kv_mixer=kv).train(), some_tokens(2, 7)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    plain = gradients(model, model(tokens, labels=tokens, use_cache=False).loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = gradients(model, model(tokens, labels=tokens, use_cache=False).loss)
    for name, gradient in again.items():
        assert torch.allclose(gradient, plain[name], rtol=1e-4, atol=1e-5 * float(plain[name].abs().max())), name


def test_reentrant_checkpointing_which_drops_gradients_is_refused() -> None:
    model = wrapped("llama").train()
    with pytest.raises(ValueError, match="use_reentrant=True; expected False"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    plain = tiny_model("llama").train()
    plain.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=True; expected False"):
        dm.wrap(plain, "attnres")
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = some_tokens(2, 6)
    checkpointed = dm.wrap(plain, "attnres").train()
    gradients(checkpointed, checkpointed(tokens, labels=tokens, use_cache=False).loss)


@SOME_SITES
@torch.no_grad()
def test_the_decoder_with_copied_weights_computes_the_same(mixer: str, kv_mixer: Any) -> None:
    """Qwen3 is also what `dm.Decoder` computes: the same mechanism, put in at two places, by two pieces of code."""
    model, tokens = wrapped("qwen3", mixer, kv_mixer=kv_mixer, blend=False), some_tokens(2, 9)
    with pytest.warns(UserWarning, match="had left the plain residual"):
        plain = dm.unwrap(copy.deepcopy(model))
    ours = copied(plain)
    stack = dm.DepthStack(mixer, dim=32, depth=2 * LAYERS, **options_of(model, "mixer")).double()
    ours.depth = stack
    names = {name.split("depthmix.")[1]: p for name, p in model.named_parameters() if ".depthmix." in name}
    stack.load_state_dict(names, strict=False)
    if kv_mixer is not None:
        options = options_of(model, "kv_mixer")
        ours.kv_mixers = dm.KVStack(kv_mixer, head_dim=8, depth=LAYERS, **options).double()
        for one, other in zip(ours.kv_mixers, model.value_mixers(), strict=True):
            one.load_state_dict({name: t for name, t in other.state_dict().items() if not name.startswith("_")})
    expected, got = ours(tokens), model(tokens).logits
    assert torch.allclose(got, expected, atol=3e-6 * float(expected.abs().max())), (got - expected).abs().max()
    one, other = dm.trace(model, tokens), dm.trace(ours, tokens)
    assert torch.allclose(one.M, other.M, atol=1e-5)
    assert torch.allclose(one.sources, other.sources, atol=1e-4)


def options_of(model: Any, child: str) -> dict[str, Any]:
    fields = model.config.depthmix[child]
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items() if name != "name"}


@EVERY_FAMILY
@torch.no_grad()
def test_a_trace_adds_up_to_what_each_sublayer_reads_and_cuts_change_the_loss(model_type: str) -> None:
    model, tokens = wrapped(model_type, "attnres", dtype=torch.float32), some_tokens(2, 8)
    logits = model(tokens).logits
    trace = dm.trace(model, tokens)
    depth = trace.M.shape[-1]
    assert depth == len(mixers_of(model)) // 2 + 1, "a query and a key weight for each site but the first"
    sums = torch.einsum("btls,sbtd->lbtd", trace.M, trace.sources)
    assert torch.allclose(sums, trace.inputs, atol=1e-4 * float(trace.inputs.abs().max()))
    hidden = model(tokens, output_hidden_states=True).hidden_states
    assert len(hidden) == LAYERS + 1
    assert torch.equal(model(tokens).logits, logits), "nothing is left behind"
    ablation = dm.ablate(model, tokens)
    assert max(abs(effect.loss.mean) for effect in ablation.effects) > 1e-3


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("mixer", "kv_mixer"),
    [
        ("attnres", "depth_attention"),
        *(pytest.param(*site, marks=pytest.mark.full) for site in (("block_attnres", None), ("mhc", "value_residual"))),
    ],
    ids=str,
)
def test_compiled_in_one_graph_it_computes_the_same(mixer: str, kv_mixer: Any) -> None:
    model, tokens = wrapped("qwen3", mixer, kv_mixer=kv_mixer), some_tokens(2, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain = gradients(model, model(tokens, labels=tokens, use_cache=False).loss)
    loss = compiled(tokens, labels=tokens, use_cache=False).loss
    for name, gradient in gradients(model, loss).items():
        assert torch.allclose(gradient, plain[name], atol=1e-6), name  # of a loss in float32


@torch.no_grad()
def test_hidden_states_before_and_after_training_belong_to_the_layers_own_sums() -> None:
    plain, tokens = tiny_model("llama"), some_tokens(2, 6)
    expected = plain(tokens, output_hidden_states=True).hidden_states
    model = dm.wrap(plain, "residual")
    got = model(tokens, output_hidden_states=True).hidden_states
    assert len(got) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    moved = move_mixers(dm.wrap(tiny_model("llama"), "attnres"))
    trace, got = dm.trace(moved, tokens), moved(tokens, output_hidden_states=True).hidden_states
    sums = trace.inputs[2] + trace.sources[3] + trace.sources[4]  # what layer 1 reads first and what it writes
    assert torch.allclose(got[2], sums, atol=1e-5)
