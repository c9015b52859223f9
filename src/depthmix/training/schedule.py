"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from depthmix.training.config import ScheduleConfig


def rate_factor(step: int, steps: int, schedule: ScheduleConfig) -> float:
    """The learning rate of step `step` (0 … steps − 1), as a share of the highest."""
    warmup = round(schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule.kind == "cosine":
        progress = (step - warmup) / max(1, steps - 1 - warmup)
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    decay = round(schedule.decay * steps)
    remaining = (steps - 1 - step) / decay if decay else 1.0
    return schedule.final + (1 - schedule.final) * min(1.0, remaining)
