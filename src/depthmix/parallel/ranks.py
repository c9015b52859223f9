"""Communication between the ranks of a run; with a single process there is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from depthmix.models import Decoder
from depthmix.models.moe import MixtureOfExperts


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def main_process() -> bool:
    """Whether this is the process that prints; known before and after the process group exists."""
    return os.environ.get("RANK", "0") == "0"


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def launched() -> int:
    """The number of processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Under torchrun, create the process group and destroy it at the end, unless it exists already."""
    if launched() == 1 or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def mean(value: Tensor) -> Tensor:
    if is_distributed():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def total(value: float) -> float:
    if not is_distributed():
        return value
    summed = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(summed)
    return float(summed)


def first_then_others(work: Callable[[], Any]) -> Any:
    """Rank 0 does the work first; then the others call it too, and reuse what rank 0 has written."""
    if not is_distributed():
        return work()
    result, problem = None, None
    if rank() == 0:
        try:
            result = work()
        except Exception as error:
            problem = error
    if total(problem is not None):  # every rank stops; none waits for rank 0
        raise problem if problem is not None else RuntimeError("rank 0 failed; see its error message")
    return result if rank() == 0 else work()


def shard(model: Decoder) -> Decoder:
    """Apply FSDP2: one unit per sublayer, and a root unit with embedding, mixers and head."""
    if not is_distributed():
        return model
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for sublayer in model.sublayers:
        fully_shard(sublayer)
    fully_shard(model)
    register_fsdp_forward_method(model, "loss")
    return model


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; every rank must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sum_expert_load(model: nn.Module) -> None:
    """Sum the number of tokens of each expert over all ranks."""
    if is_distributed():
        for module in model.modules():
            if isinstance(module, MixtureOfExperts) and module.load is not None:
                dist.all_reduce(module.load)
