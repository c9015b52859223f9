"""The stages of a rank, run by a named schedule: what pipelines of all networks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from depthmix.parallel.plan import Plan
from depthmix.parallel.schedules import RULES
from depthmix.parallel.stage import CachedStage
from depthmix.parallel.stage_module import StageModule
from depthmix.parallel.store import Store


def pipeline_rank(plan: Plan, group: dist.ProcessGroup | None) -> int:
    """The rank of this process in the plan, which is its rank in the process group."""
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
    return rank


def cached_stages(
    modules: Sequence[StageModule], plan: Plan, device: torch.device | str, group: dist.ProcessGroup | None
) -> list[CachedStage]:
    """The stages of this rank, which share a store."""
    rank = pipeline_rank(plan, group)
    indices, wanted = [m.index for m in modules], [s for s in range(plan.count) if plan.rank_of[s] == rank]
    if indices != wanted:
        raise ValueError(f"rank {rank} got stages {indices}; expected {wanted}, as the plan places them")
    store = Store(modules[0].transport.readers(rank, plan.rank_of))
    return [CachedStage(module, store, torch.device(device), group) for module in modules]


class ScheduledStages:
    """The stages of this rank and a schedule of torch.distributed.pipelining.

    Args:
        stages: from `stages` or `cached_stages`.
        loss: from the output and the target of a micro-batch to their mean loss.
        schedule, microbatches: as `check_schedule` allows them for the plan.
    """

    def __init__(
        self,
        stages: list[CachedStage],
        plan: Plan,
        loss: Callable[[Tensor, Tensor], Tensor],
        schedule: str,
        microbatches: int,
    ) -> None:
        if RULES[schedule].splits_backward:
            check_not_compiled(schedule, stages)
        self.stages, self.plan, self.microbatches = stages, plan, microbatches
        self.is_first, self.is_last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))
        make: Any = get_schedule_class(schedule)
        # The loss is scaled and not the gradients: torch would divide twice what two stages of a rank share.
        self.schedule = make(
            stages[0] if issubclass(make, PipelineScheduleSingle) else stages,
            n_microbatches=microbatches,
            loss_fn=lambda output, target: loss(output, target) / microbatches,
            scale_grads=False,
        )

    @property
    def rows(self) -> int:
        """The number of rows of a step."""
        return self.plan.shape[0] * self.microbatches

    def check_rows(self, name: str, tensor: Tensor, multiple: bool = False) -> None:
        if len(tensor) != self.rows and not (multiple and len(tensor) and len(tensor) % self.rows == 0):
            raise ValueError(
                f"{name} has {len(tensor)} rows; expected {'a multiple of ' if multiple else ''}{self.rows}: "
                f"{self.microbatches} micro-batches of {self.plan.shape[0]}, as in the plan"
            )

    def run(self, x: Tensor, target: Tensor, *, backward: bool, **shared: Any) -> Tensor | None:
        """The mean loss of the micro-batches where the last stage is; None on other ranks."""
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": target, "losses": losses} if self.is_last else {}
        with nullcontext() if backward else torch.no_grad():
            run = self.schedule.step if backward else self.schedule.eval
            run(*([x] if self.is_first else []), return_outputs=False, **given, **shared)
        if entries := len(self.store):
            raise RuntimeError(f"{entries} entries are left in the store after a step; expected none")
        if not backward:
            self.release()
        return torch.stack(losses).sum().detach() if self.is_last else None

    def release(self) -> None:
        """Free what the backward pass would have freed: outputs of micro-batches, and what FSDP2 has gathered."""
        for stage in self.stages:
            stage.clear_runtime_states()
            for module in stage.submod.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @property
    def store(self) -> Store:
        """What this rank keeps for its stages; empty between steps."""
        return self.stages[0].store

    def modules(self) -> list[nn.Module]:
        """The parts of the network that this rank's stages run."""
        return [stage.submod.part for stage in self.stages]

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


def check_not_compiled(schedule: str, stages: Sequence[CachedStage]) -> None:
    for stage in stages:
        for name, module in stage.submod.part.named_modules():
            if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
                raise ValueError(
                    f"schedule {schedule!r} with a compiled module, {name}; expected modules that are not compiled: "
                    "the schedule computes the gradients of inputs before those of weights, and a compiled module "
                    "computes both at once. Use schedule='Interleaved1F1B', or do not compile"
                )
