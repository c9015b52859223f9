"""Caches and generation: the same text, however it is computed; draws that are what they say; errors that help."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from depthmix.data import ByteTokenizer, load_tokenizer
from depthmix.inference import (
    DynamicCache,
    PreallocatedCache,
    TextStream,
    generate,
    row_seed,
    stream,
)
from depthmix.inference.generate import Sampler
from depthmix.models import Decoder
from tests.decoders import VOCABULARY, some_tokens, tiny

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7]]
MODELS = pytest.mark.parametrize(
    ("form", "mixer", "kv"),
    [
        ("dense", "residual", None),
        ("dense", {"name": "block_attnres", "block_sublayers": 2}, "depth_attention"),
        ("moe", "mhc", "value_residual"),
        ("looped", "attnres", "depth_attention"),
    ],
)
CACHES = pytest.mark.parametrize("kind", ["dynamic", "preallocated"])


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny(mixer={"name": "block_attnres", "block_sublayers": 2}, kv_mixer="depth_attention")


@torch.no_grad()
def without_cache(model: Decoder, prompt: list[int], steps: int) -> list[int]:
    """The plainest loop: everything again for every token."""
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Compile with plain operations, and count the graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    return counter


# The same text


@CACHES
@MODELS
def test_greedy_text_is_that_of_a_loop_without_a_cache(form: str, mixer: Any, kv: str | None, kind: Any) -> None:
    model = tiny(form, mixer=mixer, kv_mixer=kv)
    plain = [without_cache(model, prompt, 6) for prompt in PROMPTS]
    assert len({tuple(row) for row in plain}) > 1, "a model that says one thing would pass"
    assert generate(model, PROMPTS, max_new_tokens=6, cache=kind) == plain
    assert generate(model, PROMPTS, max_new_tokens=6, cache=kind, chunk=2) == plain
    for prompt, row in zip(PROMPTS, plain, strict=True):
        assert generate(model, [prompt], max_new_tokens=6, cache=kind) == [row]


def test_a_tensor_of_prompts_gives_what_their_lists_give(model: Decoder) -> None:
    tokens = some_tokens(2, 4)
    assert generate(model, tokens, max_new_tokens=3) == generate(model, tokens.tolist(), max_new_tokens=3)


def test_a_stream_yields_the_tokens_of_generate(model: Decoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    steps = list(stream(model, PROMPTS, **options))
    assert [list(row) for row in zip(*steps, strict=True)] == generate(model, PROMPTS, **options)


@CACHES
def test_a_cache_continues_where_a_text_ended(model: Decoder, kind: str) -> None:
    cache: Any = DynamicCache() if kind == "dynamic" else PreallocatedCache(model.config, 3, 32, dtype=torch.float64)
    first = generate(model, PROMPTS, max_new_tokens=4, cache=cache)
    assert cache.length == 5 + 3, "the last token has not been read yet"
    more = [[row[-1], 11, 12] for row in first]
    longer = [p + row + [11, 12] for p, row in zip(PROMPTS, first, strict=True)]
    assert generate(model, more, max_new_tokens=4, cache=cache) == [without_cache(model, p, 4) for p in longer]
    cache.reset()
    assert cache.length == 0
    assert generate(model, PROMPTS, max_new_tokens=4, cache=cache) == first


def test_reading_a_prompt_into_a_cache_yields_nothing(model: Decoder) -> None:
    cache = DynamicCache()
    assert generate(model, [[1, 2, 3]], max_new_tokens=0, cache=cache) == [[]]
    assert cache.length == 3


@CACHES
@torch.no_grad()
def test_a_mask_is_made_only_where_something_needs_one(model: Decoder, kind: str) -> None:
    def fresh(batch: int) -> Any:
        return DynamicCache() if kind == "dynamic" else PreallocatedCache(model.config, batch, 16, dtype=torch.float64)

    def mask_of(cache: Any, count: int, valid: Tensor | None = None) -> Tensor | None:
        shared: list[Any] = []
        handle = model.sublayers[0].register_forward_pre_hook(lambda module, given: shared.append(given[2]))
        model(some_tokens(2, count), valid=valid, cache=cache)
        handle.remove()
        return shared[0].mask

    cache = fresh(2)
    assert mask_of(cache, 4) is None
    assert mask_of(cache, 1) is None
    rectangle = mask_of(cache, 2)
    assert rectangle is not None
    assert rectangle[0, 0].int().tolist() == [[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]
    cache = fresh(2)
    valid = torch.tensor([[True, True, True], [False, False, True]])
    padded = mask_of(cache, 3, valid)
    assert padded is not None
    assert padded[1, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]], "padding sees itself"
    after = mask_of(cache, 1)
    assert after is not None
    assert after[1, 0].int().tolist() == [[0, 0, 1, 1]]


def test_rows_end_at_a_stop_token_and_leave_the_others_alone(model: Decoder) -> None:
    whole = generate(model, PROMPTS, max_new_tokens=8, temperature=1.0)
    stop = whole[0][3]
    ended = [row[: row.index(stop)] if stop in row else row for row in whole]
    assert generate(model, PROMPTS, max_new_tokens=8, temperature=1.0, stop=[stop]) == ended
    steps = list(stream(model, [PROMPTS[0]], max_new_tokens=8, temperature=1.0, stop=set(whole[0])))
    assert steps == [], "nothing is computed after all have ended"


def test_the_model_keeps_its_mode_and_counts_nothing_while_it_generates() -> None:
    model = tiny("moe").train()
    model.sublayers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    generate(model, PROMPTS, max_new_tokens=2)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not any(b.any() for n, b in model.named_buffers() if n.endswith("load"))


# Compiled


@pytest.mark.parametrize("form", ["dense", "moe"])
def test_a_compiled_step_is_one_graph_for_all_steps_and_calls(form: str, counter: CompileCounterWithBackend) -> None:
    model = tiny(form, mixer={"name": "block_attnres", "block_sublayers": 2}, kv_mixer="depth_attention")
    plain = generate(model, PROMPTS, max_new_tokens=12)
    assert generate(model, PROMPTS, max_new_tokens=12, compiled=True) == plain
    assert generate(model, [[5, 6], [1, 2], [3, 4]], max_new_tokens=3, compiled=True) == generate(
        model, [[5, 6], [1, 2], [3, 4]], max_new_tokens=3
    )
    assert counter.frame_count == 1


def test_more_shapes_than_the_compilers_limit_each_get_their_graph(counter: CompileCounterWithBackend) -> None:
    model = tiny(layers=1)
    with torch._dynamo.config.patch(recompile_limit=2):
        for batch in (1, 2, 3, 4):
            assert len(generate(model, [[1]] * batch, max_new_tokens=2, compiled=True)) == batch
    assert counter.frame_count == 4


@pytest.mark.inductor
def test_a_step_compiled_to_native_code_gives_the_same_text() -> None:
    torch._dynamo.reset()
    model = tiny(layers=2, mixer="attnres", kv_mixer="depth_attention")
    assert generate(model, PROMPTS, max_new_tokens=6, compiled=True) == generate(model, PROMPTS, max_new_tokens=6)


# Draws


def test_draws_are_reproducible_and_differ_by_seed_and_row(model: Decoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5}
    first = generate(model, [[1, 2]] * 3, seed=5, **options)
    assert generate(model, [[1, 2]] * 3, seed=5, **options) == first
    assert generate(model, [[1, 2]] * 3, seed=6, **options) != first
    assert len({tuple(row) for row in first}) == 3
    torch.manual_seed(1)
    torch.rand(7)
    assert generate(model, [[1, 2]] * 3, seed=5, **options) == first, "the global generator takes no part"


def test_a_rows_draws_do_not_depend_on_the_other_rows(model: Decoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.2, "top_p": 0.9}
    batch = generate(model, PROMPTS, seed=5, **options)
    for i, prompt in enumerate(PROMPTS):
        assert generate(model, [prompt], seed=[row_seed(5, i)], **options) == [batch[i]]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [0.16, 0.09, 0.04, 0.01]),
        ({"top_k": 2}, [0.4, 0.3, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.65}, [0.4, 0.3, 0, 0]),
        ({"top_p": 0.75}, [0.4, 0.3, 0.2, 0]),
        ({"top_p": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 1e-9}, [0.4, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0.4, 0.3, 0.2, 0]),
        ({"top_k": 3, "top_p": 0.75}, [0.4, 0.3, 0, 0]),
        ({"temperature": 1e-300}, [1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_should_be(options: dict[str, Any], kept: list[float]) -> None:
    """`kept` in the order of likelihood; the ids are in another."""
    count, order = 4000, [2, 0, 3, 1]
    logits = torch.full((4,), -1.0)
    logits[order] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    sampler = Sampler(range(count), **{"temperature": 1.0, "top_k": None, "top_p": None, **options})
    drawn = torch.bincount(sampler(logits.expand(count, 4)), minlength=4)[order] / count
    expected = torch.tensor(kept) / sum(kept)
    assert (drawn[expected == 0] == 0).all()
    spread = (expected * (1 - expected) / count).sqrt()
    assert ((drawn - expected).abs() <= 4 * spread + 1e-6).all(), drawn


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = torch.randn(5, 9)
    assert torch.equal(Sampler(range(5), 0.0, None, None)(logits), logits.argmax(-1))


# What is kept


def test_the_cache_of_depth_attention_has_the_bytes_of_a_plain_one() -> None:
    sizes = []
    for kv in (None, "depth_attention", "value_residual"):
        cache = DynamicCache()
        generate(tiny(kv_mixer=kv), PROMPTS, max_new_tokens=4, cache=cache)
        sizes.append(cache.nbytes)
    batch, columns, layers, heads, width = 3, 8, 3, 2, 8
    assert sizes == [2 * batch * columns * layers * heads * width * 8] * 3


def test_a_looped_layer_has_a_slot_for_each_execution() -> None:
    model = tiny("looped")
    dynamic, fixed = DynamicCache(), PreallocatedCache(model.config, 1, 4, dtype=torch.float64)
    for cache in (dynamic, fixed):
        generate(model, [[1, 2, 3]], max_new_tokens=2, cache=cache)  # type: ignore[arg-type]
        assert len(cache.tensors) == 2 * 4  # type: ignore[attr-defined]
    assert fixed.nbytes == dynamic.nbytes


@pytest.mark.parametrize("mixer", ["attnres", "mhc", {"name": "block_attnres", "block_sublayers": 2}])
@CACHES
@torch.no_grad()
def test_nothing_of_the_depth_state_outlives_a_step(mixer: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(mixer=mixer, kv_mixer="depth_attention")
    cache: Any = DynamicCache() if kind == "dynamic" else PreallocatedCache(model.config, 2, 8, dtype=torch.float64)
    seen: list[weakref.ref[Tensor]] = []

    def watched(self: Any, original: Any, *arguments: Any) -> Any:
        found = original(self, *arguments)
        states = found if isinstance(found[0], tuple) else (found[1],)
        seen.extend(weakref.ref(tensor) for state in states for tensor in state)
        return found

    original = Decoder.segment
    monkeypatch.setattr(Decoder, "segment", lambda self, *arguments: watched(self, original, *arguments))
    mix = type(model.kv_mixers[0]).mix
    monkeypatch.setattr(type(model.kv_mixers[0]), "mix", lambda self, *arguments: watched(self, mix, *arguments))
    for part in some_tokens(2, 5).split([3, 1, 1], 1):
        model(part, cache=cache)
    gc.collect()
    kept = {id(tensor) for tensor in cache.tensors}
    assert len(seen) > 10
    assert all(id(tensor) in kept for ref in seen if (tensor := ref()) is not None)


# Errors


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": []}, "no prompts"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1, VOCABULARY]]}, f"prompt 0 contains {VOCABULARY}; expected ids from 0 to {VOCABULARY - 1}"),
        ({"prompts": [[1], [-1]]}, "prompt 1 contains -1"),
        ({"prompts": [[1.5]]}, r"prompt 0 contains 1\.5"),
        ({"prompts": torch.zeros(2, 0, dtype=torch.int64)}, "prompt 0 is empty"),
        ({"prompts": torch.zeros(2, 3)}, r"float32 \[2, 3\]; expected integers"),
        ({"prompts": [1, 2]}, "a list of prompts"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -0.5}, r"temperature=-0\.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
        ({"chunk": 0}, "chunk=0"),
        ({"stop": [VOCABULARY]}, f"stop contains {VOCABULARY}"),
        ({"stop": 3}, "stop=3; expected a collection"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
        ({"cache": "huge"}, "cache='huge'; expected 'dynamic'"),
        ({"cache": "dynamic", "compiled": True}, "expected a preallocated cache"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(model: Decoder, changes: dict[str, Any], words: str) -> None:
    arguments = {"prompts": [[1, 2]], "max_new_tokens": 2, **changes}
    with pytest.raises((ValueError, TypeError), match=words):
        stream(model, **arguments)


def test_a_prompt_longer_than_the_cache_is_refused_and_the_cache_stays(model: Decoder) -> None:
    cache = PreallocatedCache(model.config, 1, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"5 more needed .* at most 4 in total, the capacity"):
        generate(model, [[1, 2, 3, 4, 5]], max_new_tokens=1, cache=cache)
    with pytest.raises(ValueError, match="at most 4 in total, the capacity"):
        generate(model, [[1, 2, 3]], max_new_tokens=3, cache=cache)
    assert cache.length == 0
    assert len(generate(model, [[1, 2, 3]], max_new_tokens=2, cache=cache)[0]) == 2
    with pytest.raises(ValueError, match="4 columns in use and 1 new tokens"):
        model(torch.tensor([[1]]), cache=cache)


@CACHES
@torch.no_grad()
def test_a_cache_of_another_batch_size_is_refused(model: Decoder, kind: str) -> None:
    cache: Any = DynamicCache() if kind == "dynamic" else PreallocatedCache(model.config, 2, 8, dtype=torch.float64)
    generate(model, [[1], [2]], max_new_tokens=1, cache=cache)
    with pytest.raises(ValueError, match="batch size 3, but the cache is for 2"):
        generate(model, PROMPTS, max_new_tokens=1, cache=cache)
    with pytest.raises(ValueError, match="batch size 1, but the cache is for 2"):
        model(torch.tensor([[1]]), cache=cache)


@CACHES
@torch.no_grad()
def test_a_cache_of_another_model_is_refused(model: Decoder, kind: str) -> None:
    def used() -> Any:
        cache: Any = DynamicCache() if kind == "dynamic" else PreallocatedCache(model.config, 1, 8, dtype=torch.float64)
        model(torch.tensor([[1, 2]]), cache=cache)
        return cache

    with pytest.raises(ValueError, match="attention 3 writes to a cache of 3 layers"):
        tiny(layers=4)(torch.tensor([[1]]), cache=used())
    with pytest.raises(ValueError, match=r"keys of shape \[1, 4, 1, 8\]; expected \[1, 2, 1, 8\]"):
        tiny(kv_heads=4)(torch.tensor([[1]]), cache=used())
    with pytest.raises(ValueError, match=r"keys are torch.float32 on cpu; the cache holds torch.float64"):
        tiny(dtype=torch.float32)(torch.tensor([[1]]), cache=used())


@torch.no_grad()
def test_a_cache_whose_forward_pass_ended_halfway_is_refused_until_it_is_reset(model: Decoder) -> None:
    cache = DynamicCache()
    model(torch.tensor([[1, 2]]), cache=cache)
    shorter = tiny(layers=2)
    shorter(torch.tensor([[1]]), cache=cache)
    with pytest.raises(ValueError, match=r"layers of the cache hold \[3, 3, 2\] columns; expected 3"):
        shorter(torch.tensor([[1]]), cache=cache)
    cache.reset()
    shorter(torch.tensor([[1]]), cache=cache)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [((0, 4), {}, "batch=0"), ((1, 0), {}, "capacity=0"), ((1, 4), {"dtype": torch.int64}, "dtype=torch.int64")],
)
def test_a_cache_without_room_is_refused(model: Decoder, arguments: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PreallocatedCache(model.config, *arguments, **options)


# Text

TEXTS = ["", "plain", "zwölf Äpfel – 𝄞", "日本語", "a\ufffdb"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_bring_back_every_text(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert all(0 <= i < 256 for i in ids)
    assert ByteTokenizer().decode(ids) == text


@pytest.mark.parametrize(
    "ids", [*(list(text.encode()) for text in TEXTS), [0xFF, 65], [0xE2, 0x82], [0xE2, 65, 0x80], [0xF0, 0x9D, 0xFF]]
)
def test_streamed_text_is_the_whole_text_without_half_characters(ids: list[int]) -> None:
    texts = TextStream(ByteTokenizer())
    parts = [texts.push(i) for i in ids]
    assert "".join(parts) + texts.finish() == ByteTokenizer().decode(ids)
    if "\ufffd" not in ByteTokenizer().decode(ids):
        assert "\ufffd" not in "".join(parts)
        assert texts.finish() == ""


def test_without_a_tokenizer_small_vocabularies_are_bytes_and_large_ones_an_error(tmp_path: Any) -> None:
    assert isinstance(load_tokenizer(tmp_path, 256), ByteTokenizer)
    with pytest.raises(
        FileNotFoundError, match=r"tokenizer.json does not exist, and a vocabulary of 257 ids is too large for bytes"
    ):
        load_tokenizer(tmp_path, 257)


def test_without_the_tokenizers_package_the_extra_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"depthmix\[bpe\]"):
        load_tokenizer(tmp_path, 256)


def test_a_tokenizer_file_is_read_and_its_damage_told(tmp_path: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'depthmix[bpe]'")
    words = {"a": 0, "b": 1, "[UNK]": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    found = load_tokenizer(tmp_path, 3)
    assert found.encode("b a") == [1, 0]
    made.add_special_tokens(["[BOS]"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 3)])
    made.enable_truncation(2)
    made.save(str(path))
    assert load_tokenizer(tmp_path, 4).encode("b a b") == [1, 0, 1]  # the whole text and nothing else
    texts = TextStream(found)
    assert texts.push(1) + texts.push(0) + texts.finish() == found.decode([1, 0])
    with pytest.raises(ValueError, match="has 4 ids; expected at most 2"):
        load_tokenizer(tmp_path, 2)
    path.write_text("{")
    with pytest.raises(ValueError, match="damaged or not a tokenizer"):
        load_tokenizer(tmp_path, 3)
