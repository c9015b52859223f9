"""With copied weights and the plain residual, the decoder is Qwen3 as `transformers` has it, dense and with experts.

Axes: B batch, T token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import depthmix as dm
from depthmix.inference import DynamicCache, PreallocatedCache, generate

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
PROMPTS = [[5, 9, 2, 60, 33], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [40, 0, 40]]
NEW = 12

EVERY_QWEN3 = pytest.mark.parametrize(
    ("kind", "tied"), [("dense", True), ("dense", False), ("moe", True), ("moe", False)], ids=str
)
EVERY_CACHE = pytest.mark.parametrize("cache", ["dynamic", "preallocated"])


class InDouble(TorchFunctionMode):
    """Whatever asks for float32 gets float64: transformers casts up to float32, also where a model is in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


def make_qwen3(kind: str, tied: bool) -> Any:
    """Random, with norms that are not at their start: a swapped one would show."""
    torch.manual_seed(11)
    if kind == "dense":
        config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=tied)
        model = transformers.Qwen3ForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=tied)
        config._experts_implementation = "eager"  # the only one that has float64
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            if "q_norm" in name or "o_proj" in name or "down_proj" in name:
                p *= 2  # texts that do more than to repeat a token
            if name.endswith("mlp.gate.weight"):
                p.normal_()
    return model.eval()


def copied(theirs: Any) -> dm.Decoder:
    """Our decoder with the weights of a transformers model, in their dtype."""
    config = theirs.config
    experts = (
        {"experts": 6, "active": 2, "shared": 0, "hidden": 16} if hasattr(config, "moe_intermediate_size") else None
    )
    model = dm.Decoder(
        dm.DecoderConfig(
            vocab_size=config.vocab_size,
            dim=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            hidden=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_parameters["rope_theta"],
            tie_embeddings=config.tie_word_embeddings,
            moe=experts,
        )
    ).to(next(theirs.parameters()).dtype)
    found: dict[str, Tensor] = {}
    for name, p in theirs.named_parameters():  # tied weights come once
        for ours, weight in renamed(name, p.detach()):
            found[ours] = weight
    left = model.load_state_dict(found, strict=False)
    assert not left.unexpected_keys
    assert all(key.endswith("balance_bias") for key in left.missing_keys)  # a buffer that starts at 0
    return model.eval()


