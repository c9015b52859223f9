"""How a run is spread over processes: the part [parallel] of its configuration. It does not decide the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from depthmix.parallel.schedules import RULES
from depthmix.support.checks import check_fields, check_range, did_you_mean

Divide = Literal["count", "flops"]
ABSENT = {
    "ep": "expert parallelism is not included. Tensor parallelism (parallel.tp) divides the width of every expert",
    "cp": "context parallelism is not included. Tensor parallelism (parallel.tp) shards the state over depth along the "
    "sequence, and pipelines (parallel.pp) divide the layers",
}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The number of processes is pp · replicate · fsdp · tp; processes of one tensor-parallel group are neighbours."""

    fsdp: int | None = None  # processes over which FSDP2 shards; None: all that the others leave
    replicate: int = 1  # groups of fsdp processes, each with a whole copy of the model (HSDP)
    tp: int = 1  # processes of a tensor-parallel group; the state over depth is sharded along the sequence
    pp: int = 1  # processes of a pipeline
    virtual_stages: int = 1  # stages of a process
    schedule: str | None = None  # of torch.distributed.pipelining; None: 1F1B, or Interleaved1F1B for virtual stages
    microbatches: int | None = None  # of a pipeline's step; None: follows from the schedule and the batch
    divide: Divide = "count"  # into stages of equally many sublayers, or of about equal FLOPs
    pp_cache: bool = True  # a process keeps what it has received; False sends the whole state at every cut
    timeout: int = 600  # seconds that a process waits for another before it stops
    ep: int = 1  # expert parallelism: only 1
    cp: int = 1  # context parallelism: only 1

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("fsdp", "replicate", "tp", "pp", "virtual_stages", "microbatches", "timeout"):
            if getattr(self, name) is not None:
                check_range(f"parallel.{name}", getattr(self, name), 1)
        for name, reason in ABSENT.items():
            if getattr(self, name) != 1:
                raise ValueError(f"parallel.{name}={getattr(self, name)}; expected 1: {reason}")
        if self.schedule is not None and self.schedule not in RULES:
            raise ValueError(
                f"parallel.schedule={self.schedule!r}. {did_you_mean(self.schedule, RULES)}Known: {', '.join(RULES)}"
            )
        if self.pp == 1 and self.virtual_stages > 1:
            raise ValueError(
                f"parallel.virtual_stages={self.virtual_stages} with parallel.pp=1; expected 1: a process has several "
                "stages only in a pipeline"
            )
