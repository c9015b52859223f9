"""One rank of the processes that tests/parallel/test_pipeline.py starts: runs its cases and writes what it measured.

python -m tests.parallel.worker FOLDER, in an environment as torchrun sets it; cases in FOLDER/cases.json, results in
FOLDER/RANK.json.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from depthmix import parallel
from tests.parallel.network import HEADS, ROWS, TOKENS, Network, batch_of, loss_of

SENT: Counter[str] = Counter()  # counted at torch.distributed, below everything that is tested


def count_sends() -> None:
    send = dist.isend

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        if tensor.is_floating_point():  # before the first step torch sends some integers
            SENT["tensors"] += 1
            SENT["bytes"] += tensor.numel() * tensor.element_size()
        return send(tensor, *args, **kwargs)

    dist.isend = dist.distributed_c10d.isend = counted


def build(case: dict[str, Any]) -> tuple[parallel.Pipeline, Network]:
    network = Network(case)
    values: dict[str, Any] = {} if network.values is None else {"values": network.values}
    plan = parallel.make_plan(
        network.depth,
        shape=(ROWS, TOKENS),
        ranks=dist.get_world_size(),
        virtual=case["virtual"],
        dtype=torch.float64,
        sizes=case.get("sizes"),
        placement=case.get("placement", "loop"),
        kv_heads=HEADS // 2 if values else None,
        **values,
    )
    pipeline = parallel.Pipeline(
        network.depth,
        network.sublayers,
        plan=plan,
        loss=loss_of,
        schedule=case["schedule"],
        microbatches=case["microbatches"],
        embed=network.embed,
        head=network.head,
        cache=case["cache"],
        recompute=case.get("recompute", False),
        **values,
    )
    return pipeline, network


def run(case: dict[str, Any]) -> dict[str, Any]:
    pipeline, network = build(case)
    x, target, shared = batch_of(case["microbatches"], case.get("shared", False))
    losses, left = [], 0
    SENT.clear()
    for _ in range(2):  # the second step meets buffers that are used again
        network.zero_grad()
        losses.append(pipeline.step(x, target, **shared))
        left += len(pipeline.store)
    sent = dict(SENT)
    own = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    whole = Network(case)
    expected = loss_of(whole(x, **shared), target)
    expected.backward()
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    held = {names[id(parameter)]: parameter.grad for parameter in pipeline.parameters()}
    want = {name: parameter.grad for name, parameter in whole.named_parameters()}
    plan, cache, rank = pipeline.plan, case["cache"], dist.get_rank()
    return {
        "difference": max((distance(held[name], want[name]), name) for name in held),
        "loss": [] if losses[0] is None else [abs(loss.item() - expected.item()) for loss in losses],  # type: ignore[union-attr]
        "names": sorted(held),
        "all_names": sorted(want),
        "same_names": all(name in want for name in own),
        "sent": sent,
        "own_count": sum(pipeline.sent_bytes().values()),
        "planned": {"tensors": plan.sent_tensors(cache), "bytes": plan.sent_bytes(cache)},
        "left": left,
        "stored": [pipeline.store.peak, plan.stored_bytes(rank) if cache else 0],
    }


def distance(got: Tensor | None, want: Tensor | None) -> float:
    """Relative; a gradient that is missing on one side only is wrong altogether."""
    if got is None or want is None:
        return 0.0 if got is want else float("inf")
    return ((got - want).norm() / want.norm().clamp(min=1e-6)).item()


def run_many(case: dict[str, Any]) -> dict[str, Any]:
    """What is alive after few and after many steps."""
    pipeline, network = build(case)
    x, target, _ = batch_of(case["microbatches"])
    counts = []
    for _ in range(2):
        for _ in range(case["steps"]):
            network.zero_grad()
            pipeline.step(x, target)
        gc.collect()
        alive = sum(isinstance(entry, Tensor) for entry in gc.get_objects())
        counts.append([alive, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss])
    return {"alive": counts}


def run_miscounted(case: dict[str, Any]) -> dict[str, Any]:
    """One reader more is expected than there is."""
    pipeline, _ = build(case)
    pipeline.store.readers = {n: count + 1 for n, count in pipeline.store.readers.items()}
    x, target, _ = batch_of(case["microbatches"])
    try:
        pipeline.step(x, target)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


RUNS = {"": run, "many": run_many, "miscounted": run_miscounted}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    count_sends()
    results = []
    for case in json.loads((folder / "cases.json").read_text()):
        results.append(RUNS[case.get("run", "")](case))
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    os._exit(0)  # a group that a failed step has left behind cannot be closed in order


if __name__ == "__main__":
    main(Path(sys.argv[1]))
