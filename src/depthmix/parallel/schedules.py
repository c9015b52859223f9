"""The schedules of torch.distributed.pipelining: which plans and numbers of micro-batches each can run."""

from __future__ import annotations

from dataclasses import dataclass

from depthmix.parallel.plan import Placement, Plan
from depthmix.support.checks import check_option, check_range, did_you_mean


@dataclass(frozen=True)
class Rule:
    """What a schedule needs: stages per rank, their placement, and micro-batches."""

    virtual: range
    placement: Placement = "loop"
    as_many_as_stages: bool = False
    in_rounds: bool = False
    other: str = ""  # what to use where the number of stages per rank does not fit
    splits_backward: bool = False  # gradients of inputs first, those of weights later


MANY = range(2, 2**20)
RULES = {
    "GPipe": Rule(range(1, 2), other="LoopedBFS"),
    "1F1B": Rule(range(1, 2), as_many_as_stages=True, other="Interleaved1F1B"),
    "Interleaved1F1B": Rule(MANY, in_rounds=True, other="1F1B"),
    "LoopedBFS": Rule(MANY, other="GPipe"),
    "InterleavedZeroBubble": Rule(range(1, 2**20), in_rounds=True, splits_backward=True),
    "ZBVZeroBubble": Rule(range(2, 3), placement="v", other="InterleavedZeroBubble", splits_backward=True),
    "DualPipeV": Rule(
        range(2, 3), placement="v", as_many_as_stages=True, other="InterleavedZeroBubble", splits_backward=True
    ),
}


def check_schedule(name: str, plan: Plan, microbatches: int) -> None:
    """Raise an error unless the schedule can run the plan with this number of micro-batches."""
    if name not in RULES:
        raise ValueError(f"unknown schedule {name!r}. {did_you_mean(name, RULES)}Known: {', '.join(RULES)}")
    rule = RULES[name]
    if plan.virtual not in rule.virtual:
        least, most = rule.virtual[0], rule.virtual[-1]
        want = f"at least {least}" if most > 2 else f"{least}"
        raise ValueError(
            f"schedule {name!r} with a plan of virtual={plan.virtual} (stages per rank); expected {want}. Make it "
            f"with virtual={least}, or use schedule={rule.other!r}"
        )
    if plan.placement != rule.placement:
        raise ValueError(
            f"schedule {name!r} with a plan of placement={plan.placement!r}; expected {rule.placement!r}: the schedule "
            "decides which rank runs which stage. Make the plan with this placement"
        )
    check_option("microbatches", microbatches, int)
    check_range("microbatches", microbatches, 1)
    if rule.as_many_as_stages and microbatches < plan.count:
        raise ValueError(
            f"microbatches={microbatches}; schedule {name!r} needs at least as many as stages, {plan.count}"
        )
    rounds = microbatches // plan.ranks
    if rule.in_rounds and rounds and microbatches % rounds:
        raise ValueError(
            f"microbatches={microbatches} with {plan.ranks} ranks; schedule {name!r} runs {rounds} rounds, which must "
            f"divide it. Use a multiple of the ranks, such as {rounds * plan.ranks} or {(rounds + 1) * plan.ranks}"
        )
