"""Plans and stages of a Decoder's pipeline: no processes here, or one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from depthmix import parallel
from depthmix.models import Decoder, DecoderConfig, Segment
from depthmix.parallel import decoder_pipeline, stage_module
from depthmix.parallel.decoder_plan import shared_names
from tests.cases import EVERY_MECHANISM
from tests.decoders import some_tokens, tiny, tiny_config
from tests.parallel.test_plan import says

AUXILIARY = {"experts": 4, "active": 2, "hidden": 16, "balance": "loss"}
LOOP = {"first": 1, "last": 2, "repeats": 3}


def plan_of(config: DecoderConfig, **settings: Any) -> parallel.Plan:
    return parallel.decoder_plan(config, **{"rows": 2, "tokens": 5, "ranks": 2, "virtual": 2} | settings)


@EVERY_MECHANISM
@pytest.mark.parametrize("divide", ["count", "flops"])
def test_a_plan_has_the_states_that_segments_pass_on(name: str, options: dict[str, Any], divide: Any) -> None:
    config = tiny_config(mixer={"name": name, **options}, kv_mixer="depth_attention", moe=AUXILIARY)
    plan = plan_of(config, divide=divide)
    assert plan.bounds[-1] == config.depth
    for s, (lo, hi) in enumerate(itertools.pairwise(plan.bounds[:-1])):
        shapes = [plan.tensors[n][0] for n in plan.states[s + 1]]
        assert shapes == Segment(config, lo, hi).shapes(hi, 2, 5)


def test_stages_can_be_divided_by_cost() -> None:
    config = tiny_config(vocab_size=5000)  # the head costs more than all sublayers
    assert plan_of(config, ranks=2, virtual=1, divide="flops").bounds == (0, 5, 6)
    assert plan_of(config, ranks=2, virtual=1).bounds == (0, 3, 6)


def test_the_sum_of_auxiliary_losses_is_sent_at_every_cut() -> None:
    configs = [tiny_config(moe=AUXILIARY | {"balance": balance}) for balance in ("none", "loss")]
    plain, summed = (plan_of(config, dtype=torch.bfloat16) for config in configs)
    assert summed.sent_tensors() == plain.sent_tensors() + 3
    assert summed.sent_bytes() == plain.sent_bytes() + 3 * 4
    totals = [state[-1] for state in summed.states[1:-1]]
    assert len({*totals}) == 3
    assert all(summed.tensors[n] == ((1,), torch.float32) for n in totals)


def test_with_tensor_parallelism_the_stream_is_divided_by_tokens_and_the_values_by_heads() -> None:
    config = tiny_config(kv_mixer="value_residual")
    plan = plan_of(config, tp=2)
    assert plan.shape == (2, 3)
    shapes = {plan.tensors[n][0] for state in plan.states for n in state}
    assert shapes == {(2, 3, config.dim), (2, 1, 5, config.width)}


def test_a_plan_of_a_large_decoder_allocates_nothing() -> None:
    config = tiny_config(dim=2**15, hidden=2**17, layers=8, vocab_size=2**18, mixer="mhc", tie_embeddings=True)
    plan = plan_of(config, ranks=4, rows=64, tokens=2**20)
    assert plan.sent_bytes() > 2**40
    assert shared_names(config, plan) == {"embed.weight": (0, 3)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp": 4}, ["tp=4", "key-value heads=2"]),
        ({"ranks": 4}, ["8 stages for 6 sublayers", "fewer ranks"]),
        ({"divide": "time"}, ["by='time'", "'count' or 'flops'"]),
        ({"rows": 0}, ["rows=0"]),
        ({"placement": "v", "virtual": 3}, ["placement='v'", "virtual=2"]),
    ],
)
def test_what_no_plan_can_have_is_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*words)):
        plan_of(tiny_config(), **settings)


# Parameters that several stages hold.


def test_names_on_several_ranks() -> None:
    tied = tiny_config(tie_embeddings=True)
    assert shared_names(tiny_config(), plan_of(tiny_config())) == {}
    assert shared_names(tied, plan_of(tied)) == {"embed.weight": (0, 1)}
    assert shared_names(tied, plan_of(tied, placement="v")) == {}  # first and last stage are on rank 0
    looped = tiny_config(loop=LOOP)
    names = shared_names(looped, plan_of(looped))
    assert {name.split(".")[1] for name in names} == {"2", "3"}
    assert {*names.values()} == {(0, 1)}
    sharing = tiny_config(loop=LOOP | {"share_mixers": True}, mixer="mhc")
    more = shared_names(sharing, plan_of(sharing))
    assert {name.split(".")[0] for name in more} == {"sublayers", "depth"}


def test_tied_parts_stay_tied_when_they_are_cast_and_compute_the_decoders_gradients() -> None:
    config = tiny_config(
        "moe", loop=LOOP | {"share_mixers": True}, mixer="mhc", kv_mixer="depth_attention", tie_embeddings=True
    )
    bounds = [*itertools.pairwise(plan_of(config).bounds)]
    parts = [Segment(config, *pair) for pair in bounds]
    decoder_pipeline.tie(parts)
    for part in parts:
        part.double()
    for part in parts:
        part.reset_parameters(3)
    decoder = Decoder(config).double()
    decoder.reset_parameters(3)
    named = [(name, tensor) for part in parts for name, tensor in (*part.named_parameters(), *part.named_buffers())]
    assert {name for name, _ in named} == {*dict(decoder.named_parameters()), *dict(decoder.named_buffers())}
    assert len({id(tensor) for _, tensor in named}) == len({name for name, _ in named})
    tokens = some_tokens(2, 5)
    state = parts[0](tokens)
    for part in parts[1:-1]:
        state = part(*state)
    (loss,) = parts[-1](*state, tokens=tokens)
    expected = decoder.loss(tokens)
    loss.backward()
    expected.backward()
    assert abs(loss - expected) < 1e-12
    got = dict(named)
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(got[name].grad, parameter.grad, rtol=1e-10, atol=1e-13)


# One process.


def pipeline_of(model: Decoder, **settings: Any) -> decoder_pipeline.DecoderPipeline:
    plan = plan_of(model.config, ranks=1, virtual=1, dtype=torch.float64)
    stages = decoder_pipeline.build_stages(model.config, plan, True, 0)
    for _, stage in stages:
        stage.part.double().load_state_dict(model.state_dict())
    return decoder_pipeline.DecoderPipeline(stages, **{"schedule": "GPipe", "microbatches": 2} | settings)


@pytest.mark.usefixtures("one_process")
def test_a_pipeline_of_one_rank_is_the_decoder() -> None:
    model = tiny(mixer="block_attnres").train()
    pipe = pipeline_of(model)
    tokens = some_tokens(4, 5)
    loss, expected = pipe.step(tokens), model.loss(tokens)
    expected.backward()
    assert loss is not None
    assert abs(loss - expected) < 1e-12
    before = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    assert before.keys() == dict(model.named_parameters()).keys()
    evaluated = pipe.evaluate(some_tokens(8, 5))
    assert evaluated is not None
    assert abs(evaluated - model.loss(some_tokens(8, 5))) < 1e-12
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, before[name])
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("one_process")
def test_tokens_that_are_not_as_planned_are_refused() -> None:
    pipe = pipeline_of(tiny())
    with pytest.raises(ValueError, match=says("tokens has 6 rows", "expected 4", "2 micro-batches of 2")):
        pipe.step(some_tokens(6, 5))
    with pytest.raises(ValueError, match=says("tokens has 6 rows", "a multiple of 4")):
        pipe.evaluate(some_tokens(6, 5))
    for run in (pipe.step, pipe.evaluate):
        with pytest.raises(ValueError, match=says("rows of 6 tokens", "for 5", "tokens=6")):
            run(some_tokens(4, 6))


@pytest.mark.usefixtures("one_process")
def test_stages_that_the_plan_does_not_place_here_are_refused() -> None:
    config = tiny_config()
    plan = plan_of(config, ranks=1)
    stages = decoder_pipeline.build_stages(config, plan, True, 0)
    with pytest.raises(ValueError, match=says("got stages [0]", "expected [0, 1]")):
        decoder_pipeline.DecoderPipeline(stages[:1], schedule="Interleaved1F1B", microbatches=1)
    with pytest.raises(ValueError, match=says("unknown schedule", "1F1B")):
        decoder_pipeline.DecoderPipeline(stages, schedule="2F2B", microbatches=1)


@pytest.mark.usefixtures("one_process")
def test_compiled_sublayers_are_refused_where_the_backward_pass_is_split() -> None:
    config = tiny_config()
    stages = decoder_pipeline.build_stages(config, plan_of(config, ranks=1), True, 0)
    stages[1][1].part.sublayers["4"].compile(dynamic=False)
    decoder_pipeline.DecoderPipeline(stages, schedule="Interleaved1F1B", microbatches=1)
    with pytest.raises(ValueError, match=says("'InterleavedZeroBubble'", "sublayers.4", "schedule='Interleaved1F1B'")):
        decoder_pipeline.DecoderPipeline(stages, schedule="InterleavedZeroBubble", microbatches=1)


def test_a_part_that_is_not_the_plans_is_refused() -> None:
    config = tiny_config()
    plan = plan_of(config, ranks=2, virtual=1)
    with pytest.raises(ValueError, match=says("stage 1 of 2", "is_last=False")):
        stage_module.StageModule(Segment(config, 3, 5), 1, plan)
    stage = stage_module.StageModule(Segment(tiny_config(mixer="attnres"), 0, 3), 0, plan)
    with pytest.raises(ValueError, match=says("a state of 4 tensors", "the plan has 1")):
        stage(some_tokens(2, 5))
