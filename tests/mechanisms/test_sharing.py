"""Mixers that share their parameters over the executions of one sublayer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import depthmix as dm
from depthmix.analysis.invariants import Probe, distance, make_probe
from tests.cases import DEFAULTS, label

FROM_THE_START = (0, 1, 0, 1, 0, 1)
INSIDE = (0, 1, 2, 3, 2, 3, 4, 5)
ORDERS = pytest.mark.parametrize("order", [FROM_THE_START, INSIDE], ids=["from the start", "inside"])
SHARED = [case.values for case in DEFAULTS if case.values[0] != "denseformer"]
SHARED += [
    ("block_attnres", {"block_sublayers": 3, "query": "input", "query_from": "read"}),
    ("attnres", {"query": "input", "query_from": "sum", "heads": 2}),
    ("mrla", {"form": "base"}),
    ("linear_attention", {"rule": "delta"}),
    ("hyper_connections", {"readout": "learned", "dynamic": False}),
]
EVERY_SHARED = pytest.mark.parametrize(("name", "options"), [pytest.param(*c, id=label(*c)) for c in SHARED])


def repeated(count: int) -> tuple[int, ...]:
    """Sublayers 2 and 3 of six, run `count` times."""
    return (0, 1, *(2, 3) * count, 4, 5)


def shared(name: str, order: tuple[int, ...], **options: Any) -> dm.DepthStack:
    """In double precision, with parameters that no start has."""
    torch.manual_seed(0)
    stack = dm.DepthStack(name, dim=8, depth=len(order), order=order, **options).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return stack


def unshared(stack: dm.DepthStack, name: str, options: dict[str, Any]) -> Probe:
    """The same network with a copy of each mixer's parameters for each execution."""
    probe = make_probe(name, options, depth=len(stack), spread=0)
    with torch.no_grad():
        for own, other in zip(stack.all_mixers(), probe.stack.all_mixers(), strict=True):
            for key, parameter in other.named_parameters():
                parameter.copy_(own.get_parameter(key))
    return probe


@EVERY_SHARED
@ORDERS
def test_it_computes_and_learns_what_equal_mixers_do(name: str, options: dict[str, Any], order: Any) -> None:
    stack = shared(name, order, **options)
    probe = unshared(stack, name, options)
    with torch.no_grad():
        ours, theirs = (dm.trace(s, probe.x, probe.sublayers) for s in (stack, probe.stack))
    assert distance(ours.inputs, theirs.inputs) <= 1e-12
    assert distance(ours.M, theirs.M) <= 1e-12
    probe.x.requires_grad_()
    for part in (stack, probe.stack):
        probe.run(part).square().sum().backward()
    for key, parameter in stack.named_parameters():
        _, _, leaf = key.rpartition(".")
        users = [
            other.get_parameter(leaf).grad
            for own, other in zip(stack.all_mixers(), probe.stack.all_mixers(), strict=True)
            if own._parameters.get(leaf) is parameter
        ]
        total = torch.stack([g for g in users if g is not None]).sum(0)
        assert distance(parameter.grad, total) <= 1e-11, key


@EVERY_SHARED
@ORDERS
def test_every_parameter_is_there_once(name: str, options: dict[str, Any], order: Any) -> None:
    stack = shared(name, order, **options)
    parameters = dict(stack.named_parameters())
    assert stack.facts.parameters == sum(p.numel() for p in parameters.values())
    assert len({id(p) for p in parameters.values()}) == len(parameters)
    assert {key for key in stack.state_dict() if not key.endswith("_extra_state")} == set(parameters)
    grouped = [id(p) for group in dm.param_groups(stack) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in parameters.values())
    per_sublayer = {key.split(".")[1] for key in parameters if key.startswith("mixers.")}
    assert per_sublayer <= {*map(str, order), "first"}


@EVERY_SHARED
def test_parameters_of_two_repeats_serve_four(name: str, options: dict[str, Any]) -> None:
    if name == "block_attnres":
        options = {"block_sublayers": 2, **options}
    two, four = (dm.DepthStack(name, dim=8, depth=len(o), order=o, **options) for o in (repeated(2), repeated(4)))
    four.load_state_dict(two.state_dict())
    for (key, a), b in zip(four.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert len(four) == 12


def test_a_block_size_that_follows_from_the_depth_is_not_kept_silently() -> None:
    two, ten = (dm.DepthStack("block_attnres", dim=8, depth=len(o), order=o) for o in (repeated(2), repeated(10)))
    with pytest.raises(ValueError, match="block_sublayers is 2 in the state dict and 4 here"):
        ten.load_state_dict(two.state_dict())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("denseformer", {}, r"denseformer: the mixers of sublayer 2 cannot be shared: they have weights \[2\] at exec"),
        ("attnres", {"mixing": "static"}, r"logits \[3\] at execution 2 and logits \[5\] at execution 4"),
        ("block_attnres", {"mixing": "static", "block_sublayers": 2}, "need a mixer for each execution"),
    ],
)
def test_parameters_that_count_sources_are_refused_by_name(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shared(name, INSIDE, **options)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 2, 3, 2, True, 4, 5), "01232345"])
def test_an_order_that_does_not_name_every_execution_is_refused(order: Any) -> None:
    with pytest.raises(ValueError, match="expected 8 numbers, the layer of each execution"):
        dm.DepthStack("attnres", dim=8, depth=8, order=order)


@EVERY_SHARED
def test_a_slice_and_a_copy_share_as_the_whole_does(name: str, options: dict[str, Any]) -> None:
    stack = shared(name, INSIDE, **options)
    probe = unshared(stack, name, options)
    with torch.no_grad():
        whole, twin = probe.run(stack), copy.deepcopy(stack)
        head, tail = stack.slice(0, 5), stack.slice(5, 8)  # sublayer 3 runs in both
        state = head.begin(probe.x)
        for part in (head, tail):
            for mixer, f in part.pairs(probe.sublayers[part.lo : part.hi]):
                state = mixer.step(state, f)
        assert distance(tail.end(state), whole) <= 1e-12
        assert set(tail.state_dict()) <= set(stack.state_dict())
        for parameter in twin.parameters():
            parameter.add_(1)
        assert torch.equal(probe.run(stack), whole), "a copy is on its own"
        moved = probe.run(twin)
        twin.load_state_dict(stack.state_dict(), assign=True)
        assert torch.equal(probe.run(twin), whole), "replaced parameters reach every execution"
        assert torch.equal(functional_call(twin, dict(stack.named_parameters()), (probe.x, probe.sublayers)), whole)
        assert name == "residual" or not torch.equal(moved, whole)


class Network(nn.Module):
    def __init__(self, name: str, order: tuple[int, ...]) -> None:
        super().__init__()
        self.depth = shared(name, order)
        self.sublayers = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(max(order) + 1))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return self.depth(x, [self.sublayers[i] for i in self.order])


def test_it_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    model, x = Network("block_attnres", FROM_THE_START), torch.randn(2, 3, 8, dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert distance(compiled(x).detach(), model(x).detach()) <= 1e-12


def test_sharded_parameters_reach_every_execution(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        plain = Network("attnres", FROM_THE_START)
        model = fully_shard(copy.deepcopy(plain), mesh=init_device_mesh("cpu", (1,)))
        x = torch.randn(3, 8, dtype=torch.float64)
        for each in (plain, model):
            each(x).square().sum().backward()
        found = {key: p.grad.full_tensor() for key, p in model.named_parameters()}  # type: ignore[union-attr]
        for key, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert distance(found[key], parameter.grad) <= 1e-12, key
    finally:
        dist.destroy_process_group()
