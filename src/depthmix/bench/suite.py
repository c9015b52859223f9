"""What a run of the benchmark consists of: its sizes, its jobs, and the rows made from their results."""

from __future__ import annotations

import platform
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from depthmix.bench.memory import UNAVAILABLE
from depthmix.bench.mixing import MIXING, MIXING_CPU_MS, MIXING_MS
from depthmix.bench.model import Size, options_for, size_for
from depthmix.bench.peers import installed
from depthmix.bench.pipeline import PIPELINE_MIXING, TRANSPORT
from depthmix.bench.processes import Job, merged, run_jobs
from depthmix.bench.read import FORWARD, READ, READ_KEPT
from depthmix.bench.report import BASELINE, KEPT, SOURCES, Report, Row, final_rows, ratio_rows, with_verdicts
from depthmix.bench.wrapped import DECODE, FORWARD_MIXING, STEP_MIXING, model_fields
from depthmix.models import DecoderConfig
from depthmix.ops.attend import dispatch
from depthmix.support.checks import check_range

Part = Literal["read", "mixing", "step", "decode", "values", "loop", "pipeline", "memory", "growth", "hf"]
PARTS: tuple[Part, ...] = typing.get_args(Part)[:-1]  # by default: hf needs an extra
VALUES = ("depth_attention", "value_residual")
FOCUS = ("block_attnres", "attnres")  # where measuring every mechanism would take hours: compiling, growth
# A mechanism's step is bounded in `mixing`: the noise of whole steps is larger than the effects to be distinguished.
BOUNDED = (READ, SOURCES, MIXING, "compiled step", "compiled decode", "value step", "loop", PIPELINE_MIXING, TRANSPORT,
           STEP_MIXING, FORWARD_MIXING, DECODE)  # fmt: skip
