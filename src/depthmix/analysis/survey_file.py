"""The result of a survey and its two files: tensors beside their figures as JSON.

Axes: n = L + 1 rows and columns of M, G group of channels, H head of the weights, C source, Q quantile, K key-value
head, N attention layer, T' token of the table.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from depthmix.analysis.trace import SUMMARY
from depthmix.support.files import read_object, read_tensors, replacing, write_text

FORMAT = 1
TENSORS_FILE, FIGURES_FILE = "trace.safetensors", "trace.json"
MARK = "depthmix.survey"  # in the metadata of the tensors: which figures belong to them
AGAIN = "Make it again with `depthmix trace`"
NEEDED = (
    "depthmix",
    "mechanism",
    "options",
    "kv_mechanism",
    "kind",
    "summary",
    "depth",
    "kinds",
    "channels",
    "text",
    "tokens",
    "loss",
    "samples",
    "histogram",
    "source_names",
    "reads",
    "partial",
    "shares_of",
    "rows",
    "sinks",
    "rank",
    "effective_rank",
    "magnitudes",
    "table",
    "finite",
)


@dataclass(repr=False)
class Survey:
    """Statistics of a model's reads over a text.

    figures: the content of trace.json.
    tensors: those of trace.safetensors by name: M_mean, M_std [G, n, n], M_quantiles [Q, G, n, n], contribution and
        share [n, n], table_M [T', G, n, n]; if the mechanism weights a list of sources weights_mean, weights_std
        [H, n, C] and table_weights [T', H, n, C]; if attention mixes values over depth values_mean [K, N, N].
    """

    figures: dict[str, Any]
    tensors: dict[str, Tensor]

    def __repr__(self) -> str:
        figures = self.figures
        return f"Survey({figures['mechanism']}, {figures['depth']} sublayers, {figures['tokens']:,} tokens)"

    def __getitem__(self, name: str) -> Tensor:
        """A tensor by its name."""
        if name not in self.tensors:
            raise KeyError(f"this survey has no {name}; it has {', '.join(sorted(self.tensors))}")
        return self.tensors[name]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write trace.safetensors and trace.json; older ones stay intact until the new ones are complete."""
        from safetensors.torch import save_file

        tensors = {name: t.float().contiguous() for name, t in self.tensors.items()}
        with replacing(Path(folder) / TENSORS_FILE) as part:
            save_file(tensors, part, {MARK: identity(self.figures)})
        write_text(Path(folder) / FIGURES_FILE, json.dumps(self.figures, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Survey:
        figures_path, tensors_path = Path(folder) / FIGURES_FILE, Path(folder) / TENSORS_FILE
        for path in (figures_path, tensors_path):
            if not path.is_file():
                raise FileNotFoundError(f"no {path}; expected the two files of `depthmix trace`. {AGAIN}")
        figures = read_object(figures_path, AGAIN)
        check_figures(figures, figures_path)
        tensors, metadata = read_tensors(tensors_path, AGAIN)
        if MARK not in metadata:
            raise ValueError(f"{tensors_path} is a safetensors file but not one of `depthmix trace`. {AGAIN}")
        if metadata[MARK] != identity(figures):
            raise ValueError(f"{tensors_path} and {figures_path} are of different traces. {AGAIN}")
        check_shapes(figures, tensors, tensors_path)
        return cls(figures, tensors)


def identity(figures: dict[str, Any]) -> str:
    """What the two files of one trace have in common."""
    return json.dumps([figures[name] for name in ("mechanism", "depth", "tokens", "text", "loss")])


def check_figures(figures: dict[str, Any], path: Path) -> None:
    number = figures.get("format")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{path} has format {number!r}; expected {FORMAT}: it is not a trace. {AGAIN}")
    if number > FORMAT:
        raise ValueError(
            f"{path} has format {number}, written by depthmix {figures.get('depthmix', '(a later version)')}; this "
            f"version reads format {FORMAT}. Install a newer depthmix"
        )
    if missing := [name for name in NEEDED if name not in figures]:
        raise ValueError(f"{path} is damaged: it has no {', '.join(missing)}. {AGAIN}")
    if figures["kind"] not in SUMMARY:
        raise ValueError(f"{path} has kind {figures['kind']!r}; expected one of {', '.join(SUMMARY)}. {AGAIN}")
    if not isinstance(figures["depth"], int) or figures["depth"] < 1 or not isinstance(figures["mechanism"], str):
        wrong = f"mechanism {figures['mechanism']!r} and depth {figures['depth']!r}"
        raise ValueError(f"{path} has {wrong}; expected a name and a number of sublayers. {AGAIN}")


def check_shapes(figures: dict[str, Any], tensors: dict[str, Tensor], path: Path) -> None:
    """Raise an error unless every tensor is there and fits the figures; -1 stands for any number, the same in all."""
    try:
        n, c = figures["depth"] + 1, len(figures["source_names"])
        kept, quantiles = len(figures["table"]["ids"]), len(figures["histogram"]["quantiles"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path.parent / FIGURES_FILE} is damaged: {type(error).__name__} {error}. {AGAIN}") from error
    wanted: dict[str, tuple[Any, ...]] = {
        "M_mean": ("G", n, n),
        "M_std": ("G", n, n),
        "M_quantiles": (quantiles, "G", n, n),
        "contribution": (n, n),
        "share": (n, n),
        "table_M": (kept, "G", n, n),
    }
    if c:
        wanted |= {"weights_mean": ("H", n, c), "weights_std": ("H", n, c), "table_weights": (kept, "H", n, c)}
    if figures["kv_mechanism"] is not None:
        wanted["values_mean"] = ("K", "N", "N")
    if set(tensors) != set(wanted):
        names = ", ".join(sorted(set(tensors) ^ set(wanted)))
        raise ValueError(f"{path} is damaged: expected the tensors {', '.join(wanted)}; these differ: {names}. {AGAIN}")
    sizes: dict[str, int] = {}
    for name, shape in wanted.items():
        got = tuple(tensors[name].shape)
        fits = len(got) == len(shape) and all(
            size == (sizes.setdefault(axis, size) if isinstance(axis, str) else axis)
            for axis, size in zip(shape, got, strict=True)
        )
        if not fits or not tensors[name].is_floating_point():
            expected = ", ".join(str(sizes.get(axis, axis)) for axis in shape)
            raise ValueError(
                f"{path} is damaged: {name} is {tensors[name].dtype} {list(got)}; expected floats [{expected}]. {AGAIN}"
            )


def plain(content: Any) -> tuple[Any, bool]:
    """`content` for JSON, with None for numbers that are not finite, and whether all were finite."""
    if isinstance(content, float):
        return (content, True) if math.isfinite(content) else (None, False)
    if isinstance(content, dict):
        parts = {str(name): plain(part) for name, part in content.items()}
        return {name: part for name, (part, _) in parts.items()}, all(clean for _, clean in parts.values())
    if isinstance(content, (list, tuple)):
        members = [plain(part) for part in content]
        return [part for part, _ in members], all(clean for _, clean in members)
    return content, True
