"""What frameworks do to a model from outside: compile it in pieces, shard and swap its parameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import depthmix as dm


def network(name: str, depth: int = 12, **options: Any) -> nn.Module:
    torch.manual_seed(0)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depth = dm.DepthStack(name, dim=8, depth=depth, **options)
            self.sublayers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            return self.depth(x, self.sublayers)

    model = Network().double()
    with torch.no_grad():
        for parameter in model.depth.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def count_graphs(counted: list[int]) -> Any:
    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        counted.append(1)
        return graph.forward

    return backend


@pytest.mark.parametrize("name", ["attnres", "block_attnres"])
def test_a_whole_network_whose_state_grows_is_one_graph_for_many_calls(name: str) -> None:
    torch._dynamo.reset()
    graphs: list[int] = []
    model = network(name, depth=24)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=count_graphs(graphs))
    for seed in range(3):
        x = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert (compiled(x) - model(x)).abs().max() < 1e-12
    assert len(graphs) == 1


def test_compiling_layer_by_layer_where_the_state_grows_fails_loudly_at_the_limit() -> None:
    """Dynamo would otherwise go on without compiling, and say so in a log that nobody reads."""
    torch._dynamo.reset()
    graphs: list[int] = []
    model = network("attnres", depth=24)
    step = torch.compile(
        lambda mixer, state: mixer.step(state, torch.tanh), fullgraph=True, backend=count_graphs(graphs)
    )

    def climb() -> None:
        state = model.depth.begin(torch.randn(2, 8, dtype=torch.float64))  # type: ignore[union-attr, operator]
        for mixer in model.depth:  # type: ignore[union-attr]
            state = step(mixer, state)

    with torch.no_grad(), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        climb()
    assert len(graphs) == torch._dynamo.config.recompile_limit


@pytest.mark.parametrize("name", ["attnres", "block_attnres"])
def test_reads_take_the_parameters_that_are_there_when_they_run(name: str) -> None:
    """A boundary site reads the queries of its whole group: swapped ones, not those that it was built with."""
    model, x = network(name), torch.randn(3, 8, dtype=torch.float64)
    others = {key: (p + torch.randn_like(p)).detach().requires_grad_() for key, p in model.named_parameters()}
    swapped = functional_call(model, others, (x,))
    grads = torch.autograd.grad(swapped.square().sum(), list(others.values()))
    model.load_state_dict({**model.state_dict(), **others})
    own = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert (swapped - model(x)).abs().max() < 1e-12
    for a, b in zip(grads, own, strict=True):
        assert (a - b).abs().max() < 1e-11 * b.abs().max().clamp(min=1)


SHARDED = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, {folder!r})
from test_machinery import network

def rank(index, meet, name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{{meet}}", rank=index, world_size=2)
    plain, model = network(name), network(name)
    for sublayer in model.sublayers:
        fully_shard(sublayer)
    fully_shard(model)
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
    every = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(every, x)
    model(x).square().sum().backward()
    sum(plain(each).square().sum() for each in every).div(2).backward()
    for (key, a), b in zip(model.named_parameters(), plain.parameters()):
        whole = a.grad.full_tensor()
        assert (whole - b.grad).abs().max() < 1e-11 * b.grad.abs().max().clamp(min=1), key
    dist.barrier()  # else one rank ends while the other still talks to it
    dist.destroy_process_group()
    os._exit(0)  # past the teardown of gloo's threads, which aborts now and then

if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[0] + ".meet", sys.argv[1]), 2)
    print("equal")
"""


@pytest.mark.parametrize("name", ["attnres", "block_attnres", "mhc"])
def test_sharded_over_two_ranks_it_learns_the_same(name: str, tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED.format(folder=str(Path(__file__).parent)))
    done = subprocess.run([sys.executable, str(script), name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "equal" in done.stdout
