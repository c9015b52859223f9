"""A decoder on several processes for generation: tensor parallelism, a pipeline, or both.

All processes generate the same tokens together. With tensor parallelism the state over depth is sharded along the
sequence while a prompt is read, and each process caches the keys and values of its own heads; a process of a pipeline
caches those of its own layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from depthmix.models import Decoder, DecoderConfig
from depthmix.models.context import Cache
from depthmix.models.shard import WholeSequence
from depthmix.parallel import ranks
from depthmix.parallel.config import ParallelConfig
from depthmix.parallel.decoder_plan import decoder_plan
from depthmix.parallel.distributed import DistributedDecoder
from depthmix.parallel.layout import Layout, check_stages, check_tensor_parallel, count_fsdp


def serving_layout(model: DecoderConfig, *, processes: int, tp: int = 1, pp: int = 1, divide: bool = False) -> Layout:
    """The layout of processes that only run a model forward, or an error that says what would work.

    Args:
        model: the decoder.
        processes: number of processes that torchrun started.
        tp: processes of a tensor-parallel group.
        pp: processes of a pipeline.
        divide: whether the other processes may share the rows of a batch.
    """
    config = ParallelConfig(tp=tp, pp=pp)
    if not divide and tp * pp != processes:
        raise ValueError(
            f"tp={tp} · pp={pp} on {processes} process{'es' if processes > 1 else ''}; expected {tp * pp} processes of "
            f"torchrun, or for {processes} such as tp={processes}, or pp={processes}"
        )
    fsdp = count_fsdp(config, processes)
    check_tensor_parallel(model, tp)
    check_stages(config, model)
    plan = None if pp == 1 else decoder_plan(model, rows=1, tokens=tp, ranks=pp, tp=tp)
    return Layout(pp=pp, tp=tp, fsdp=fsdp, plan=plan)


class PipelineDecoder(nn.Module):
    """A decoder whose segments are on the processes of a pipeline, to be called on all of them as a `Decoder` is.

    Every process passes the same tokens and gets the same logits. Its cache holds the layers of its own segment.
    """

    def __init__(self, model: DistributedDecoder) -> None:
        super().__init__()
        ((self.stage, part),) = model.parts.items()
        assert model.mesh is not None
        self.part: Any = part
        self.config, self.relay, self.group = model.config, model.relay, model.mesh.get_group("pp")
        self.shard, self.slots, self.first_slot = AllProcesses(part.shard.ranks), part.slots, part.first_slot

    def forward(
        self, tokens: Tensor, *, valid: Tensor | None = None, cache: Cache | None = None, last_only: bool = False
    ) -> Tensor:
        """Logits [B, T, V], or [B, 1, V] of the last token."""
        (h, _), count = self.hidden(tokens, valid=valid, cache=cache), tokens.shape[1]
        if h is not None:
            logits = self.part.output(h, count, last_only).contiguous()
        else:
            shape = (len(tokens), 1 if last_only else count, self.config.vocab_size)
            logits = torch.empty(shape, dtype=self.relay.dtype, device=tokens.device)
        dist.broadcast(logits, group=self.group, group_src=self.relay.rank_of[-1])
        return logits

    def hidden(
        self, tokens: Tensor, *, valid: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Tensor | None, list[Tensor]]:
        """What the final norm reads, on the last process."""
        caches = None if cache is None else {self.stage: cache}
        found = self.relay.run([tokens], hidden=True, valid=valid, caches=caches)
        return (None if found is None else found[0][0]), []


class AllProcesses(WholeSequence):
    """What all processes of a pipeline, and of the tensor-parallel groups in it, agree on."""

    def __init__(self, tensor_parallel: int) -> None:
        self.ranks = tensor_parallel  # which share the heads

    def agree(self, tokens: Tensor) -> Tensor:
        return ranks.agree(tokens)

    def largest(self, number: int) -> int:
        return ranks.largest(number)


def served(model: DistributedDecoder) -> Decoder:
    """What `generate` takes: the decoder itself, or one that calls the segments of a pipeline."""
    if model.layout.plan is None:
        decoder: Decoder = model.roots[0]
        return decoder.eval()
    pipeline: Any = PipelineDecoder(model).eval()
    return pipeline
