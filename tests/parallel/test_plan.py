"""Plans of pipelines, and what is refused before there is a process group: no processes here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import depthmix as dm
from depthmix import parallel
from depthmix.parallel import stage_module
from depthmix.parallel.network import NetworkSegment
from tests.cases import EVERY_MECHANISM
from tests.parallel.network import DIM, HEADS, ROWS, TOKENS, Network, batch_of, loss_of
from tools import draw_pipeline

SHAPE = (ROWS, TOKENS)
ONE = ROWS * TOKENS * DIM * 4  # bytes of one tensor of the stream in float32


def plan_of(name: str = "block_attnres", depth: int = 16, **settings: Any) -> parallel.Plan:
    options = settings.pop("options", {"block_sublayers": 2} if name == "block_attnres" else {})
    stack = dm.DepthStack(name, dim=DIM, depth=depth, **options)
    return parallel.make_plan(stack, **{"shape": SHAPE, "ranks": 4, "virtual": 2} | settings)


def says(*parts: str) -> str:
    return "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)


def test_one_block_a_stage_sends_35_tensors_and_with_the_cache_21() -> None:
    plan = plan_of()
    assert [len(hop) for hop in plan.hops(cache=False)] == [2, 3, 4, 5, 6, 7, 8]
    assert [len(hop) for hop in plan.hops()] == [2, 3, 4, 3, 3, 3, 3]
    assert (plan.sent_tensors(cache=False), plan.sent_tensors()) == (35, 21)
    assert (plan.sent_bytes(cache=False), plan.sent_bytes()) == (35 * ONE, 21 * ONE)
    assert (plan.largest_hop(cache=False), plan.largest_hop()) == (8 * ONE, 4 * ONE)
    assert [plan.stored_bytes(rank) for rank in range(4)] == [2 * ONE, 3 * ONE, 4 * ONE, 5 * ONE]


def test_with_one_stage_per_rank_there_is_nothing_to_cache() -> None:
    plan = plan_of(ranks=8, virtual=1)
    assert plan.cached == plan.naive
    assert plan.sent_tensors() == 35


def test_a_mechanism_with_one_stream_sends_one_tensor_a_hop() -> None:
    plan = plan_of("residual")
    assert plan.hops() == plan.hops(cache=False)
    assert [len(hop) for hop in plan.hops()] == [1] * 7


@EVERY_MECHANISM
@pytest.mark.parametrize("placement", ["loop", "v"])
def test_what_a_stage_takes_and_receives_is_its_state(name: str, options: dict[str, Any], placement: Any) -> None:
    """Replays the transport on numbers: nothing is taken that was not kept, and nothing is missing."""
    plan = plan_of(name, depth=9, ranks=2, options=options, placement=placement)
    for transport in (plan.cached, plan.naive):
        stores: dict[int, set[int]] = {rank: set() for rank in range(plan.ranks)}
        arrived: tuple[int, ...] = ()
        for s, rank in enumerate(plan.rank_of):
            assert {*transport.takes[s]} <= stores[rank]
            assert sorted((*arrived, *transport.takes[s])) == sorted(plan.states[s])
            stores[rank] |= {*transport.keeps[s]}
            arrived = transport.wire[s]
            assert {*transport.keeps[s]} <= {*plan.states[s], *plan.states[s + 1]}
    assert plan.sent_bytes() <= plan.sent_bytes(cache=False)


@EVERY_MECHANISM
def test_states_of_a_plan_are_those_of_the_specification(name: str, options: dict[str, Any]) -> None:
    stack = dm.DepthStack(name, dim=DIM, depth=7, **options)
    plan = parallel.make_plan(stack, shape=SHAPE, ranks=7, dtype=torch.bfloat16)
    for state, cut in zip(plan.states[1:-1], plan.bounds[1:-1], strict=True):
        spec = stack.spec(cut)
        assert [plan.tensors[n][0][2:] for n in state] == list(spec.shapes[: spec.essential])
        assert plan.nbytes(state) == ROWS * TOKENS * spec.nbytes(torch.bfloat16, essential=True)


def test_value_mixers_share_the_plan() -> None:
    stack = dm.DepthStack("residual", dim=DIM, depth=8)
    values = dm.KVStack("value_residual", head_dim=DIM // HEADS, depth=4)
    plan = parallel.make_plan(stack, shape=SHAPE, ranks=2, virtual=2, values=values, kv_heads=1)
    assert plan.attention == (0, 2, 4, 6)
    assert [len(hop) for hop in plan.hops(cache=False)] == [2, 2, 2]  # the stream and the first layer's values
    assert [len(hop) for hop in plan.hops()] == [2, 1, 1]
    assert plan.tensors[plan.states[1][1]] == ((ROWS, 1, TOKENS, DIM // HEADS), torch.float32)


def test_sublayers_are_divided_as_equally_as_possible_or_as_given() -> None:
    bounds = plan_of("residual", depth=93).bounds
    assert bounds == (0, 11, 23, 34, 46, 58, 69, 81, 93)
    assert plan_of("residual", depth=9, ranks=2, sizes=[1, 5, 1, 2]).bounds == (0, 1, 6, 7, 9)


def test_a_plan_allocates_nothing_and_leaves_the_stack_alone() -> None:
    with torch.device("meta"):
        stack = dm.DepthStack("attnres", dim=4096, depth=32)
    plan = parallel.make_plan(stack, shape=(64, 8192), ranks=8, virtual=2, dtype=torch.bfloat16)
    assert plan.largest_hop(cache=False) == 31 * 64 * 8192 * 4096 * 2
    real = dm.DepthStack("attnres", dim=DIM, depth=4)
    parallel.make_plan(real, shape=SHAPE, ranks=2)
    assert all(p.device.type == "cpu" for p in real.parameters())


def test_the_table_of_a_plan() -> None:
    lines = plan_of().describe().splitlines()
    assert lines[0] == "block_attnres: 16 sublayers, 4 ranks of 2, micro-batch [2, 4] in float32"
    assert lines[5].split() == ["3", "3", "6-7", "0", "5", "3", "768", "5", "1,280"]
    assert lines[-2] == (
        "Per micro-batch and direction: 21 tensors, 5,376 bytes (largest hop 1,024) with the cache; 35 tensors, 8,960 "
        "bytes (largest hop 2,048) without."
    )
    assert lines[-1] == "A rank stores up to 1,280 bytes of a micro-batch."


def test_the_picture_of_a_pipeline_is_up_to_date() -> None:
    assert draw_pipeline.PICTURE.read_text() == draw_pipeline.draw(), "run `python -m tools.draw_pipeline`"


# What is refused.


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"depth": 7}, ["8 stages for 7 sublayers", "at most 7", "fewer ranks or a smaller virtual"]),
        ({"ranks": 0}, ["ranks=0", "at least 1"]),
        ({"virtual": 1.5}, ["virtual=1.5", "whole number"]),
        ({"sizes": [2] * 7}, ["sizes=[2, 2, 2, 2, 2, 2, 2]", "8 numbers", "sum to 16", "they are 7 and sum to 14"]),
        ({"sizes": [0, 4, *[2] * 6]}, ["sizes=[0, 4,", "at least 1"]),
        ({"placement": "zigzag"}, ["placement='zigzag'", "'loop'", "'v'"]),
        ({"placement": "v", "ranks": 2, "virtual": 3}, ["placement='v' with virtual=3", "virtual=2"]),
        ({"kv_heads": 2}, ["attention and kv_heads", "give `values` too"]),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*parts)):
        plan_of(**settings)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, ["kv_heads=None", "number of key-value heads"]),
        ({"kv_heads": 1, "shape": (2,)}, ["shape=[2]", "(batch, tokens)"]),
        ({"kv_heads": 1, "attention": [0, 2]}, ["attention=[0, 2]", "4 increasing indices", "0 to 7"]),
        ({"kv_heads": 1, "attention": [0, 2, 4, 8]}, ["attention=[0, 2, 4, 8]", "0 to 7"]),
    ],
)
def test_value_mixers_without_their_places_are_refused(settings: dict[str, Any], parts: list[str]) -> None:
    values = dm.KVStack("value_residual", head_dim=4, depth=4)
    with pytest.raises(ValueError, match=says(*parts)):
        plan_of("residual", depth=8, values=values, **settings)


def test_a_plan_of_a_slice_is_refused() -> None:
    part = dm.DepthStack("residual", dim=DIM, depth=8).slice(2, 6)
    with pytest.raises(ValueError, match=says("sublayers 2 to 5", "expected the whole stack")):
        parallel.make_plan(part, shape=SHAPE, ranks=2)


def pipeline(network: Network, plan: parallel.Plan, **settings: Any) -> parallel.Pipeline:
    given = {"schedule": "Interleaved1F1B", "microbatches": 4, "loss": loss_of, "values": network.values} | settings
    sublayers = given.pop("sublayers", network.sublayers)
    return parallel.Pipeline(network.depth, sublayers, plan=plan, embed=network.embed, head=network.head, **given)


@pytest.fixture
def network() -> Network:
    return Network({"mechanism": "attnres", "depth": 8})


def planned(network: Network, **settings: Any) -> parallel.Plan:
    given = {"shape": SHAPE, "ranks": 2, "virtual": 2, "dtype": torch.float64} | settings
    return parallel.make_plan(network.depth, **given)


@pytest.mark.parametrize(
    ("plan", "settings", "parts"),
    [
        ({}, {"schedule": "1F1b"}, ["unknown schedule '1F1b'", "Did you mean '1F1B'?", "Known: GPipe, 1F1B"]),
        ({}, {"schedule": "1F1B"}, ["plan of virtual=2", "expected 1.", "with virtual=1", "'Interleaved1F1B'"]),
        ({"virtual": 1}, {}, ["plan of virtual=1", "at least 2.", "with virtual=2", "schedule='1F1B'"]),
        ({"virtual": 1}, {"schedule": "ZBVZeroBubble"}, ["'ZBVZeroBubble'", "expected 2", "'InterleavedZeroBubble'"]),
        ({}, {"schedule": "DualPipeV"}, ["'DualPipeV'", "placement='loop'", "expected 'v'"]),
        ({"placement": "v"}, {}, ["'Interleaved1F1B'", "placement='v'", "expected 'loop'"]),
        (
            {"virtual": 1},
            {"schedule": "1F1B", "microbatches": 1},
            ["microbatches=1", "at least as many as stages, 2"],
        ),
        ({}, {"microbatches": 5}, ["microbatches=5 with 2 ranks", "such as 4 or 6"]),
        ({}, {"microbatches": 0}, ["microbatches=0", "at least 1"]),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_without_a_process_group(
    plan: dict[str, Any], settings: dict[str, Any], parts: list[str], network: Network
) -> None:
    with pytest.raises(ValueError, match=says(*parts)):
        pipeline(network, planned(network, **plan), **settings)


def test_wrong_sublayers_are_refused_without_a_process_group(network: Network) -> None:
    plan = planned(network)
    with pytest.raises(ValueError, match=says("got 7 sublayers for 8 mixers", "expected 8")):
        pipeline(network, plan, sublayers=network.sublayers[:7])
    with pytest.raises(TypeError, match=says("sublayer 0 is a", "nn.Module")):
        pipeline(network, plan, sublayers=[torch.tanh] * 8)
    with pytest.raises(ValueError, match=says("'attnres' with 8 sublayers", "'attnres' with 9")):
        pipeline(Network({"mechanism": "attnres", "depth": 9}), plan)
    with pytest.raises(ValueError, match=says("[(8,), (8,), (8,)] before sublayer 2", "the same options")):
        pipeline(Network({"mechanism": "attnres", "depth": 8, "options": {"window": 1}}), plan)
    with pytest.raises(ValueError, match=says("0 value mixers", "values has 4")):
        pipeline(Network({"mechanism": "attnres", "depth": 8, "kv": "value_residual"}), plan)


def test_a_parameter_on_two_ranks_is_refused_by_name(network: Network) -> None:
    network.sublayers[3] = network.sublayers[0]
    with pytest.raises(
        ValueError, match=says("sublayers.0.norm.weight on rank 0", "sublayers.3.norm.weight on rank 1")
    ):
        pipeline(network, planned(network))


def test_without_a_process_group_the_error_says_how_to_make_one(network: Network) -> None:
    with pytest.raises(RuntimeError, match=says("no process group", "init_process_group", "torchrun")):
        pipeline(network, planned(network))


def test_an_older_torch_is_refused(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
    with pytest.raises(RuntimeError, match=says("torch 2.12.1", "torch 2.13", "upgrade")):
        pipeline(network, planned(network))


def test_an_embedding_that_is_not_as_planned_is_refused(network: Network) -> None:
    plan = planned(network)
    for wrong in (torch.randn(1, TOKENS, DIM, dtype=torch.float64), torch.randn(*SHAPE, DIM)):
        network.to(wrong.dtype)
        part = NetworkSegment(network.depth, list(network.sublayers), 0, plan.bounds[1])
        stage = stage_module.StageModule(part, 0, plan)
        with pytest.raises(ValueError, match=says(str(wrong.dtype), str(list(wrong.shape)), "[2, 4, 8]", "float64")):
            stage(wrong)


# One process.


@pytest.mark.usefixtures("one_process")
def test_a_pipeline_of_one_rank_is_the_network(network: Network) -> None:
    pipe = pipeline(network, planned(network, ranks=1, virtual=1), schedule="GPipe")
    x, target, _ = batch_of(4)
    loss = pipe.step(x, target)
    got = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    network.zero_grad()
    expected = loss_of(network(x), target)
    expected.backward()
    assert loss is not None
    assert abs(loss - expected) < 1e-12
    assert got.keys() == dict(network.named_parameters()).keys()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-10, atol=1e-12)
    assert pipe.sent_bytes() == {"forward": 0, "backward": 0}
    with pytest.raises(ValueError, match=says("x has 6 rows", "expected 8", "4 micro-batches of 2")):
        pipe.step(x[:6], target)


@pytest.mark.usefixtures("one_process")
def test_a_process_group_of_another_size_is_refused(network: Network) -> None:
    with pytest.raises(ValueError, match=says("for 2 ranks", "has 1", "ranks=1")):
        pipeline(network, planned(network))


# The store.


def test_a_store_frees_a_tensor_with_its_last_reader_and_sums_their_gradients() -> None:
    store = parallel.Store({7: 3})
    value = torch.arange(3.0, requires_grad=True)
    store.put(7, 0, value)
    first, second = store.take(7, 0), store.take(7, 0)
    assert not first.requires_grad
    assert first.data_ptr() == second.data_ptr() == value.data_ptr()
    assert len(store) == 1
    store.take(7, 0)
    assert len(store) == 0
    for gradient in (torch.ones(3), None, 2 * torch.ones(3)):
        store.leave(7, 0, gradient)
    collected = store.collect(7, 0)
    assert isinstance(collected, Tensor)
    assert collected.tolist() == [3, 3, 3]
    assert len(store) == 0
    with pytest.raises(RuntimeError, match=says("tensor 7 of micro-batch 0 is not in the store")):
        store.take(7, 0)


def test_micro_batches_do_not_mix_in_a_store() -> None:
    store = parallel.Store({0: 1})
    for batch in range(2):
        store.put(0, batch, torch.full((2,), float(batch)))
        store.leave(0, batch, torch.full((2,), 10.0 + batch))
    assert store.peak == 8
    assert store.take(0, 1).tolist() == [1, 1]
    collected = store.collect(0, 0)
    assert isinstance(collected, Tensor)
    assert collected.tolist() == [10, 10]


@pytest.mark.parametrize("deposits", [0, 1, 3])
def test_a_wrong_number_of_deposits_is_an_error(deposits: int) -> None:
    store = parallel.Store({4: 2})
    for _ in range(deposits):
        store.leave(4, 1, torch.ones(1))
    with pytest.raises(RuntimeError, match=says("tensor 4 of micro-batch 1", f"gradients of {deposits}", "expected 2")):
        store.collect(4, 1)


def test_sublayers_of_a_stage_need_not_be_distinct() -> None:
    network = Network({"mechanism": "residual", "depth": 8, "repeat": 1})
    segment = NetworkSegment(network.depth, list(network.sublayers), 0, 4)
    shared: list[nn.Parameter] = list(network.sublayers[0].parameters())
    assert [id(p) for p in segment.used_repeatedly()] == [id(p) for p in shared]
