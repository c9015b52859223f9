"""Parts of every page of a study, in Markdown: how the runs were made, learning rates, tables, figures."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from depthmix.studies.comparison_figures import Sweeps
from depthmix.studies.study import Study, best_rate, describe_settings

CAPTIONS = {
    "tokens": "Loss against tokens",
    "seconds": "Loss against wall-clock time",
    "differences": "Paired differences of the final loss",
    "learning_rates": "Learning rates",
    "depth": "Magnitudes over depth",
    "scaling": "Loss against compute",
}


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How the runs were made, as reported on the page and in the JSON file."""

    command: str
    machine: str
    data: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)  # by run: the reason why it has no result


def describe_study(study: Study, **more: Any) -> Provenance:
    first = study.arms[0].config
    data = f"{first.data.source}, tokens {first.data.tokenizer}, digest {study.corpus.digest[:12]}"
    return Provenance(
        command=shlex.join(["depthmix", *sys.argv[1:]]),
        machine=f"{platform.system()} {platform.machine()}, {first.run.device}, torch {torch.__version__}",
        data=data,
        settings=describe_settings(study, **more),
        failures={label: why.replace(f"{study.folder}/", "") for label, why in study.failures.items()},
    )


def sweep_table(sweeps: Sweeps) -> list[str]:
    lrs = sorted({lr for losses in sweeps.values() for lr in losses})
    cells = []
    for arm, losses in sweeps.items():
        best = best_rate(losses)
        cells.append([arm, *(sweep_cell(losses, lr, best) for lr in lrs)])
    return [
        "Final validation loss of short runs with one seed; each arm then uses its best learning rate (bold).",
        "",
        *markdown_table(["arm", *(f"{lr:g}" for lr in lrs)], cells),
    ]


def sweep_cell(losses: Mapping[float, float | None], lr: float, best: float | None) -> str:
    if lr not in losses:
        return ""
    loss = losses[lr]
    return "failed" if loss is None else f"**{loss:.4f}**" if lr == best else f"{loss:.4f}"


def edge_notes(sweeps: Sweeps) -> list[str]:
    """If the best learning rate is the lowest or highest that was tried, a better one may lie beyond it."""
    at_edge = [
        arm for arm, losses in sweeps.items() if len(losses) > 1 and best_rate(losses) in (min(losses), max(losses))
    ]
    if not at_edge:
        return []
    return [
        "",
        f"The best learning rate is the lowest or highest that was tried for {', '.join(at_edge)}: try rates beyond.",
    ]


def provenance_lines(provenance: Provenance) -> list[str]:
    lines = ["", "## How it was made", "", f"{provenance.machine}. Data: {provenance.data}."]
    lines += ["", *(f"- {name}: {value}" for name, value in provenance.settings.items())]
    if provenance.failures:
        lines += ["", "Runs without a result:", "", *(f"- {run}: {why}" for run, why in provenance.failures.items())]
    return lines


def markdown_table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """A table without its empty columns."""
    shown = [k for k in range(len(headings)) if any(row[k] for row in cells)]
    lines = ["| " + " | ".join(headings[k] for k in shown) + " |", "|" + "---|" * len(shown)]
    return lines + ["| " + " | ".join(row[k] for k in shown) + " |" for row in cells]


def figure_lines(figures: Mapping[str, Path], name: str, page_folder: Path) -> list[str]:
    if name not in figures:
        return []
    link = Path(os.path.relpath(figures[name], page_folder)).as_posix()
    return ["", f"![{CAPTIONS[name]}]({link})"]
