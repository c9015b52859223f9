"""A run in plain numbers: what it is, what it reached, what it cost, and hashes that identify it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from depthmix.analysis.evidence import number
from depthmix.report.reading import DAMAGE, SavedRun
from depthmix.support.files import read_object
from depthmix.support.terminal import format_duration
from depthmix.training import read_config
from depthmix.training.build import check_functions
from depthmix.training.manifest import STATE, list_checkpoints


def facts(run: SavedRun) -> list[tuple[str, str]]:
    """Labels and values, of those that are known."""
    result, validations = run.result or {}, run.of_kind("validation")
    data, optimizer, section = (run.section(name) for name in ("data", "optimizer", "run"))
    last: Mapping[str, Any] = validations[-1] if validations else {}
    loss = number(result.get("validation_loss", last.get("loss")))
    bits = number(result.get("bits_per_byte", last.get("bits_per_byte")))
    given: list[tuple[str, str | None]] = [
        ("validation loss", form(loss, "{:.4f} nats per token")),
        ("bits per byte", form(bits, "{:.4f}")),
        ("parameters", count(result.get("parameters"))),
        ("tokens", count(result.get("tokens", last.get("tokens")))),
        ("steps", count(result.get("steps", last.get("step")))),
        ("learning rate", form(number(optimizer.get("lr")), "{:g}")),
        ("optimizer", text(optimizer.get("name"))),
        ("rows × context", pair(data.get("rows"), data.get("tokens_per_row"))),
        ("micro-batches per step", count(section.get("accumulate"))),
        ("data", text(data.get("source"))),
        ("tokenizer", text(data.get("tokenizer"))),
        ("device, precision", ", ".join(filter(None, [text(section.get("device")), text(section.get("precision"))]))),
    ]
    steps = len(run.of_kind("skipped"))
    given += [("skipped steps", str(steps) if steps else None), *costs(result)]
    return [(label, value) for label, value in given if value]


def costs(result: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    flops, tokens = number(result.get("flops")), number(result.get("tokens"))
    seconds, memory = number(result.get("seconds")), number(result.get("peak_memory_bytes"))
    recording = number(result.get("recording_seconds")) / (number(result.get("processor_seconds")) or math.nan)
    return [
        ("FLOPs of the run", form(flops, "{:.3g}")),
        ("FLOPs per token", form(flops / tokens if tokens > 0 else math.nan, "{:.3g}")),
        ("tokens/s", form(number(result.get("tokens_per_second")), "{:,.0f}")),
        ("training time", format_duration(seconds) if 0 <= seconds < 1e12 else None),
        ("peak memory", form(memory / 2**20, "{:,.0f} MiB")),
        ("recording over depth", form(recording, "{:.2%} of the processor time")),
    ]


def form(value: float, template: str) -> str | None:
    return template.format(value) if math.isfinite(value) else None


def count(value: Any) -> str | None:
    return form(number(value), "{:,.0f}")


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def pair(first: Any, second: Any) -> str | None:
    return f"{first} × {second}" if isinstance(first, int) and isinstance(second, int) else None


def hashes(run: SavedRun) -> dict[str, str | None]:
    """Digests of the configuration and the data, and SHA-256 of the final weights; None where one is not known."""
    result = run.result or {}
    return {
        "config": text(result.get("config_digest")) or config_digest(run),
        "data": text(result.get("data_digest")) or corpus_of_checkpoint(run),
        "weights": run.weights,
    }


def config_digest(run: SavedRun) -> str | None:
    """Of an unfinished run, if this version can read its configuration without importing functions of others."""
    try:
        check_functions(run.folder / "config.toml")
        return read_config(run.folder).digest
    except DAMAGE:
        return None


def corpus_of_checkpoint(run: SavedRun) -> str | None:
    saved = list_checkpoints(run.folder / "checkpoints")
    try:
        return text(read_object(saved[-1] / STATE, "").get("corpus")) if saved else None
    except DAMAGE:
        return None
