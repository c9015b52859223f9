"""Stages of a pipeline for a network of your own, and a training step by a named schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from depthmix.mechanisms import DepthStack, KVStack
from depthmix.parallel.plan import Plan
from depthmix.parallel.schedules import check_schedule
from depthmix.parallel.segment import Segment
from depthmix.parallel.stage import CachedStage
from depthmix.parallel.store import Store


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
    transport = plan.transport(cache)
    options: dict[str, Any] = {"transport": transport, "embed": embed, "head": head, "values": values}
    modules = [sublayer for _, sublayer in pairs]
    segments = [Segment(plan, s, stack, modules, recompute=recompute, **options) for s in range(plan.count)]
    check_not_shared(plan, segments)
    if torch.__version__ < "2.13":
        raise RuntimeError(
            f"torch {torch.__version__}; pipelines extend the PipelineStage of torch 2.13: upgrade torch"
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group; call torch.distributed.init_process_group first, in processes that torchrun started"
        )
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world != plan.ranks:
        raise ValueError(
            f"the plan is for {plan.ranks} ranks; the process group has {world}. Make it with ranks={world}"
        )
    store = Store(transport.readers(rank, plan.rank_of))
    return [
        CachedStage(segments[s], s, plan, transport, store, torch.device(device), group)
        for s in range(plan.count)
        if plan.rank_of[s] == rank
    ]


class Pipeline:
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
        self.plan, self.microbatches = plan, microbatches
        self.stages = stages(stack, sublayers, plan=plan, **options)
        make: Any = get_schedule_class(schedule)
        # The loss is scaled and not the gradients: torch would divide twice what two stages of a rank share.
        self.schedule = make(
            self.stages[0] if issubclass(make, PipelineScheduleSingle) else self.stages,
            n_microbatches=microbatches,
            loss_fn=lambda output, target: loss(output, target) / microbatches,
            scale_grads=False,
        )

    def step(self, x: Tensor, target: Tensor, **shared: Any) -> Tensor | None:
        """Forward and backward of a batch: adds to the gradients of this rank's parameters.

        Every rank may pass the whole batch; `x` is used by the first stage and `target` by the last. `shared` goes to
        every sublayer, its tensors split by rows as the batch is. Returns the mean loss where the last stage is, None
        on other ranks.
        """
        rows = self.plan.shape[0] * self.microbatches
        for name, tensor in (("x", x), ("target", target)):
            if len(tensor) != rows:
                raise ValueError(
                    f"{name} has {len(tensor)} rows; expected {rows}: {self.microbatches} micro-batches of "
                    f"{self.plan.shape[0]}, as in the plan"
                )
        losses: list[Tensor] = []
        is_first, is_last = (any(getattr(stage, end) for stage in self.stages) for end in ("is_first", "is_last"))
        given: dict[str, Any] = {"target": target, "losses": losses} if is_last else {}
        self.schedule.step(*([x] if is_first else []), return_outputs=False, **given, **shared)
        if entries := len(self.store):
            raise RuntimeError(f"{entries} entries are left in the store after a step; expected none")
        return torch.stack(losses).sum().detach() if is_last else None

    @property
    def store(self) -> Store:
        """What this rank keeps for its stages; empty between steps."""
        return self.stages[0].store

    def modules(self) -> list[nn.Module]:
        """The modules of this rank's stages."""
        return [stage.submod for stage in self.stages]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank, each once, under the names that they have in the whole network."""
        seen: set[int] = set()
        for module in self.modules():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that this rank has sent so far, forward and backward."""
        return {way: sum(stage.sent_bytes[way] for stage in self.stages) for way in ("forward", "backward")}


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


def check_not_shared(plan: Plan, segments: list[Segment]) -> None:
    """Gradients of a parameter on two ranks would have to be summed after each step."""
    first: dict[int, tuple[str, int]] = {}
    for segment, rank in zip(segments, plan.rank_of, strict=True):
        for name, parameter in segment.named_parameters():
            other, home = first.setdefault(id(parameter), (name, rank))
            if home != rank:
                raise ValueError(
                    f"{other} on rank {home} and {name} on rank {rank} are one parameter; expected parameters that "
                    "belong to one rank. Untie them, or choose sizes that put both on one rank"
                )
