"""The real decoder: a decode step with cache and head, and a training step whose attention mixes values over depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from depthmix.bench.processes import stopwatch
from depthmix.bench.report import BASELINE
from depthmix.bench.step import Options, compiler_options, ratios, with_control
from depthmix.inference import PreallocatedCache
from depthmix.models import Choice, Decoder, DecoderConfig
from depthmix.support.terminal import format_duration, say


def run(
    mixers: Mapping[str, Options], model: Mapping[str, Any], batch: int, capacity: int, rounds: int, compiled: bool
) -> dict[str, dict[str, list[float]]]:
    """One new token for each of `batch` sequences, in a preallocated cache that is three quarters full."""
    plain = Decoder(DecoderConfig(**model)).eval()
    timed: dict[str, Callable[[], None]] = {}
    for name, options in {BASELINE: {}, **mixers}.items():
        decoder = (
            plain
            if name == BASELINE
            else sharing(plain, DecoderConfig(**model, mixer=Choice.of({"name": name, **options})))
        )
        timed[name] = make_decode(decoder, name, batch, capacity, compiled)
    label = "compiled decode" if compiled else "decode"
    return {label: ratios(with_control(timed), rounds, label)}


def make_decode(model: Decoder, name: str, batch: int, capacity: int, compiled: bool) -> Callable[[], None]:
    cache = PreallocatedCache(model.config, batch, capacity)
    full = 3 * capacity // 4
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model(torch.randint(model.config.vocab_size, (batch, full), generator=generator), cache=cache, last_only=True)
    cache.mark()
    call: Any = torch.compile(model, fullgraph=True, dynamic=False, **compiler_options()) if compiled else model
    token = torch.randint(model.config.vocab_size, (batch, 1), generator=generator)

    def decode() -> None:
        with torch.no_grad():
            cache.rewind(full)
            call(token, cache=cache)

    if compiled:
        say(f"  compiling a decode step of {name} …")
        with stopwatch() as took:
            decode()
        say(f"  compiled in {format_duration(took())}")
    return decode


def run_values(
    kv_mixers: tuple[str, ...], model: Mapping[str, Any], tokens: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """A training step, forward and backward, with values mixed over depth, over one without."""
    plain = Decoder(DecoderConfig(**model))
    row = torch.randint(plain.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    timed: dict[str, Callable[[], None]] = {}
    for name in (BASELINE, *kv_mixers):
        decoder = plain if name == BASELINE else sharing(plain, DecoderConfig(**model, kv_mixer=Choice.of(name)))
        timed[name] = make_step(decoder, row)
    return {"value step": ratios(with_control(timed), rounds, "value step")}


def make_step(model: Decoder, row: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.loss(row).backward()

    return step


def sharing(plain: Decoder, config: DecoderConfig) -> Decoder:
    """A decoder with the weights of another: they differ in their mixers only."""
    with torch.device("meta"):
        model = Decoder(config)
    model.depth.to_empty(device="cpu")
    model.kv_mixers.to_empty(device="cpu")
    for part in ("embed", "sublayers", "norm", "head"):
        setattr(model, part, getattr(plain, part))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.depth.reset_parameters()
        for mixer in model.kv_mixers:
            mixer.reset_parameters()  # type: ignore[operator]
        for parameter in model.depth.parameters():  # away from the start, where products with zeros may be faster
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.train(plain.training)
