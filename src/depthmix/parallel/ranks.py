"""Communication between the ranks of a run; with a single process there is none."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


met: list[bool] = []  # True once this process has been in a process group


def main_process() -> bool:
    """Whether this is the process that prints; known before and after the process group exists."""
    return os.environ.get("RANK", "0") == "0"


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def launched() -> int:
    """The number of processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(device: torch.device, timeout: int = 600) -> Iterator[None]:
    """Under torchrun, create the process group and destroy it at the end, unless it exists already.

    A rank that waits longer than `timeout` seconds for another one stops with an error.
    """
    if launched() == 1 or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    store, own, size = next(rendezvous("env://", timeout=limit))
    # torchrun keeps its store when it restarts the processes: without a prefix, a rank could read the address of one
    # that has been killed.
    store = PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=own, world_size=size, timeout=limit)
    met.append(True)
    # Of a matrix that tensor parallelism and FSDP2 have both cut: it is gathered in two messages.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        yield
    finally:
        dist.destroy_process_group()


def total(value: float) -> float:
    if not is_distributed():
        return value
    summed = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(summed)
    return float(summed)


def agree(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The tensor of the first rank of a group, on all of them."""
    tensor = tensor.contiguous()
    dist.broadcast(tensor, group=group, group_src=0)
    return tensor


def largest(number: int, group: dist.ProcessGroup | None = None) -> int:
    most = torch.tensor(number)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


def own_device(device: torch.device) -> torch.device:
    """The GPU of this process, where a device is "cuda" without a number."""
    if device.type == "cuda" and device.index is None and launched() > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def from_first(work: Callable[[], Any]) -> Any:
    """What the work gives on rank 0, on all ranks."""
    if not is_distributed():
        return work()
    found = [work() if rank() == 0 else None]
    dist.broadcast_object_list(found, 0)
    return found[0]


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


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; every rank must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
