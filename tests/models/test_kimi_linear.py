"""Decoders whose attention is KDA and MLA: against loops, in pieces, with padding and documents, compiled, on disk.

Axes: B batch, T token, D channel.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import depthmix as dm
from depthmix.inference import DynamicCache, PreallocatedCache
from depthmix.models import Decoder, DecoderConfig
from depthmix.models.mla import MLA
from tests.cases import DEFAULTS
from tests.decoders import KIMI, some_tokens, tiny, tiny_config
from tests.reference import block_attnres, kimi_linear

BLOCKS = {"name": "block_attnres", "num_blocks": 3}
MIXED: dict[str, Any] = {**KIMI, "layers": 3, "attention": ("kda", "mla", "gqa")}
SHORT = ("residual", "block_attnres", "mhc")
MECHANISMS = pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(*case.values, id=case.id, marks=() if case.id in SHORT else pytest.mark.full) for case in DEFAULTS],
)
EXPERTS = {"experts": 4, "active": 2, "shared": 1, "hidden": 8, "scoring": "sigmoid"}


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


def public(model: Decoder) -> dict[str, Tensor]:
    """The tensors of a decoder under the names of the public checkpoint, for the reference."""
    theirs = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    theirs |= {"head.weight": "lm_head.weight"}
    attention = {"kv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_b": "kv_b_proj"}
    found = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith("sublayers."):
            found[theirs.get(name, name)] = tensor
            continue
        number, word = name.split(".", 2)[1:]
        layer, second = divmod(int(number), 2)
        first = word.split(".")[0]
        if first == "norm":
            place = "post_attention_layernorm" if second else "input_layernorm"
            found[f"model.layers.{layer}.{place}.weight"] = tensor
        elif second:
            found |= {f"model.layers.{layer}.{key}": part for key, part in of_mlp(word, tensor).items()}
        elif first.endswith("_conv"):
            found[f"model.layers.{layer}.self_attn.{first}1d.weight"] = tensor[:, None]
        else:
            found[f"model.layers.{layer}.self_attn.{word.replace(first, attention.get(first, first))}"] = tensor
    return found


def of_mlp(word: str, tensor: Tensor) -> dict[str, Tensor]:
    experts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    if word == "router.weight":
        return {"block_sparse_moe.gate.weight": tensor}
    if word == "balance_bias":
        return {"block_sparse_moe.gate.e_score_correction_bias": tensor}
    if word in experts:
        return {f"block_sparse_moe.experts.{e}.{experts[word]}.weight": part for e, part in enumerate(tensor)}
    if word.startswith("shared."):
        return {word.replace("shared.", "block_sparse_moe.shared_experts."): tensor}
    return {f"mlp.{word}": tensor}


def expected(model: Decoder, tokens: Tensor, **rows: Tensor) -> Tensor:
    config = model.config
    assert config.kda is not None
    weights = public(model)
    depth = None
    if config.mixer.name == "block_attnres":
        mixers = {name.removeprefix("depth."): p for name, p in model.state_dict().items()}
        depth = lambda x, sublayers: block_attnres.inputs(x, sublayers, mixers, num_blocks=3, eps=1e-6)  # noqa: E731
    return kimi_linear.logits(
        tokens,
        weights,
        attention=config.attention_kinds,
        heads=config.heads,
        kda_heads=config.kda.heads,
        active=EXPERTS["active"],
        scale=1.0,
        eps=config.norm_eps,
        depth=depth,
        **rows,
    )


@pytest.mark.parametrize("mixer", ["residual", BLOCKS], ids=["residual", "blocks"])
@pytest.mark.parametrize("moe", [None, EXPERTS], ids=["dense", "experts"])
@torch.no_grad()
def test_logits_are_those_of_the_loops(mixer: Any, moe: Any) -> None:
    model, tokens = tiny(**KIMI, mixer=mixer, moe=moe), some_tokens(2, 9)
    assert gap(model(tokens), expected(model, tokens)) <= 1e-11
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[0, :3] = valid[1, 7:] = False
    found, want = model(tokens, valid=valid), expected(model, tokens, valid=valid)
    assert gap(found[valid], want[valid]) <= 1e-11
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2)
    assert gap(model(tokens, documents=documents), expected(model, tokens, documents=documents)) <= 1e-11


def make_caches(model: Decoder, batch: int, capacity: int) -> list[Any]:
    return [DynamicCache(), PreallocatedCache(model.config, batch, capacity, dtype=torch.float64)]


@MECHANISMS
@torch.no_grad()
def test_pieces_through_a_cache_are_the_whole(name: str, options: dict[str, Any]) -> None:
    model, tokens = tiny(**MIXED, mixer={"name": name, **options}), some_tokens(2, 40)
    want = model(tokens)
    for cache in make_caches(model, 2, 48):
        pieces = [model(part, cache=cache) for part in tokens.split([19, 17, 1, 1, 1, 1], 1)]
        assert gap(torch.cat(pieces, 1), want) <= 1e-10
        cache.reset()
        singles = [model(part, cache=cache) for part in tokens[:, :6].split(1, 1)]
        assert gap(torch.cat(singles, 1), want[:, :6]) <= 1e-10


@torch.no_grad()
def test_a_looped_layer_has_a_state_for_each_execution() -> None:
    model, tokens = tiny(**MIXED, loop={"first": 0, "last": 2, "repeats": 2}), some_tokens(2, 30)
    want = model(tokens)
    for cache in make_caches(model, 2, 30):
        pieces = [model(part, cache=cache) for part in tokens.split([20, 9, 1], 1)]
        assert gap(torch.cat(pieces, 1), want) <= 1e-10
        assert len(cache.slots) == 5


@torch.no_grad()
def test_a_row_with_padding_is_the_row_alone_whatever_the_side() -> None:
    """Two chunks, padded differently, and two single tokens, through both caches and in one pass."""
    model, tokens = tiny(**MIXED, mixer=BLOCKS), some_tokens(3, 30)
    valid = torch.ones(3, 30, dtype=torch.bool)
    valid[0, :11] = valid[1, 12:20] = valid[1, 5] = valid[2, 22:28] = valid[2, 9] = False
    alone = [model(row[mask][None])[0] for row, mask in zip(tokens, valid, strict=True)]
    found = [model(tokens, valid=valid)]
    for cache in make_caches(model, 3, 40):
        parts = zip(tokens.split([12, 16, 1, 1], 1), valid.split([12, 16, 1, 1], 1), strict=True)
        found.append(torch.cat([model(t, valid=None if v.all() else v, cache=cache) for t, v in parts], 1))
    for logits in found:
        for row, mask, want in zip(logits, valid, alone, strict=True):
            assert gap(row[mask], want) <= 1e-10


@torch.no_grad()
def test_a_packed_document_is_the_document_alone() -> None:
    lengths = [7, 1, 21, 11]
    model, tokens = tiny(**MIXED, mixer=BLOCKS), some_tokens(2, sum(lengths))
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand_as(tokens)
    found = model(tokens, documents=documents).split(lengths, 1)
    for part, logits in zip(tokens.split(lengths, 1), found, strict=True):
        assert gap(logits, model(part)) <= 1e-10


# Latent attention


def latent_attention(**sizes: int) -> MLA:
    torch.manual_seed(0)
    mla = {"rank": 12, "nope": 8, "shared": 4, "value": 6} | sizes
    return MLA(tiny_config(**{**KIMI, "attention": "mla", "kda": None, "mla": mla})).double()


@pytest.mark.parametrize("sizes", [{}, {"shared": 0}, {"value": 20}, {"rank": 40}], ids=str)
@pytest.mark.parametrize("new", [1, 5])
def test_attention_over_latents_is_that_over_keys_and_values(sizes: dict[str, int], new: int) -> None:
    sublayer = latent_attention(**sizes)
    config, columns = sublayer.config, 11
    q = torch.randn(2, 4, new, config.nope + config.shared, dtype=torch.float64, requires_grad=True)
    latent = torch.randn(2, 1, columns, config.rank + config.shared, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(new, columns, dtype=torch.bool).tril(columns - new).expand(2, 1, -1, -1).clone()
    mask[0, 0, :, 2] = False
    leaves = [q, latent, sublayer.kv_b.weight]
    ours, theirs = sublayer.absorbed(q, latent, mask), sublayer.expanded(q, latent, mask)
    assert gap(ours, theirs) <= 1e-12
    direction = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(y, leaves, direction) for y in (ours, theirs)), strict=True):
        assert gap(a, b) <= 1e-12


def test_the_published_sizes_absorb_up_to_170_new_tokens_and_never_a_whole_prompt() -> None:
    with torch.device("meta"):
        sublayer = latent_attention(rank=512, nope=128, shared=64, value=128)
    assert sublayer.absorbs(1, 2)
    assert sublayer.absorbs(170, 10**6)
    assert not sublayer.absorbs(171, 10**6)
    assert not sublayer.absorbs(100, 100)
    assert not sublayer.absorbs(1, 1)


# What is kept


@torch.no_grad()
def test_bytes_of_a_cache_grow_with_columns_only_where_there_are_columns() -> None:
    model = tiny(**KIMI)
    state = 3 * 2 * (2 * 8 * 8 + 3 * 3 * 16) * 8  # 3 layers, 2 rows
    for cache in make_caches(model, 2, 24):
        for length in (10, 24):
            cache.reset()
            model(some_tokens(2, length), cache=cache)
            columns = length if isinstance(cache, DynamicCache) else 24
            assert cache.nbytes == state + 2 * columns * (12 + 4) * 8


def test_the_published_cache_is_8064_bytes_per_token_and_2_mebibytes_and_72_kibibytes_per_layer() -> None:
    kinds = (*("kda", "kda", "kda", "mla") * 6, "kda", "kda", "mla")
    sizes: dict[str, Any] = {"vocab_size": 163840, "dim": 2304, "layers": 27, "heads": 32, "hidden": 9216}
    kda, mla = {"heads": 32, "head_dim": 128}, {"rank": 512, "nope": 128, "shared": 64, "value": 128}
    config = DecoderConfig(**sizes, attention=kinds, kda=kda, mla=mla)  # type: ignore[arg-type]
    one, two = (PreallocatedCache(config, 1, n, dtype=torch.bfloat16, device="meta").nbytes for n in (1, 2))
    assert two - one == 8064
    assert one - 8064 == 20 * (2 * 2**20 + 72 * 2**10)


@torch.no_grad()
def test_a_narrow_model_keeps_its_memory_in_float32() -> None:
    model = tiny(dtype=torch.bfloat16, **KIMI)
    cache = PreallocatedCache(model.config, 1, 20, dtype=torch.bfloat16)
    for part in some_tokens(1, 20).split([18, 1, 1], 1):
        logits = model(part, cache=cache)
    assert logits.dtype == torch.bfloat16
    memory, history = cache.slots[0]
    assert (memory.dtype, history.dtype) == (torch.float32, torch.bfloat16)


@torch.no_grad()
def test_rewinding_returns_to_the_mark_to_the_start_and_nowhere_else() -> None:
    model, tokens = tiny(**MIXED), some_tokens(2, 30)
    want, cache = model(tokens), PreallocatedCache(tiny_config(**MIXED), 2, 30, dtype=torch.float64)
    model(tokens[:, :20], cache=cache)
    with pytest.raises(ValueError, match=r"length=19 in a cache with states of KDA.*; expected 0 or 20. Call mark"):
        cache.rewind(19)
    assert cache.length == 20
    cache.mark()
    for _ in range(2):
        model(tokens[:, 20:25].flip(0), cache=cache)
        cache.rewind(20)
    assert gap(model(tokens[:, 20:], cache=cache), want[:, 20:]) <= 1e-10
    cache.rewind(30)  # nothing to remove
    cache.rewind(0)
    assert gap(model(tokens[:, :25], cache=cache), want[:, :25]) <= 1e-10
    with pytest.raises(ValueError, match="expected 0 or 25"):  # the mark was above 0, of other tokens
        cache.rewind(20)


@torch.no_grad()
def test_latents_are_rewound_like_keys() -> None:
    model, tokens = tiny(**{**KIMI, "attention": "mla", "kda": None}), some_tokens(2, 20)
    cache = PreallocatedCache(model.config, 2, 20, dtype=torch.float64)
    model(tokens.flip(1), cache=cache)
    model(tokens.flip(1)[:, :0], cache=cache)
    cache.rewind(0)
    model(tokens[:, :15], cache=cache)
    cache.rewind(12)
    assert gap(model(tokens[:, 12:], cache=cache), model(tokens)[:, 12:]) <= 1e-10


@torch.no_grad()
def test_the_cache_of_another_model_is_refused() -> None:
    tokens = some_tokens(1, 3)
    for cache in (DynamicCache(), PreallocatedCache(tiny_config(**KIMI), 1, 9, dtype=torch.float64)):
        tiny(**KIMI)(tokens, cache=cache)
        with pytest.raises(ValueError, match=r"call reset|state has shape|a cache made for|the cache holds"):
            tiny(**{**KIMI, "attention": ("mla", "kda", "kda", "kda")})(tokens, cache=cache)


# Generation


@torch.no_grad()
def test_generation_is_greedy_decoding_without_a_cache() -> None:
    model, prompts = tiny(**MIXED, mixer=BLOCKS), [[5, 7, 9], [3] * 20, [11]]
    want = []
    for prompt in prompts:
        row = list(prompt)
        for _ in range(5):
            row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
        want.append(row[len(prompt) :])
    for cache in ("dynamic", "preallocated"):
        assert dm.generate(model, prompts, max_new_tokens=5, cache=cache) == want
        assert dm.generate(model, prompts, max_new_tokens=5, cache=cache, chunk=7) == want


@torch.no_grad()
def test_a_compiled_step_is_one_graph_that_writes_in_place() -> None:
    model, tokens = tiny(**MIXED, mixer=BLOCKS), some_tokens(2, 24)
    eager, fixed = (PreallocatedCache(model.config, 2, 32, dtype=torch.float64) for _ in range(2))
    for cache in (eager, fixed):
        model(tokens[:, :20], cache=cache)
    places = [tensor.data_ptr() for tensor in fixed.tensors]
    counter = CompileCounterWithBackend("aot_eager")

    def step(token: Tensor, cache: PreallocatedCache) -> Tensor:
        logits: Tensor = model(token, cache=cache, last_only=True)
        return logits

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=False)
    for token in tokens[:, 20:].split(1, 1):
        assert gap(compiled(token, fixed), step(token, eager)) <= 1e-10
    assert counter.frame_count == 1
    assert [tensor.data_ptr() for tensor in fixed.tensors] == places


# Training


def gradients(model: Decoder, loss: Any, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss(tokens).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_every_parameter_has_a_gradient_and_checkpointing_does_not_change_it() -> None:
    model, tokens = tiny(**MIXED, mixer=BLOCKS), some_tokens(2, 40)
    want = gradients(model, model.loss, tokens)
    assert len(want) == len([*model.parameters()])
    assert all(grad.any() for grad in want)
    model.checkpoint_every = 2
    for a, b in zip(gradients(model, model.loss, tokens), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.full
@pytest.mark.inductor
def test_a_compiled_training_step_is_the_eager_one() -> None:
    model, tokens = tiny(**MIXED, mixer=BLOCKS), some_tokens(2, 40)
    want = gradients(model, model.loss, tokens)
    compiled = torch.compile(model.loss, fullgraph=True, dynamic=False)
    for a, b in zip(gradients(model, compiled, tokens), want, strict=True):
        assert gap(a, b) <= 1e-10


def test_weights_are_drawn_by_seed_and_name_and_start_as_their_table_says() -> None:
    models = [Decoder(tiny_config(**{**KIMI, "mixer": mixer})) for mixer in ("residual", "attnres")]
    for model in models:
        model.reset_parameters(3)
    first, second = (dict(model.named_parameters()) for model in models)
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name
    place = "sublayers.0"
    assert (
        1
        <= float(first[f"{place}.A_log"].detach().exp().min())
        <= float(first[f"{place}.A_log"].detach().exp().max())
        <= 16
    )
    assert 0.25 < float(first[f"{place}.q_conv"].detach().abs().max()) <= 0.5
    assert not torch.equal(first[f"{place}.q_conv"], first[f"{place}.k_conv"])
    assert torch.equal(first["sublayers.6.kv_norm.weight"], torch.ones(12))
    bounded = Decoder(tiny_config(**{**KIMI, "kda": {**KIMI["kda"], "bound": -5.0}}))
    bounded.reset_parameters(3)
    assert not bounded.sublayers[0].A_log.any()


def test_segments_in_a_row_are_the_decoder() -> None:
    model, tokens = tiny(**KIMI, mixer=BLOCKS), some_tokens(2, 20)
    documents = torch.tensor([0] * 8 + [1] * 12).expand(2, -1)
    state: Any = (tokens,)
    for lo, hi in ((0, 3), (3, 8)):
        part = dm.Segment(model.config, lo, hi).double()
        part.load_state_dict({name: model.state_dict()[name] for name in part.state_dict()})
        state = part(*state, documents=documents)
    assert gap(part.logits(state[0]), model(tokens, documents=documents)) <= 1e-12


def test_a_model_on_disk_is_the_same_model(tmp_path: Path) -> None:
    model, tokens = tiny(**KIMI, mixer=BLOCKS), some_tokens(2, 12)
    dm.save_model(model, tmp_path)
    loaded = dm.load_model(tmp_path)
    assert loaded.config.attention_kinds == model.config.attention_kinds
    assert torch.equal(loaded(tokens), model(tokens))
    narrow = dm.load_model(tmp_path, dtype=torch.bfloat16)
    assert narrow.sublayers[0].A_log.dtype == torch.float32
    assert narrow.sublayers[0].q_conv.dtype == torch.bfloat16


@torch.no_grad()
def test_a_trace_gives_the_inputs_of_every_sublayer() -> None:
    model, tokens = tiny(**KIMI, mixer=BLOCKS), some_tokens(1, 6)
    trace = dm.trace(model, tokens)
    torch.testing.assert_close(
        torch.einsum("btij,jbtd->ibtd", trace.M, trace.sources), trace.inputs, rtol=0, atol=1e-11
    )


# Configuration


def test_a_shorter_list_of_kinds_repeats_and_equal_decoders_have_equal_configurations() -> None:
    short = tiny_config(**{**KIMI, "layers": 8})
    long = tiny_config(**{**KIMI, "layers": 8, "attention": ["kda", "kda", "kda", "mla"] * 2})
    assert short.attention_kinds == long.attention_kinds == ("kda", "kda", "kda", "mla") * 2
    assert short.canonical() == long.canonical()
    assert tiny_config(attention=("gqa",)).fingerprint() == tiny_config().fingerprint()
    assert not {"attention", "kda", "mla"} & tiny_config().fingerprint().keys()
    assert short.fingerprint() != tiny_config(layers=8).fingerprint()


def test_a_configuration_goes_through_json_and_back() -> None:
    config = tiny_config(**KIMI)
    for fields in (config.to_dict(), config.saved()):
        again = DecoderConfig.from_dict(json.loads(json.dumps(fields)))
        assert again.saved() == config.saved()
        assert hash(again.attention) == hash(config.attention)
    assert tiny_config().to_dict() | {"attention": "gqa"} == tiny_config().to_dict()


def test_sizes_that_only_grouped_queries_need_are_not_asked_of_others() -> None:
    model = Decoder(tiny_config(**{**KIMI, "dim": 30, "heads": 4, "kv_heads": 3}))
    assert model(some_tokens(1, 4)).shape[:2] == (1, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": "mha"}, r"attention='mha' with 'mha'; expected 'gqa', 'kda' or 'mla'"),
        ({"attention": ("kda", "mlp")}, r"with 'mlp'; expected 'gqa', 'kda' or 'mla'"),
        ({"attention": 3}, r"attention=3; expected a string"),
        ({"attention": None}, r"attention=None; expected a string"),
        ({"attention": ()}, "attention has 0 names for 4 layers"),
        ({"attention": ("kda", "mla") * 3}, "attention has 6 names for 4 layers; expected one name"),
        ({"kda": None}, r"attention=.* without kda; expected its sizes, such as \{'heads': 4, 'head_dim': 32\}"),
        ({"mla": None}, "without mla; expected its sizes"),
        ({"attention": "kda"}, r"MLAConfig\(.*\) with attention='kda'; expected mla=None, or 'mla' among the layers"),
        ({"kda": {"heads": 2}}, r"kda.head_dim must be set too"),
        ({"mla": {**KIMI["mla"], "rank": 0}}, "mla.rank=0; expected 1 to"),
        ({"mla": {**KIMI["mla"], "norm_eps": 0.0}}, "mla.norm_eps=0.0"),
        ({"mla": {**KIMI["mla"], "ranks": 1}}, "mla has no field 'ranks'. Did you mean 'rank'"),
        ({"kv_mixer": "depth_attention"}, r"kv_mixer='depth_attention' with attention=.*expected kv_mixer=None"),
    ],
)
def test_wrong_configurations_name_the_value(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny_config(**{**KIMI, **changes})