UNITS = {READ: "passes", READ_KEPT: "passes", MIXING_MS: "ms", MIXING_CPU_MS: "ms"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    step: Size = Size()
    read: Mapping[str, Any]
    sources: Mapping[str, Any]
    decode: Mapping[str, Any]
    values: Mapping[str, Any]
    pipeline: Size = Size(tokens=512)
    hf: Mapping[str, Any]
    depth: list[Size]
    width: list[Size]

    def to_dict(self) -> dict[str, Any]:
        return {key: dict(value) if isinstance(value, Mapping) else value for key, value in asdict(self).items()}


def decoder(depth: int, **fields: Any) -> dict[str, Any]:
    """Fields of a decoder of `depth` sublayers."""
    config = DecoderConfig.from_depth(depth, **fields).to_dict()
    return {key: config[key] for key in ("vocab_size", "dim", "layers", "heads", "hidden")}


FULL = Sizes(
    read={"sources": 9, "tokens": 4096, "dim": 1024},
    sources={"counts": [8, 16, 32, 64], "tokens": 1024, "dim": 768},
    decode={"model": decoder(24, vocab_size=32_000), "batch": 8, "capacity": 512},
    values={"model": decoder(24), "tokens": 1024},
    hf={"fields": model_fields(dim=768, layers=12, tokens=1024, vocabulary=32_000), "tokens": 1024},
    depth=[size_for(256, depth, 512) for depth in (6, 12, 24, 48)],
    width=[size_for(dim, 12, 512) for dim in (128, 256, 512, 1024)],
)
QUICK = Sizes(
    step=Size(dim=64, depth=6, hidden=128, tokens=64),
    read={"sources": 9, "tokens": 256, "dim": 128},
    sources={"counts": [2, 4], "tokens": 64, "dim": 64},
    decode={"model": decoder(6, vocab_size=64, dim=64), "batch": 2, "capacity": 16},
    values={"model": decoder(4, dim=64), "tokens": 32},
    pipeline=Size(dim=64, depth=8, hidden=128, tokens=32),
    hf={"fields": model_fields(dim=64, layers=2, tokens=32, vocabulary=64), "tokens": 32},
    depth=[size_for(64, depth, 32) for depth in (2, 4)],
    width=[size_for(dim, 2, 32) for dim in (64, 128)],
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    parts: tuple[Part, ...] = PARTS
    mixers: tuple[str, ...]
    focus: tuple[str, ...] = FOCUS  # for compiled steps and growth
    rounds: int = 15
    processes: int = 3
    quick: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        for name, most in (("rounds", 10_000), ("processes", 100)):
            check_range(name, getattr(self, name), 1, most)
        if BASELINE in self.mixers:
            raise ValueError(f"mixers={self.mixers}; expected names other than {BASELINE}, which is always measured")

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL


def run_suite(settings: Settings, bounds: Mapping[str, float], command: str, journal: Path | None = None) -> Report:
    """Everything that was asked for; at quick sizes, whether each part runs and how many bytes it keeps.

    Results of jobs are stored in `journal` until all are complete; those that it already holds are not measured again.
    """
    jobs = timed_jobs(settings)  # all of them once, then all again: a slow hour affects every part alike
    order = jobs * settings.processes + (memory_jobs(settings) if "memory" in settings.parts else [])
    results = run_jobs(order, journal)
    timed = len(jobs) * settings.processes
    rows = timed_rows(merged(results[:timed]), settings, bounds)
    rows += memory_rows(dict(zip([BASELINE, *settings.mixers], results[timed:], strict=False)), settings.sizes.step)
    return Report(
        machine=f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, float32",
        reads=dispatch.describe(),
        command=command,
        rounds=settings.rounds,
        processes=settings.processes,
        quick=settings.quick,
        sizes=settings.sizes.to_dict(),
        notes=installed()[1] if "read" in settings.parts else [],
        rows=final_rows(rows, settings.quick),
    )


def timed_jobs(settings: Settings) -> list[Job]:
    """The jobs of one process of each timed part."""
    sizes, rounds, jobs = settings.sizes, settings.rounds, []
    few = min(rounds, 7)

    def add(label: str, target: str, seconds: float, keep: bool = True, **arguments: Any) -> None:
        arguments = {key: as_json(value) for key, value in arguments.items()}
        guess = 5.0 if settings.quick else seconds * rounds / 15
        jobs.append(Job(label=label, target=f"depthmix.bench.{target}", arguments=arguments, keep=keep, seconds=guess))

    def with_options(names: Iterable[str]) -> dict[str, dict[str, Any]]:
        return {name: options_for(name, sizes.step.depth) for name in names}

    if "read" in settings.parts:
        for group, keep in ((READ, False), (READ_KEPT, True)):
            add(group, "read:run", 100, keep=keep, group=group, rounds=rounds, **sizes.read)
    if "mixing" in settings.parts:
        mixers, seconds = with_options(settings.mixers), 30.0 + 9.0 * (len(settings.mixers) + 1)
        add(MIXING, "mixing:run", seconds, mixers=mixers, size=sizes.step, rounds=rounds)
    if "step" in settings.parts:
        seconds = 60.0 * (len(settings.mixers) + 2)
        add("step", "step:run", seconds, mixers=with_options(settings.mixers), size=sizes.step, rounds=rounds)
        if settings.compiled:
            mixers = with_options(settings.focus)
            add("compiled step", "step:run", 700, mixers=mixers, size=sizes.step, rounds=rounds, compiled=True)
    if "decode" in settings.parts:
        mixers, many = with_options(settings.focus), 4 * rounds  # a step takes milliseconds
        add("decode", "decode:run", 60, mixers=mixers, rounds=many, compiled=False, **sizes.decode)
        if settings.compiled:
            add("compiled decode", "decode:run", 300, mixers=mixers, rounds=many, compiled=True, **sizes.decode)
    if "values" in settings.parts:
        add("values", "decode:run_values", 200, kv_mixers=VALUES, rounds=rounds, **sizes.values)
    if "loop" in settings.parts:
        add("loop", "loop:run", 250, rounds=rounds, **sizes.values)
    if "pipeline" in settings.parts:
        mixers = {name: options_for(name, sizes.pipeline.depth) for name in settings.focus[:1]}
        add("pipeline", "pipeline:run", 400, mixers=mixers, size=sizes.pipeline, rounds=few)
    if "hf" in settings.parts:
        mixers = {name: options_for(name, 2 * sizes.hf["fields"]["num_hidden_layers"]) for name in settings.focus}
        add("hf", "wrapped:run", 400, mixers=mixers, rounds=rounds, **sizes.hf)
    if "growth" in settings.parts:
        add("sources", "growth:run_sources", 60, keep=False, rounds=rounds, **sizes.sources)
        for axis in ("depth", "width"):
            each = {"axis": axis, "sizes": getattr(sizes, axis), "mixers": settings.focus}
            add(axis, "growth:run_sizes", 60, rounds=few, **each)
    return jobs


def memory_jobs(settings: Settings) -> list[Job]:
    """One process per mechanism, once: peaks do not vary as times do."""
    size = settings.sizes.step
    return [
        Job(
            label=f"memory of {name}",
            target="depthmix.bench.memory:run",
            arguments={"mixer": name, "options": options_for(name, size.depth), "size": asdict(size)},
            keep=False,
            seconds=4.0 if settings.quick else 18.0,
        )
        for name in (BASELINE, *settings.mixers)
    ]


def as_json(value: Any) -> Any:
    """Sizes as the objects that JSON can carry."""
    if isinstance(value, list):
        return [as_json(each) for each in value]
    return asdict(value) if isinstance(value, Size) else value


def timed_rows(
    samples: Mapping[str, Mapping[str, list[list[float]]]], settings: Settings, bounds: Mapping[str, float]
) -> list[Row]:
    rows = []
    for group, variants in samples.items():
        part, _, number = group.rpartition(" ")
        at = int(number) if number.isdigit() else None
        part = group if at is None else part
        rows += ratio_rows(
            part,
            variants,
            unit=UNITS.get(part, "×"),
            bounds=bounds if part in BOUNDED else {},
            notes=notes_of(part, settings),
            at=at,
        )
    return with_verdicts([row if "against" not in row.what else as_ratio(row) for row in rows])


def as_ratio(row: Row) -> Row:
    """A row of the read that compares two readers is not a number of passes."""
    return Row(**{**vars(row), "unit": "×"})


def notes_of(part: str, settings: Settings) -> dict[str, str]:
    """What must be known of a variant to read its figure."""
    if part in (READ, READ_KEPT):
        return {f"{label}, {FORWARD}": peer.note for label, (peer, _) in installed()[0].items()}
    if part == MIXING or part.endswith(("step", "forward")):
        given = {name: options_for(name, settings.sizes.step.depth) for name in settings.mixers}
        return {name: " ".join(f"{k}={v}" for k, v in options.items()) for name, options in given.items()}
    return {}


def memory_rows(measured: Mapping[str, Mapping[str, float | None]], size: Size) -> list[Row]:
    """Bytes kept beyond the residual's, the peak, and the peak over the residual's."""
    kept, peak, over = [], [], []
    for name, figures in measured.items():
        extra = (figures["kept"] or 0.0) - (measured[BASELINE]["kept"] or 0.0)
        if name != BASELINE:
            bound = float((size.depth + 2) * size.dim * 4 + 64 * size.depth) if name == "block_attnres" else None
            verdict = "" if bound is None else "holds" if extra <= bound else "fails"
            unit = "bytes/token"
            note = f"{extra / (4 * size.dim):.1f} widths D"
            kept.append(Row(part=KEPT, what=name, figure=extra, unit=unit, bound=bound, verdict=verdict, note=note))
        high, plain = figures["peak"], measured[BASELINE]["peak"]
        note = UNAVAILABLE if high is None else ""
        peak.append(Row(part="peak", what=name, figure=None if high is None else high / 1e6, unit="MB", note=note))
        if name != BASELINE and high is not None and plain:
            over.append(Row(part="peak over the residual's", what=name, figure=high / plain, unit="×"))
    return kept + peak + over
