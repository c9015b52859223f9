"""Pipelines of the library's own `Decoder`: the stages of a rank, and a step by a named schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from depthmix.models import DecoderConfig, Segment
from depthmix.parallel.plan import Plan
from depthmix.parallel.scheduled import ScheduledStages, cached_stages
from depthmix.parallel.schedules import check_schedule
from depthmix.parallel.stage_module import StageModule


def build_stages(config: DecoderConfig, plan: Plan, cache: bool, rank: int) -> list[tuple[int, StageModule]]:
    """The stages of a rank and their indices: each holds a `Segment` of the decoder as `part`.

    Only this rank's parameters are made, on the current default device. Initialise them with
    `stage.part.reset_parameters(seed)`: parameters of one name then start alike on all ranks.

    Args:
        config, plan: the decoder, and its `decoder_plan`.
        cache: whether ranks keep what they have; False sends the whole state at every cut.
        rank: rank in the pipeline.
    """
    bounds = [*itertools.pairwise(plan.bounds)]
    own = [s for s in range(plan.count) if plan.rank_of[s] == rank]
    return [(s, StageModule(Segment(config, *bounds[s]), s, plan, cache)) for s in own]


def tie(parts: Sequence[Segment]) -> None:
    """Make parameters of one name in several parts of a rank one parameter: of looped layers, shared mixers and a tied
    embedding.

    Modules are shared, or the dictionaries of their parameters, so that later casts and moves keep them together; but
    call it after `to_empty`, which would empty what is shared twice, initialised buffers included. FSDP2 cannot wrap
    what two stages share: there, leave the copies and let `SharedParameters` sum their gradients.
    """
    first: dict[str, nn.Module] = {}
    for part in parts:
        if part.embed is not None:
            part.embed = first.setdefault("embed", part.embed)
        for number, sublayer in part.sublayers.items():
            part.sublayers[number] = first.setdefault(f"sublayers.{number}", sublayer)
        for kind, stack, registered in (
            ("depth", part.depth, part.depth.mixers),
            ("kv_mixers", part.kv_mixers, part.kv_mixers),
        ):
            runs = [] if isinstance(stack, nn.ModuleList) else [(stack.names[i], m) for i, m in stack.runs.items()]
            for name, mixer in (*registered.named_children(), *runs):  # each execution has a mixer object of its own
                owner = first.setdefault(f"{kind}.{name}", mixer)
                for entries in ("_parameters", "_buffers", "_modules"):
                    mixer.__dict__[entries] = owner.__dict__[entries]


class DecoderPipeline(ScheduledStages):
    """A decoder cut into stages, trained by a schedule of torch.distributed.pipelining.

    Args:
        stages: those of this rank, as `build_stages` gives them; initialised, on `device`, and wrapped if at all.
        schedule, microbatches: as in `Pipeline`.
        device: where this rank's stages and their buffers are.
        group: the processes of the pipeline, in the order of the plan's ranks; by default all.
    """

    def __init__(
        self,
        stages: Sequence[tuple[int, StageModule]],
        *,
        schedule: str,
        microbatches: int,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        modules = [module for _, module in stages]
        plan = modules[0].plan
        check_schedule(schedule, plan, microbatches)
        own = cached_stages(modules, plan, device, group)
        super().__init__(own, plan, lambda loss, tokens: loss, schedule, microbatches)  # the last part's output

    def step(self, tokens: Tensor) -> Tensor | None:
        """Forward and backward of a batch [B, T]: adds to the gradients of this rank's parameters.

        Every rank passes the same tokens, whose rows are the micro-batches one after another. Returns the mean of the
        micro-batches' losses (with auxiliary losses, as `Decoder.loss`) where the last stage is, None on other ranks.
        With tensor parallelism it is this rank's share, and the shares sum to the loss. Gradients of parameters that
        several ranks hold are not summed yet: see `SharedParameters`.
        """
        self.check_tokens(tokens)
        return self.run_tokens(tokens, backward=True)

    def evaluate(self, tokens: Tensor) -> Tensor | None:
        """The mean loss of a batch without gradients and without auxiliary losses; returned as by `step`.

        The number of rows is that of a step (the plan's rows · `microbatches`) or any multiple of it.
        """
        self.check_tokens(tokens, multiple=True)
        losses = [self.run_tokens(rows, backward=False) for rows in tokens.split(self.rows)]
        return torch.stack([loss for loss in losses if loss is not None]).mean() if self.is_last else None

    def run_tokens(self, tokens: Tensor, backward: bool) -> Tensor | None:
        given = {"tokens": tokens} if self.is_last else {}
        return self.run(tokens, tokens, backward=backward, length=tokens.shape[1], **given)

    def check_tokens(self, tokens: Tensor, multiple: bool = False) -> None:
        self.check_rows("tokens", tokens, multiple)
        shares = self.stages[0].submod.part.shard.ranks
        if -(-tokens.shape[1] // shares) != self.plan.shape[1]:
            held = f", of which each of {shares} ranks holds a share" if shares > 1 else ""
            raise ValueError(
                f"rows of {tokens.shape[1]} tokens{held}; the plan is for {self.plan.shape[1]} tokens of a row per "
                f"rank. Make it with tokens={tokens.shape[1]}"
            )
