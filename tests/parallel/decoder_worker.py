"""One rank of the processes that tests/parallel/test_decoder_pipeline.py starts.

python -m tests.parallel.decoder_worker FOLDER, in an environment as torchrun sets it; cases in FOLDER/cases.json, what
was measured in FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from depthmix import parallel
from depthmix.models import Decoder, DecoderConfig, Segment
from depthmix.models.moe import MixtureOfExperts
from depthmix.parallel import decoder_pipeline, stage_module
from depthmix.parallel import shared as sharing
from depthmix.parallel.decoder_plan import shared_names
from depthmix.support.files import seed_of
from tests.decoders import some_tokens, tiny_config
from tests.parallel.worker import SENT, count_sends, distance

ROWS, TOKENS = 2, 5


@torch.no_grad()
def move(part: Decoder | Segment) -> None:
    """Start every parameter by its name, and away from where it begins."""
    part.double()
    part.reset_parameters(3)
    for name, parameter in part.named_parameters():
        generator = torch.Generator().manual_seed(seed_of(1, name))
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)


def make_mesh(case: dict[str, Any]) -> tuple[Any, list[list[int]]]:
    """Replicas × stages, and the global ranks of every pipeline."""
    dp, pp = case.get("dp", 1), dist.get_world_size() // case.get("dp", 1)
    mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))
    return mesh, mesh.mesh.T.tolist()


def shard(stage: stage_module.StageModule, mesh: Any, **options: Any) -> None:
    for sublayer in stage.part.sublayers.values():
        fully_shard(sublayer, mesh=mesh, **options)
    fully_shard(stage, mesh=mesh, **options)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def build(case: dict[str, Any], mesh: Any, microbatches: int) -> tuple[decoder_pipeline.DecoderPipeline, DecoderConfig]:
    config = tiny_config(case["form"], **case["config"])
    group, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    plan = parallel.decoder_plan(
        config,
        rows=ROWS,
        tokens=TOKENS,
        ranks=dist.get_world_size(group),
        dtype=torch.float64,
        **{"virtual": 2} | case.get("plan", {}),
    )
    stages = decoder_pipeline.build_stages(config, plan, case["cache"], rank)
    for _, stage in stages:
        move(stage.part)
        stage.part.checkpoint_every = case.get("checkpoint_every")
    if "dp" not in case:
        decoder_pipeline.tie([stage.part for _, stage in stages])
    for _, stage in stages:
        if case.get("compile"):
            for sublayer in stage.part.sublayers.values():
                sublayer.compile(dynamic=False)
        if "dp" in case:
            shard(stage, mesh["dp"], **case.get("fsdp", {}))
    pipeline = decoder_pipeline.DecoderPipeline(
        stages, schedule=case["schedule"], microbatches=microbatches, group=group
    )
    return pipeline, config


def run(case: dict[str, Any]) -> dict[str, Any]:
    mesh, pipelines = make_mesh(case)
    dp = case.get("dp", 1)
    microbatches = case["microbatches"]
    pipeline, config = build(case, mesh, microbatches)
    plan, cache = pipeline.plan, case["cache"]
    names = shared_names(config, plan)
    shared = sharing.SharedParameters(names, pipelines)
    tokens = some_tokens(ROWS * microbatches * dp, TOKENS)
    own = tokens.view(microbatches, dp, ROWS, TOKENS)[:, mesh["dp"].get_local_rank()].flatten(0, 1)
    evaluated = [pipeline.evaluate(own)]
    losses, left = [], 0
    SENT.clear()
    for _ in range(2):  # the second step meets buffers that are used again
        for parameter in pipeline.parameters():
            parameter.grad = None
        for module in moes(pipeline.modules()):
            module.load.zero_()
        losses.append(pipeline.step(own))
        left += len(pipeline.store)
    sent = dict(SENT)
    sharded = [m for s in pipeline.stages for m in s.submod.modules() if isinstance(m, FSDPModule)]
    shared.sum_gradients(pipeline.named_parameters())
    shared.sum_loads(pipeline.modules())
    evaluated.append(pipeline.evaluate(own.repeat(2, 1)))

    whole = Decoder(config)
    move(whole)
    expected = torch.zeros((), dtype=torch.float64)
    for rows in tokens.view(-1, ROWS, TOKENS):
        loss = whole.loss(rows) / (microbatches * dp)
        loss.backward()
        expected += loss.detach()
    with torch.no_grad():
        plain = whole.loss(tokens)
    want = {name: parameter.grad for name, parameter in whole.named_parameters()}
    held = {name: full(parameter.grad, dp) for name, parameter in pipeline.named_parameters()}
    loads = {name: m.load for name, m in whole.named_modules() if isinstance(m, MixtureOfExperts)}
    own_loads = []
    for part in pipeline.modules():
        for name, module in part.named_modules():
            if isinstance(module, MixtureOfExperts) and module.load is not None:
                dist.all_reduce(module.load, group=mesh["dp"].get_group())
                own_loads.append((module.load.tolist(), loads[name].tolist()))
    return {
        "difference": max((distance(held[name], want[name]), name) for name in held),
        "loss": differences(losses, expected, mesh, dp),
        "evaluated": differences(evaluated, plain, mesh, dp),
        "names": sorted(held),
        "copies": len([*pipeline.parameters()]) - len(held),
        "counted": sorted(name for name in held if shared.counts_here(name)),
        "all_names": sorted(want),
        "loads": [got == wanted and sum(wanted) > 0 for got, wanted in own_loads],
        "reductions": [sent.get("reductions", 0), 2 * len(sharded)],
        "sent": sent,
        "own_count": sum(pipeline.sent_bytes().values()),
        "planned": {"tensors": plan.sent_tensors(cache), "bytes": plan.sent_bytes(cache)},
        "left": left + len(pipeline.store),
        "stored": [pipeline.store.peak, plan.stored_bytes(mesh["pp"].get_local_rank()) if cache else 0],
    }


def count_reductions() -> None:
    reduce = dist.reduce_scatter_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        SENT["reductions"] += 1
        return reduce(*args, **kwargs)

    dist.reduce_scatter_single = counted


def moes(parts: list[nn.Module]) -> list[Any]:
    modules = (m for part in parts for m in part.modules())
    return [m for m in modules if isinstance(m, MixtureOfExperts) and m.load is not None]


def full(gradient: Tensor | None, dp: int) -> Tensor | None:
    """The gradient of all replicas; FSDP2 sums them here, and each has the mean over its own rows."""
    return gradient.full_tensor() / dp if isinstance(gradient, DTensor) else gradient


def differences(losses: list[Tensor | None], expected: Tensor, mesh: Any, dp: int) -> list[float]:
    """Of the mean over replicas; empty where the last stage is not."""
    found = []
    for loss in losses:
        if loss is not None:
            total = loss.clone()
            dist.all_reduce(total, group=mesh["dp"].get_group())
            found.append(abs(total.item() / dp - expected.item()))
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    count_sends()
    count_reductions()
    results = []
    for case in json.loads((folder / "cases.json").read_text()):
        results.append(run(case))
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # without waiting for threads that gloo may still have


if __name__ == "__main__":
    main(Path(sys.argv[1]))
