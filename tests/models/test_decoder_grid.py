"""Every mechanism with every KV site in every form of the decoder: the same numbers, however they are computed.

The normal run takes each mechanism once, and all of block_attnres but its compiled forms; `make test-full` takes
everything.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from depthmix.inference import DynamicCache, PreallocatedCache
from depthmix.models import Decoder
from tests.decoders import FORMS, some_tokens, tiny

KV_SITES = (None, *dm.list_mechanisms(kind="kv"))
TOLERANCE = 1e-10


def cases(whole: str | None = None) -> list[Any]:
    """Each mechanism's turn in the normal run goes round the KV sites and the forms; `whole` is there with all."""
    found = []
    sites = list(product(KV_SITES, FORMS))
    for i, name in enumerate(dm.list_mechanisms()):
        for j, (kv, form) in enumerate(sites):
            chosen = name == whole or j == 4 * i % len(sites)
            mark = () if chosen else (pytest.mark.full,)
            found.append(pytest.param(name, kv, form, id=f"{name}-{kv or 'none'}-{form}", marks=mark))
    return found


GRID = pytest.mark.parametrize(("name", "kv", "form"), cases("block_attnres"))
SMALL_GRID = pytest.mark.parametrize(("name", "kv", "form"), cases())


def decoder(name: str, kv: str | None, form: str, **changes: Any) -> Decoder:
    return tiny(form, mixer={"name": name, **dm.mechanism(name).variants[0]}, kv_mixer=kv, **changes)


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def in_parts(model: Decoder, tokens: Tensor, sizes: list[int], cache: Any) -> Tensor:
    return torch.cat([model(part, cache=cache) for part in tokens.split(sizes, 1)], 1)


@GRID
@torch.no_grad()
def test_a_sequence_gives_the_same_logits_at_once_by_token_and_in_chunks(name: str, kv: str | None, form: str) -> None:
    model, tokens = decoder(name, kv, form), some_tokens(2, 7)
    whole = model(tokens)
    assert whole.std() > 0.01, "a model that says nothing would pass"
    for sizes in ([1] * 7, [3, 1, 3]):
        for cache in (DynamicCache(), PreallocatedCache(model.config, 2, 9, dtype=torch.float64)):
            assert_same(in_parts(model, tokens, sizes, cache), whole)


@GRID
@torch.no_grad()
def test_a_padded_row_gives_the_logits_that_it_gives_alone(name: str, kv: str | None, form: str) -> None:
    model, tokens = decoder(name, kv, form), some_tokens(2, 7)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[1, :3] = False
    alone = [model(tokens[:1]), model(tokens[1:, 3:])]
    caches = [None, DynamicCache(), PreallocatedCache(model.config, 2, 9, dtype=torch.float64)]
    for cache in caches:
        sizes = [7] if cache is None else [2, 4, 1]
        parts = zip(tokens.split(sizes, 1), valid.split(sizes, 1), strict=True)
        batch = torch.cat([model(t, valid=v, cache=cache) for t, v in parts], 1)
        assert_same(batch[:1], alone[0])
        assert_same(batch[1:, 3:], alone[1])


@SMALL_GRID
@torch.no_grad()
def test_a_compiled_decoder_gives_the_logits_of_the_plain_one(name: str, kv: str | None, form: str) -> None:
    torch._dynamo.reset()
    model, tokens = decoder(name, kv, form, layers=2), some_tokens(2, 5)
    assert_same(torch.compile(model, backend="aot_eager", fullgraph=True)(tokens), model(tokens))


@GRID
def test_checkpointing_changes_no_gradient(name: str, kv: str | None, form: str) -> None:
    model, tokens = decoder(name, kv, form), some_tokens(2, 5)
    found = []
    for every in (None, 3):
        model.checkpoint_every = every
        model.zero_grad()
        model.loss(tokens).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, again = found
    assert plain.keys() == again.keys() == {n for n, _ in model.named_parameters()}
    for parameter in plain:
        assert_same(again[parameter], plain[parameter])
