"""Loops whose mixers are shared over the repeats: they run more often than they were trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from depthmix.models import count_parameters
from depthmix.models.counting import count_multiplied
from depthmix.training import TrainConfig, load_run, override, train
from depthmix.training.config import OptimizerConfig
from depthmix.training.optim import parameter_groups
from tests.decoders import some_tokens, tiny, tiny_config
from tests.runs import tiny_run

MIXERS: list[tuple[Any, Any]] = [
    ("attnres", None),
    ({"name": "block_attnres", "block_sublayers": 2}, {"name": "depth_attention", "stride": 2, "loop": "both"}),
    ({"name": "attnres", "query": "input", "query_from": "read"}, "value_residual"),
    ("mhc", "value_residual"),
]
EVERY = pytest.mark.parametrize(("mixer", "kv_mixer"), MIXERS, ids=str)


def loop(repeats: int, first: int = 1, share: bool = True) -> dict[str, Any]:
    return {"loop": {"first": first, "last": first + 2, "repeats": repeats, "share_mixers": share}}


def again(model: dm.Decoder, repeats: int) -> dm.Decoder:
    """The same weights, run more often."""
    assert model.config.loop is not None
    more = dataclasses.replace(model.config, loop=dataclasses.replace(model.config.loop, repeats=repeats))
    other = dm.Decoder(more).double().eval()
    other.load_state_dict(model.state_dict())
    return other


def unshared(model: dm.Decoder) -> dm.Decoder:
    """The same function with a mixer for each execution."""
    assert model.config.loop is not None
    config = dataclasses.replace(model.config, loop=dataclasses.replace(model.config.loop, share_mixers=False))
    other = dm.Decoder(config).double().eval()
    state = {k: v for k, v in model.state_dict().items() if not k.startswith(("depth.", "kv_mixers."))}
    other.load_state_dict(state, strict=False)
    with torch.no_grad():
        for stack, own in ((model.depth.all_mixers(), other.depth.all_mixers()), (model.kv_mixers, other.kv_mixers)):
            for source, target in zip(stack, own, strict=True):
                for key, parameter in target.named_parameters():
                    parameter.copy_(source.get_parameter(key))
    return other


def greedy(model: dm.Decoder, tokens: Tensor, count: int) -> Tensor:
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens


@EVERY
@pytest.mark.parametrize("first", [0, 1])
def test_weights_of_two_repeats_run_four_times(mixer: Any, kv_mixer: Any, first: int) -> None:
    two = tiny(layers=4, mixer=mixer, kv_mixer=kv_mixer, **loop(2, first))
    four, tokens = again(two, 4), some_tokens(2, 5)
    with torch.no_grad():
        assert (four(tokens) - unshared(four)(tokens)).abs().max() <= 1e-12
        assert (two(tokens) - unshared(two)(tokens)).abs().max() <= 1e-12
        assert (four(tokens) - two(tokens)).abs().max() > 1e-6
        assert len(dm.generate(four, tokens[:1], max_new_tokens=1)[0]) == 1
        text = [row.tolist() for row in greedy(four, tokens, 4)[:, 5:]]
    assert [list(row) for row in dm.generate(four, tokens, max_new_tokens=4)] == text


@EVERY
def test_every_parameter_counts_once_and_starts_alike(mixer: Any, kv_mixer: Any) -> None:
    two, five = (dm.Decoder(tiny_config(layers=4, mixer=mixer, kv_mixer=kv_mixer, **loop(r))) for r in (2, 5))
    assert count_parameters(two.config) == count_parameters(five.config)
    assert count_parameters(two.config).total == sum(p.numel() for p in two.parameters())
    assert count_multiplied(five.config) > count_multiplied(two.config)
    for model in (two, five):
        model.reset_parameters(seed=7)
        grouped = [p for group in parameter_groups(model, OptimizerConfig()) for p in group["params"]]
        assert sorted(map(id, grouped)) == sorted(id(p) for p in model.parameters())
    for (key, a), b in zip(two.named_parameters(), five.parameters(), strict=True):
        assert torch.equal(a, b), key


def test_a_read_counts_as_often_as_it_runs() -> None:
    shared, own = (tiny_config(layers=4, mixer="attnres", **loop(3, share=share)) for share in (True, False))
    assert count_multiplied(shared) == count_multiplied(own)
    assert count_parameters(shared).mixer == (7 + 1) * 2 * 32  # sublayers 1 to 7 and the output
    assert count_parameters(own).mixer == (15 + 1) * 2 * 32


def test_a_trace_sees_every_execution() -> None:
    model, tokens = tiny(layers=4, mixer="attnres", kv_mixer="value_residual", **loop(3)), some_tokens(1, 3)
    ours, theirs = dm.trace(model, tokens), dm.trace(unshared(model), tokens)
    assert ours.M.shape[-1] == 17
    assert (ours.M - theirs.M).abs().max() <= 1e-12
    assert ours.values is not None
    assert (ours.values - theirs.values).abs().max() <= 1e-12


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    model, tokens = tiny(layers=4, mixer="attnres", kv_mixer="value_residual", **loop(2, 0)), some_tokens(2, 4)
    dm.save_model(model, tmp_path)
    loaded = dm.load_model(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


def test_what_follows_from_the_number_of_executions_is_not_kept_silently() -> None:
    two = tiny(layers=4, kv_mixer="depth_attention", **loop(2))
    with pytest.raises(ValueError, match="stride is 3 in the state dict and 5 here"):
        again(two, 4)


def test_a_digest_does_not_tell_that_mixers_could_be_shared(tmp_path: Path) -> None:
    """A run that was begun before the option existed goes on."""
    config = tiny_run(tmp_path / "run", **{"model.loop": {"first": 0, "last": 2, "repeats": 2}})
    assert "share_mixers" not in config.model.fingerprint()["loop"]
    assert override(config, "model.loop.share_mixers", "true").digest != config.digest
    assert TrainConfig.from_toml(config.to_toml().replace("share_mixers = false\n", "")).digest == config.digest


def test_trained_with_two_repeats_and_evaluated_with_three(tmp_path: Path) -> None:
    looped = {"model.loop": {"first": 0, "last": 2, "repeats": 2, "share_mixers": True}, "run.steps": 4}
    config = tiny_run(tmp_path / "run", "attnres", **looped)
    train(config)
    trained = load_run(tmp_path / "run").double()
    queries = [p for name, p in trained.named_parameters() if name.endswith("query")]
    assert len(queries) == 4 + 1
    assert all(q.abs().max() > 0 for q in queries)
    tokens = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))
    losses = [float(model.loss(tokens).detach()) for model in (trained, again(trained, 3), again(trained, 1 + 3))]
    assert len(set(losses)) == 3
    assert all(abs(loss - losses[0]) < 1 for loss in losses)
