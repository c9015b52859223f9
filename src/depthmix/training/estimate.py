"""Roughly how long training takes on this machine, before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from depthmix.models import DecoderConfig
from depthmix.parallel import ranks
from depthmix.support.checks import check_device
from depthmix.training.config import TrainConfig
from depthmix.training.flops import flops_per_token
from depthmix.training.precision import check_precision

EFFICIENCY = 0.25  # a step's FLOPs per second over those of its products: 0.2 to 0.4 on two cores, widths of 64 to 512
SECONDS = 0.05  # of measuring
LARGEST = 4096  # of a dimension: larger products are no faster


def estimate_seconds(config: TrainConfig) -> Callable[[int], float]:
    """A function that takes a number of steps and returns seconds, right to within a factor of about two."""
    step = flops_per_token(config.model, config.data.tokens_per_row) * config.tokens_per_step
    rate = EFFICIENCY * ranks.launched() * product_flops_per_second(config)
    return lambda steps: steps * step / rate


def product_flops_per_second(config: TrainConfig) -> float:
    """Of the widest product of a sublayer, on the run's device and in its precision; the best of several."""
    device = check_device(config.run.device)
    check_precision(config.run.precision, device)
    model = config.model
    dim = min(model.dim, LARGEST)
    hidden = min(model.hidden if isinstance(model, DecoderConfig) else 4 * model.dim, LARGEST)
    dtype = getattr(torch, config.run.precision)
    tokens = min(config.data.rows * config.data.tokens_per_row, LARGEST)
    x = torch.ones(tokens, dim, device=device, dtype=dtype)
    weight = torch.ones(dim, hidden, device=device, dtype=dtype)
    flops, best, begun = 2 * tokens * dim * hidden, float("inf"), time.perf_counter()
    while time.perf_counter() - begun < SECONDS or best == float("inf"):
        started = time.perf_counter()
        x @ weight
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return flops / best
