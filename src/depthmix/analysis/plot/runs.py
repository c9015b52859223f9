"""The numbers of a run's folder that are drawn over depth and over training, from its metrics.jsonl.

Axes: R recording, L sublayers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from depthmix.support.checks import user_path
from depthmix.support.files import read_text

Folder: TypeAlias = "str | os.PathLike[str]"
METRICS = "metrics.jsonl"
REMEDY = "Restore the file, or train the run again"
SERIES = {  # of a line of kind "depth": its name on an axis
    "state_norm": "norm of the state",
    "output_norm": "norm of the output",
    "gradient_norm": "norm of the output's gradient",
    "read_norm": "norm of the read",
    "read_gradient_norm": "norm of the read's gradient",
    "contribution": "norm of output / norm of state",
    "stream_distance": "distance between streams",
    "weight_entropy": "entropy of the shares (nats)",
    "weight_spread": "spread of the shares over tokens",
    "locality": "share of the newest source",
    "embedding_share": "share of the embedding",
}
NORMS = ("state_norm", "output_norm", "gradient_norm", "read_norm", "read_gradient_norm", "contribution")
OF_READERS = ("read_norm", "read_gradient_norm", "weight_entropy", "weight_spread", "locality", "embedding_share")


def run_lines(folder: Folder, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind. A last line that was cut, by a run that is being written or was killed, is left out."""
    path = user_path(folder) / METRICS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {METRICS}; expected the folder of a run, as depthmix train makes it")
    *whole, last = read_text(path, REMEDY).split("\n")
    objects = [parse(path, number, line) for number, line in enumerate(whole, 1)]
    with suppress(json.JSONDecodeError):
        objects.append(json.loads(last or "null"))
    return [line for line in objects if isinstance(line, dict) and line.get("kind") == kind]


def parse(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line or "null")
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}, is damaged: it is not valid JSON ({error}). {REMEDY}") from error


def depth_lines(folder: Folder, series: str) -> list[dict[str, Any]]:
    """The recordings that have the series."""
    lines = run_lines(folder, "depth")
    if not lines:
        raise ValueError(
            f"{folder} has no recordings over depth; train with run.depth_every above 0 (--set run.depth_every=N)"
        )
    kept = [line for line in lines if known(line.get(series))]
    if not kept:
        raise ValueError(f"the recordings of {folder} have no {series}; {others(lines[-1])}")
    return kept


def others(line: Mapping[str, Any]) -> str:
    """What can be drawn instead, for an error."""
    return f"they have {', '.join(name for name in SERIES if known(line.get(name))) or 'nothing that is drawn'}"


def known(values: Any) -> bool:
    return isinstance(values, list) and any(value is not None and value != [] for value in values)


def numbers(values: Sequence[Any]) -> list[float]:
    """One number for each sublayer: of several streams their root mean square; NaN where there is none."""
    return [number(value) for value in values]


def number(value: Any) -> float:
    """Numbers that were not finite are texts in metrics.jsonl."""
    if isinstance(value, list):
        return math.sqrt(math.fsum(number(v) ** 2 for v in value) / len(value)) if value else math.nan
    return math.nan if value is None else float(value)
