"""Options of verbs that run on several processes of torchrun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from depthmix.cli.shared import flag


@dataclass(frozen=True, kw_only=True)
class Processes:
    fsdp: Annotated[
        int | None,
        flag("Shard parameters, gradients and the optimiser's state over N processes (FSDP2).", "N",
             default="all processes that the other flags leave"),
    ] = None  # fmt: skip
    replicate: Annotated[
        int | None, flag("Groups of processes, each with a copy of the model (with --fsdp: HSDP).", "N", default="1")
    ] = None
    tp: Annotated[
        int | None,
        flag("Tensor parallelism over N processes, with the state over depth sharded along the sequence.", "N",
             default="1"),
    ] = None  # fmt: skip
    pp: Annotated[int | None, flag("A pipeline of N processes.", "N", default="1")] = None
    virtual_stages: Annotated[int | None, flag("Stages of each process of a pipeline.", "V", default="1")] = None
    schedule: Annotated[
        str | None,
        flag("Schedule of a pipeline: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or "
             "DualPipeV.", "NAME", default="1F1B; with virtual stages Interleaved1F1B"),
    ] = None  # fmt: skip
    microbatches: Annotated[
        int | None, flag("Micro-batches of a pipeline's step.", "N", default="at least two per process, if rows allow")
    ] = None
    divide: Annotated[
        Literal["count", "flops"] | None,
        flag("Stages of equally many sublayers, or of about equal FLOPs.", default="count"),
    ] = None
    pp_cache: Annotated[
        Literal["on", "off"] | None,
        flag("Whether processes of a pipeline keep what they have received, so that it is not sent again.",
             default="on"),
    ] = None  # fmt: skip
    ep: Annotated[
        int | None, flag("Expert parallelism: not included, only 1. --tp divides every expert.", "1", default="")
    ] = None
    cp: Annotated[
        int | None, flag("Context parallelism: not included, only 1. --tp shards the sequence.", "1", default="")
    ] = None


BY_DEFAULT = Processes()


@dataclass(frozen=True, kw_only=True)
class Serving:
    tp: Annotated[
        int,
        flag("Tensor parallelism over N processes of torchrun; the state over depth is sharded along the sequence.",
             "N"),
    ] = 1  # fmt: skip
    pp: Annotated[int, flag("A pipeline over N processes of torchrun.", "N")] = 1


ALONE = Serving()
