"""The order in which a part of a decoder is wrapped: tensor parallelism, activation checkpointing, compiling, FSDP2.

Each step sees what the ones before it have done: checkpointing recomputes sharded sublayers, the compiler sees what is
recomputed, and FSDP2 shards last, so that its hooks stay outside of compiled code and gather what remains of a
parameter after tensor parallelism has cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from depthmix.models import Decoder
from depthmix.models.decoder import SublayerLoop
from depthmix.parallel.layout import Layout


def wrap(
    part: SublayerLoop,
    root: nn.Module,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    recompute: int | None = None,
    compile: bool = False,
    bfloat16: bool = False,
) -> None:
    """Wrap a part in place. `root` is the module that is called: the part itself, or the stage that holds it."""
    if layout.tp > 1:
        from depthmix.parallel.tensor import tensor_parallel

        tensor_parallel(part, mesh["tp"])
    part.checkpoint_every = recompute
    if compile:
        for sublayer in part.all_sublayers():
            sublayer.compile(dynamic=False)
    if layout.data > 1 or bfloat16:
        shard(part, root, mesh["fsdp"] if layout.replicate == 1 else mesh["replicate", "fsdp"], bfloat16)


def shard(part: SublayerLoop, root: nn.Module, mesh: DeviceMesh, bfloat16: bool) -> None:
    """FSDP2: one unit per sublayer, and a root unit with embedding, mixers and head.

    With bfloat16, parameters are gathered in it and gradients are reduced in float32; the optimiser sees float32.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    # A stage of a pipeline runs many micro-batches: its parameters stay gathered until the step ends.
    shard_units(part.all_sublayers(), root, mesh, bfloat16, reshard_after_forward=root is part)
    register_fsdp_forward_method(root, "loss" if isinstance(root, Decoder) else "advance")


def shard_units(
    units: Sequence[nn.Module],
    root: nn.Module,
    mesh: DeviceMesh,
    bfloat16: bool,
    *,
    reshard_after_forward: bool = True,
) -> None:
    """FSDP2: a unit for each of these modules, and a root unit with the rest."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if bfloat16:  # the stream is bfloat16 from the embedding on; sums of auxiliary losses stay wide
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    for unit in (*units, root):
        fully_shard(unit, **options)
