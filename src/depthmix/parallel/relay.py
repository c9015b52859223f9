"""A forward pass through the stages of a pipeline without a schedule: for validation and generation.

Each rank runs its parts in order and hands on what they return. Rows may be of any number and length, and there are no
gradients. With several batches the ranks work at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from depthmix import ops
from depthmix.mechanisms import State
from depthmix.models import Segment
from depthmix.models.context import Cache


class Relay:
    """The parts of this rank, by their stages, and the rank of every stage.

    Args:
        parts: segments by their stage.
        rank_of: the rank in `group` of each stage.
        group: the processes of the pipeline.
        dtype: dtype of the stream.
        roots: modules around the parts whose `advance` is called instead, such as those that FSDP2 has wrapped.
    """

    def __init__(
        self,
        parts: Mapping[int, Segment],
        rank_of: Sequence[int],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        roots: Mapping[int, Any] | None = None,
    ) -> None:
        self.parts, self.rank_of, self.group, self.dtype = parts, tuple(rank_of), group, dtype
        self.roots = parts if roots is None else roots
        self.rank = dist.get_rank(group)

    @torch.no_grad()
    def run(
        self,
        batches: Sequence[Tensor],
        *,
        loss: bool = False,
        hidden: bool = False,
        valid: Tensor | None = None,
        caches: Mapping[int, Cache] | None = None,
    ) -> list[State] | None:
        """What the last stage returns for each batch of tokens [B, T], on its rank; None elsewhere.

        Args:
            batches: the tokens, on every rank.
            loss: whether the last stage returns the loss.
            hidden: whether the last stage returns what its norm reads.
            valid: as in `Decoder.forward`.
            caches: a cache for each stage of this rank.
        """
        handed: list[State] = [(tokens,) for tokens in batches]
        for s, root in self.roots.items():
            pending: list[Any] = []
            results: list[State] = []
            for tokens, state in zip(batches, handed, strict=True):
                if s and self.rank_of[s - 1] != self.rank:
                    state = self.receive(s, tokens)
                state = root.advance(
                    *state,
                    length=tokens.shape[1],
                    valid=valid,
                    tokens=tokens if loss else None,
                    hidden=hidden,
                    cache=None if caches is None else caches[s],
                )
                if s + 1 < len(self.rank_of) and self.rank_of[s + 1] != self.rank:
                    state = tuple(tensor.contiguous() for tensor in state)
                    pending += [dist.isend(tensor, group=self.group, group_dst=self.rank_of[s + 1]) for tensor in state]
                results.append(state)
            for work in pending:
                work.wait()
            handed = results
        return handed if self.rank_of[-1] == self.rank else None

    def receive(self, s: int, tokens: Tensor) -> State:
        part = self.parts[s]
        shapes = part.shapes(part.lo, *tokens.shape)
        dtypes = [self.dtype] * len(shapes)
        if part.adds_loss:
            dtypes[-1] = ops.accumulator(self.dtype)
        pairs = zip(shapes, dtypes, strict=True)
        state = tuple(torch.empty(shape, dtype=dtype, device=tokens.device) for shape, dtype in pairs)
        for tensor in state:
            dist.recv(tensor, group=self.group, group_src=self.rank_of[s - 1])
        return state
