"""Stages of a pipeline for a network of your own, and a training step by a named schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from depthmix.mechanisms import DepthStack, KVStack
from depthmix.parallel.network import NetworkSegment
from depthmix.parallel.plan import Plan
from depthmix.parallel.scheduled import ScheduledStages, cached_stages, pipeline_rank
from depthmix.parallel.schedules import check_schedule
from depthmix.parallel.stage import CachedStage
from depthmix.parallel.stage_module import StageModule


def stages(
    stack: DepthStack,
    sublayers: Any,
    *,
    plan: Plan,
    embed: nn.Module | None = None,
    head: nn.Module | None = None,
    values: KVStack | None = None,
    cache: bool = True,
    recompute: bool = False,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> list[CachedStage]:
    """The stages of this rank, for a schedule of torch.distributed.pipelining.

    Args:
        stack: the whole network's stack, as the plan was made for it.
        sublayers: one module per mixer, each from [..., dim] to [..., dim]. Keyword arguments of the schedule's `step`
            are given to each of them. Where `values` mix, a sublayer is called as `y, kv = sublayer(h, mixer, kv)`.
        plan: from `make_plan`, the same on all ranks.
        embed: from the model's input to the stream; None: the input is the stream.
        head: from the stream to the model's output; None: the output is the stream.
        values: the network's value mixers, as the plan was made for them.
        cache: whether ranks keep what they have; False sends the whole state at every cut.
        recompute: whether each sublayer and its read are computed again in the backward pass (activation
            checkpointing).
        device: where this rank's stages and their buffers are.
        group: the processes of the pipeline; by default all.

    All ranks pass the whole network; only this rank's part is held by the result. Errors in the arguments are raised
    before the process group is asked for.
    """
    pairs = stack.pairs(sublayers)
    check_fits(plan, stack, values)
    for i, (_, sublayer) in enumerate(pairs):
        if not isinstance(sublayer, nn.Module):
            raise TypeError(f"sublayer {i} is a {type(sublayer).__name__}; expected an nn.Module")
    modules = [sublayer for _, sublayer in pairs]
    options: dict[str, Any] = {"embed": embed, "head": head, "values": values, "recompute": recompute}
    parts = [
        NetworkSegment(stack, modules, lo, hi, attention=plan.attention, **options)
        for lo, hi in itertools.pairwise(plan.bounds)
    ]
    check_not_shared(plan, parts)
    rank = pipeline_rank(plan, group)
    own = [StageModule(part, s, plan, cache) for s, part in enumerate(parts) if plan.rank_of[s] == rank]
    return cached_stages(own, plan, device, group)


class Pipeline(ScheduledStages):
    """A network cut into stages, trained by a schedule of torch.distributed.pipelining.

    Args:
        stack, sublayers, plan, options: those of `stages`.
        loss: from the output and the target of a micro-batch to their mean loss.
        schedule: "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble" or
            "DualPipeV".
        microbatches: number of micro-batches of a step; each has the shape of the plan.
    """

    def __init__(
        self,
        stack: DepthStack,
        sublayers: Any,
        *,
        plan: Plan,
        loss: Callable[[Tensor, Tensor], Tensor],
        schedule: str,
        microbatches: int,
        **options: Any,
    ) -> None:
        check_schedule(schedule, plan, microbatches)
        super().__init__(stages(stack, sublayers, plan=plan, **options), plan, loss, schedule, microbatches)

    def step(self, x: Tensor, target: Tensor, **shared: Any) -> Tensor | None:
        """Forward and backward of a batch: adds to the gradients of this rank's parameters.

        Every rank may pass the whole batch; `x` is used by the first stage and `target` by the last. `shared` goes to
        every sublayer, its tensors split by rows as the batch is. Returns the mean loss where the last stage is, None
        on other ranks.
        """
        self.check_rows("x", x)
        self.check_rows("target", target)
        return self.run(x, target, backward=True, **shared)


def check_fits(plan: Plan, stack: DepthStack, values: KVStack | None) -> None:
    if (plan.name, plan.bounds[-1]) != (stack.name, stack.depth):
        raise ValueError(
            f"the plan is for {plan.name!r} with {plan.bounds[-1]} sublayers, the stack is {stack.name!r} with "
            f"{stack.depth}; make the plan from this stack"
        )
    for cut, state in list(zip(plan.bounds, plan.states, strict=True))[1:-1]:
        spec = stack.spec(cut)
        shapes = [plan.tensors[n][0][len(plan.shape) :] for n in state]
        if shapes[: spec.essential] != [*spec.shapes[: spec.essential]] or (
            values is None and len(shapes) > spec.essential
        ):
            raise ValueError(
                f"the plan has a state of {shapes} before sublayer {cut}, the stack of "
                f"{[*spec.shapes[: spec.essential]]}; make the plan from this stack, with the same options"
            )
    if len(plan.attention) != (0 if values is None else len(values)):
        raise ValueError(
            f"the plan has {len(plan.attention)} value mixers, values has {0 if values is None else len(values)}; give "
            "the same `values` to make_plan"
        )


def check_not_shared(plan: Plan, parts: list[NetworkSegment]) -> None:
    """Gradients of a parameter on two ranks would have to be summed after each step."""
    first: dict[int, tuple[str, int]] = {}
    for part, rank in zip(parts, plan.rank_of, strict=True):
        for name, parameter in part.named_parameters():
            other, home = first.setdefault(id(parameter), (name, rank))
            if home != rank:
                raise ValueError(
                    f"{other} on rank {home} and {name} on rank {rank} are one parameter; expected parameters that "
                    "belong to one rank. Untie them, or choose sizes that put both on one rank"
                )
