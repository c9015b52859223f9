"""A long prompt in chunks: the logits of the whole, within a limit of memory."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import depthmix as dm
from depthmix.inference import DynamicCache, PreallocatedCache, generate, prefill_chunk, stream
from depthmix.inference.prefill import bytes_per_token, prefill
from depthmix.models import Decoder
from depthmix.ops.memory import LiveBytes
from depthmix.support.checks import parse_bytes
from tests.cases import EVERY_MECHANISM
from tests.decoders import some_tokens, tiny

TOKENS = 24
MLA = {"rank": 24, "nope": 8, "shared": 4, "value": 8}


def limit_for(model: Decoder, chunk: int, tokens: int = TOKENS, batch: int = 1) -> int:
    """The least limit under which prefill_chunk gives `chunk`."""
    low, high = 1, 2**40
    while low < high:
        middle = (low + high) // 2
        try:
            enough = prefill_chunk(model, tokens, middle, batch=batch) >= chunk
        except ValueError:
            enough = False
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


@torch.no_grad()
def assert_equal_logits(model: Decoder, chunk: int) -> None:
    tokens = some_tokens(2, TOKENS)
    valid = torch.arange(TOKENS) >= torch.tensor([[0], [5]])
    for which in (None, valid):
        whole = prefill(model, tokens, which, DynamicCache(), TOKENS)
        for cache in (DynamicCache(), PreallocatedCache(model.config, 2, TOKENS, dtype=torch.float64)):
            torch.testing.assert_close(prefill(model, tokens, which, cache, chunk), whole, rtol=0, atol=1e-12)
            assert cache.length == TOKENS


@EVERY_MECHANISM
def test_chunks_give_the_logits_of_the_whole_prompt(name: str, options: Mapping[str, Any]) -> None:
    model = tiny(layers=2, mixer={"name": name, **options})
    assert_equal_logits(model, 7)


@pytest.mark.parametrize("kv", dm.list_mechanisms(kind="kv"))
@pytest.mark.parametrize("form", ["moe", "looped"])
def test_chunks_give_the_logits_of_the_whole_prompt_with_values_mixed_too(kv: str, form: str) -> None:
    model = tiny(form, mixer="attnres", kv_mixer=kv)
    for chunk in (1, TOKENS - 1):
        assert_equal_logits(model, chunk)


@pytest.mark.parametrize("kind", ["kda", "mla"])
@torch.no_grad()
def test_a_chunk_keeps_to_its_limit_with_states_and_latents(kind: str) -> None:
    attention = {"attention": kind, kind: {"kda": {"heads": 4, "head_dim": 16}, "mla": MLA}[kind]}
    model = tiny(layers=2, dim=64, dtype=torch.float32, **attention)
    tokens = some_tokens(1, 1024)
    limit = tokens.shape[1] * bytes_per_token(model) // 2
    chunk = prefill_chunk(model, tokens.shape[1], limit)
    assert 1 < chunk < tokens.shape[1] / 2
    cache = PreallocatedCache(model.config, 1, tokens.shape[1])
    with LiveBytes() as live:
        prefill(model, tokens, None, cache, chunk)
    assert 0.4 * limit < live.peak <= limit


@EVERY_MECHANISM
@torch.no_grad()
def test_a_chunk_keeps_to_its_limit_and_uses_it(name: str, options: Mapping[str, Any]) -> None:
    model = tiny(layers=2, dim=64, dtype=torch.float32, mixer={"name": name, **options})
    tokens = some_tokens(1, 192)
    whole = tokens.shape[1] * bytes_per_token(model)
    chunk = prefill_chunk(model, tokens.shape[1], whole // 3)
    assert 1 < chunk < tokens.shape[1] / 3
    peaks = []
    for size in (chunk, tokens.shape[1]):
        cache = PreallocatedCache(model.config, 1, tokens.shape[1])
        with LiveBytes() as live:
            prefill(model, tokens, None, cache, size)
        peaks.append(live.peak)
    assert 0.6 * whole / 3 < peaks[0] <= whole / 3
    assert 0.8 * whole < peaks[1] <= 1.05 * whole


@torch.no_grad()
def test_padded_prompts_and_tokens_before_them_count() -> None:
    model = tiny(dtype=torch.float32, mixer="attnres")
    limit = 300 * 2 * bytes_per_token(model)
    tokens = some_tokens(2, 600)
    valid = torch.arange(600) >= torch.tensor([[0], [5]])
    chunk = prefill_chunk(model, 600, limit, batch=2, padded=True, before=200)
    assert chunk < prefill_chunk(model, 600, limit, batch=2, padded=True) < prefill_chunk(model, 600, limit, batch=2)
    cache = PreallocatedCache(model.config, 2, 800)
    prefill(model, some_tokens(2, 200), None, cache, 200)
    with LiveBytes() as live:
        prefill(model, tokens, valid, cache, chunk)
    assert 0.5 * limit < live.peak <= limit


def test_a_prompt_that_fits_is_read_at_once_and_one_token_is_the_least() -> None:
    model = tiny()
    assert prefill_chunk(model, TOKENS, "1GB") == TOKENS
    least = limit_for(model, 1)
    assert prefill_chunk(model, TOKENS, least) == 1
    with pytest.raises(ValueError, match=rf"memory={least - 1} for 1 × 24 tokens; expected at least {least:,} bytes"):
        prefill_chunk(model, TOKENS, least - 1)
    assert prefill_chunk(model, TOKENS, limit_for(model, 20)) == 20


@pytest.mark.parametrize("batch", [[[1] * 30], [[1] * 30, [2] * 11]])
def test_generate_reads_in_chunks_under_a_limit_and_says_the_same(
    batch: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(mixer={"name": "block_attnres", "block_sublayers": 2}, kv_mixer="depth_attention")
    plain = generate(model, batch, max_new_tokens=5, prefill_memory=None)
    seen: list[int] = []
    forward = Decoder.forward

    def watched(self: Decoder, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(tokens.shape[1])
        return forward(self, tokens, **options)

    monkeypatch.setattr(Decoder, "forward", watched)
    limit = limit_for(model, 9, 30, len(batch))
    assert generate(model, batch, max_new_tokens=5, prefill_memory=limit) == plain
    assert sum(seen[:-4]) == 30
    assert 1 < max(seen) < 10
    seen.clear()
    assert generate(model, batch, max_new_tokens=5, chunk=15, prefill_memory=limit) == plain
    assert seen == [15, 15, 1, 1, 1, 1], "a chunk that is given is taken"
    seen.clear()
    generate(model, batch, max_new_tokens=1)
    assert seen == [30], "the default limit is no limit for a short prompt"


@pytest.mark.parametrize(
    ("text", "size"),
    [("256MB", 256 * 10**6), ("1.5GiB", 3 * 2**29), ("1000", 1000), (7, 7), ("2 kB", 2000), ("64b", 64)],
)
def test_sizes_are_read_as_people_write_them(text: Any, size: int) -> None:
    assert parse_bytes("memory", text) == size


@pytest.mark.parametrize("text", ["much", "-1", "1e9", "12 MX", 1.5, True, "", None])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"memory=.*expected a number of bytes, such as .* 256MB"):
        parse_bytes("memory", text)


def test_a_limit_that_is_no_size_is_told_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="memory='much'; expected a number of bytes"):
        stream(tiny(), [[1]], max_new_tokens=1, prefill_memory="much")


def test_the_example_measures_both_ways_of_reading() -> None:
    path = Path(__file__).parents[2] / "examples" / "long_prompt.py"
    measure = runpy.run_path(str(path))["measure"]
    whole, chunked = (measure("block_attnres", 192, limit).strip("| ").split(" | ") for limit in ("none", "1MB"))
    assert whole[:3] == ["block_attnres", "none", "192"]
    assert int(chunked[2]) < 192
    assert int(chunked[3].split()[0]) <= 1 < int(whole[3].split()[0])
