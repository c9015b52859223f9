"""The decoder itself: packed documents, losses, starts, configuration, wrong input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import depthmix as dm
from depthmix.inference import PreallocatedCache
from depthmix.models import Decoder, counting, next_token_losses
from depthmix.models.decoder import empty_decoder
from depthmix.models.init import TABLE
from depthmix.training import flops_per_token
from tests.decoders import FORMS, some_tokens, tiny, tiny_config

DOCUMENTS = [5, 1, 4, 3]  # lengths of the documents that are packed into one row


def packed(tokens: torch.Tensor) -> torch.Tensor:
    ids = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))
    return ids.expand_as(tokens)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mixer", ["residual", "block_attnres", "mhc", "ddl"])
@pytest.mark.parametrize("kv", [None, "depth_attention"])
def test_a_packed_document_has_the_logits_and_the_loss_that_it_has_alone(form: str, mixer: str, kv: str | None) -> None:
    model, tokens = tiny(form, mixer=mixer, kv_mixer=kv), some_tokens(2, sum(DOCUMENTS))
    documents = packed(tokens)
    logits = model(tokens, documents=documents)
    losses, counts = next_token_losses(logits, tokens, documents)
    start = 0
    for length in DOCUMENTS:
        own = tokens[:, start : start + length]
        alone = model(own)
        torch.testing.assert_close(logits[:, start : start + length], alone, rtol=1e-11, atol=1e-11)
        own_losses, own_counts = next_token_losses(alone, own)
        inside = slice(start, start + length - 1)
        torch.testing.assert_close(losses[:, inside], own_losses, rtol=1e-11, atol=1e-11)
        assert counts[:, inside].all()
        assert own_counts.all()
        if start + length < tokens.shape[1]:
            assert not counts[:, start + length - 1].any(), "nobody predicts the first token of the next document"
        start += length


@torch.no_grad()
def test_the_loss_is_the_mean_over_the_tokens_that_count() -> None:
    model, tokens = tiny("dense"), some_tokens(2, sum(DOCUMENTS))
    documents = packed(tokens)
    means = []
    start = 0
    for length in DOCUMENTS:
        if length > 1:
            means.append((model.loss(tokens[:, start : start + length]), length - 1))
        start += length
    want = sum(loss * count for loss, count in means) / sum(count for _, count in means)
    torch.testing.assert_close(model.loss(tokens, documents=documents), want, rtol=1e-11, atol=1e-11)


@torch.no_grad()
def test_padding_on_either_side_changes_no_loss() -> None:
    model, tokens = tiny("moe"), some_tokens(2, 6)
    pad = torch.zeros(2, 3, dtype=torch.int64)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    off = torch.zeros_like(pad, dtype=torch.bool)
    for rows, which in (((pad, tokens), (off, valid)), ((tokens, pad), (valid, off))):
        loss = model.loss(torch.cat(rows, 1), valid=torch.cat(which, 1))
        torch.testing.assert_close(loss, model.loss(tokens), rtol=1e-11, atol=1e-11)


def test_the_dial_gives_the_networks_of_the_benchmark() -> None:
    config = dm.DecoderConfig.from_depth(24)
    assert (config.depth, config.dim, config.heads, config.width, config.hidden) == (24, 768, 12, 64, 2048)
    assert dm.DecoderConfig.from_depth(24, dim=128, vocab_size=512).hidden == 384
    with pytest.raises(ValueError, match="depth=7; expected an even number"):
        dm.DecoderConfig.from_depth(7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 0}, "dim=0; expected 1 to 1048576"),
        ({"heads": 5}, "heads=5; expected a divisor of the width"),
        ({"kv_heads": 3}, "kv_heads=3; expected a divisor of the query heads"),
        ({"head_dim": 7}, "head_dim=7; expected an even number"),
        ({"layers": 2.0}, "layers=2.0; expected a whole number"),
        ({"key_norm": "never"}, "key_norm='never'; expected one of"),
        ({"mixer": "blok_attnres"}, "unknown mechanism 'blok_attnres'. Did you mean 'block_attnres'"),
        ({"mixer": {"name": "attnres", "blocks": 3}}, "attnres has no option 'blocks'"),
        ({"mixer": {"num_blocks": 3}}, "expected the name of a mechanism"),
        ({"kv_mixer": {"name": "depth_attention", "stride": 0}}, "stride=0; expected at least 1"),
        ({"kv_mixer": {"name": "depth_attention", "stride": 1, "sources": [0]}}, "expected only one of them"),
        ({"kv_mixer": {"name": "depth_attention", "loop": "same_layer", "window": 1}}, "do not set the others"),
        ({"kv_mixer": "attnres"}, "'attnres' is a depth mechanism"),
        ({"loop": {"first": 1, "last": 1, "repeats": 2}}, "loop.last=1; expected at least 2"),
        ({"loop": {"first": 0, "last": 9, "repeats": 2}}, "loop.last=9; expected 1 to 4"),
        ({"moe": {"experts": 4, "active": 5, "hidden": 8}}, "moe.active=5; expected 1 to 4"),
    ],
)
def test_a_configuration_that_cannot_be_is_told(fields: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"vocab_size": 61, "dim": 32, "layers": 4, "heads": 4, "hidden": 48}
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(".", r"\.")):
        dm.DecoderConfig(**{**good, **fields})


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(2, 3), "torch.float32"),
        (torch.zeros(3, dtype=torch.int64), "expected integers"),
        ([[1, 2]], "got list"),
        (torch.tensor([[1, 61]]), "tokens contain 61; expected ids from 0 to 60"),
        (torch.tensor([[-1, 2]]), "tokens contain -1"),
    ],
)
def test_tokens_that_are_none_are_told(tokens: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message.replace("[", r"\[")):
        tiny("dense")(tokens)


def test_documents_of_another_shape_or_beside_a_cache_are_told() -> None:
    model, tokens = tiny("dense"), some_tokens(2, 4)
    with pytest.raises(ValueError, match="documents has shape"):
        model(tokens, documents=torch.zeros(2, 3))
    cache = PreallocatedCache(model.config, 2, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="use packed documents only without a cache"):
        model(tokens, documents=torch.zeros_like(tokens), cache=cache)


@pytest.mark.parametrize("form", FORMS)
def test_every_parameter_starts_as_the_table_says(form: str) -> None:
    model = tiny(form, mixer="mhc", kv_mixer="value_residual", init_std=0.3)
    torch.manual_seed(1)
    model.reset_parameters()
    for name, parameter in model.named_parameters():
        if name.startswith(("depth.", "kv_mixers.")):
            continue
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert abs(float(parameter.detach().std()) - 0.3) < 0.06, name
    assert len(TABLE) >= 4


@torch.no_grad()
def test_a_cache_that_is_rewound_forgets_what_came_after() -> None:
    model, tokens = tiny("dense", kv_mixer="depth_attention"), some_tokens(2, 8)
    cache = PreallocatedCache(model.config, 2, 8, dtype=torch.float64)
    model(tokens[:, :5], cache=cache)
    model(tokens[:, 2:4], cache=cache)  # tried, and refused
    cache.rewind(5)
    torch.testing.assert_close(model(tokens[:, 5:], cache=cache), model(tokens)[:, 5:], rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match="length=9; expected 0 to 8"):
        cache.rewind(9)


def test_a_segment_of_activations_is_made_again_and_costs_less_memory() -> None:
    from depthmix.bench.memory import kept_bytes

    model = tiny("dense", layers=6, mixer={"name": "block_attnres", "block_sublayers": 3})
    x = torch.randn(1, 64, model.config.dim, dtype=torch.float64, requires_grad=True)
    ctx = model.context(some_tokens(1, 64), torch.float64)

    class Middle(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state, _, _ = self.model.execute(0, 12, self.model.depth.begin(x), (), ctx)
            return self.model.end(state)

    plain = kept_bytes(Middle(), x)
    model.checkpoint_every = 3
    assert kept_bytes(Middle(), x) < plain / 3


def test_weights_by_seed_are_drawn_once_and_do_not_depend_on_torchs_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("moe", mixer="mhc", kv_mixer="value_residual")
    drawn: list[int] = []
    for draw in (torch.Tensor.normal_, torch.Tensor.uniform_):

        def counted(self: Any, *given: Any, draw: Any = draw, **named: Any) -> torch.Tensor:
            drawn.extend([] if self.is_meta else [self.data_ptr()])
            return draw(self, *given, **named)

        monkeypatch.setattr(torch.Tensor, draw.__name__, counted)
    starts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = empty_decoder(config)
        model.reset_parameters(seed=5)
        starts.append(model.state_dict())
        own = {p.data_ptr() for n, p in model.named_parameters() if not n.startswith(("depth.", "kv_mixers."))}
        matrices = [each for each in drawn if each in own]
        assert len(matrices) == len(set(matrices)) > 10
        drawn.clear()
    for name in starts[0]:
        assert torch.equal(starts[0][name], starts[1][name]), name


def test_a_configuration_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(counting, "Decoder", lambda config: built.append(config) or Decoder(config))
    for std in (0.011, 0.012, 0.011):
        config = tiny_config("looped", init_std=std, mixer={"name": "block_attnres", "num_blocks": 2})
        counting.count_parameters(config)
        flops_per_token(config, 16)
        flops_per_token(config, 32)
    assert [config.init_std for config in built] == [0.011, 0.012]