def renamed(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """A name of transformers and its weight as ours."""
    outside = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"}
    if name.removesuffix(".weight") in outside:
        return [(f"{outside[name.removesuffix('.weight')]}.weight", weight)]
    _, _, layer, rest = name.split(".", 3)
    attention, mlp = f"sublayers.{2 * int(layer)}", f"sublayers.{2 * int(layer) + 1}"
    if rest == "mlp.experts.gate_up_proj":
        gate, up = weight.chunk(2, 1)
        return [(f"{mlp}.gate_proj", gate), (f"{mlp}.up_proj", up)]
    table: list[tuple[str, str]] = [
        ("input_layernorm", f"{attention}.norm"),
        ("post_attention_layernorm", f"{mlp}.norm"),
        ("self_attn", attention),
        ("mlp.gate.", f"{mlp}.router."),
        ("mlp.experts", mlp),
        ("mlp", mlp),
    ]
    old, new = next((old, new) for old, new in table if rest.startswith(old))
    return [(new + rest.removeprefix(old), weight)]


def left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Tokens and validity, both [B, T]."""
    longest = max(map(len, prompts))
    tokens = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    valid = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens), torch.tensor(valid)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    error = (a - b).abs().max()
    assert error <= tolerance, f"differs by {error:.1e}"


def make_tokens() -> Tensor:
    return torch.randint(61, (3, 17), generator=torch.Generator().manual_seed(2))


def in_double(kind: str, tied: bool) -> tuple[Any, dm.Decoder]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            theirs = make_qwen3(kind, tied).double()
    finally:
        torch.set_default_dtype(before)
    return theirs, copied(theirs)


@EVERY_QWEN3
@torch.no_grad()
def test_logits_are_those_of_transformers(kind: str, tied: bool) -> None:
    theirs = make_qwen3(kind, tied)
    tokens = make_tokens()
    want = theirs(tokens).logits
    assert want.std() > 0.5  # logits that tell tokens apart
    close(copied(theirs)(tokens), want, 1e-5)


@EVERY_QWEN3
@torch.no_grad()
def test_logits_in_double_precision_are_those_of_transformers(kind: str, tied: bool) -> None:
    theirs, ours = in_double(kind, tied)
    tokens = make_tokens()
    with InDouble():
        want = theirs(tokens).logits
    close(ours(tokens), want, 1e-10)


@EVERY_QWEN3
@torch.no_grad()
def test_logits_of_a_left_padded_batch_are_those_of_transformers(kind: str, tied: bool) -> None:
    theirs, ours = in_double(kind, tied)
    tokens, valid = left_padded(PROMPTS)
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    with InDouble():
        want = theirs(tokens, attention_mask=valid, position_ids=positions).logits
    close(ours(tokens, valid=valid.bool())[valid.bool()], want[valid.bool()], 1e-10)


def their_cached_logits(model: Any, tokens: Tensor, cuts: list[int]) -> Tensor:
    past, found = None, []
    for part in tokens.split(cuts, 1):
        out = model(part, past_key_values=past, use_cache=True)
        past = out.past_key_values
        found.append(out.logits)
    return torch.cat(found, 1)


@EVERY_CACHE
@EVERY_QWEN3
@torch.no_grad()
def test_logits_through_a_cache_are_those_of_transformers(kind: str, tied: bool, cache: str) -> None:
    theirs = make_qwen3(kind, tied)
    ours, tokens, cuts = copied(theirs), make_tokens(), [6, 4, 1, 1, 5]
    held = DynamicCache() if cache == "dynamic" else PreallocatedCache(ours.config, 3, 20)
    logits = torch.cat([ours(part, cache=held) for part in tokens.split(cuts, 1)], 1)
    close(logits, their_cached_logits(theirs, tokens, cuts), 1e-5)


def their_text(model: Any, prompts: list[list[int]], use_cache: bool) -> list[list[int]]:
    tokens, valid = left_padded(prompts)
    out = model.generate(
        tokens, attention_mask=valid, do_sample=False, max_new_tokens=NEW, use_cache=use_cache, pad_token_id=0
    )
    return out[:, tokens.shape[1] :].tolist()


@torch.no_grad()
def our_text_without_cache(model: Callable[..., Tensor], prompts: list[list[int]]) -> list[list[int]]:
    tokens, valid = left_padded(prompts)
    begin = tokens.shape[1]
    for _ in range(NEW):
        new = model(tokens, valid=valid.bool())[:, -1].argmax(-1, keepdim=True)
        tokens, valid = torch.cat([tokens, new], 1), torch.cat([valid, torch.ones_like(new)], 1)
    return tokens[:, begin:].tolist()


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "left padded"])
@EVERY_QWEN3
def test_greedy_text_is_that_of_transformers(kind: str, tied: bool, prompts: list[list[int]]) -> None:
    theirs = make_qwen3(kind, tied)
    ours = copied(theirs)
    want = their_text(theirs, prompts, use_cache=True)
    assert all(len(row) == NEW for row in want)
    assert len({tuple(row) for row in want}) == len(prompts)  # a text for each prompt, not one for all
    assert max(len(set(row)) for row in want) > 1
    assert their_text(theirs, prompts, use_cache=False) == want
    assert our_text_without_cache(ours, prompts) == want
    for cache in ("dynamic", "preallocated"):
        assert generate(ours, prompts, max_new_tokens=NEW, cache=cache) == want
        assert generate(ours, prompts, max_new_tokens=NEW, cache=cache, chunk=2) == want
