"""`depthmix scaling`: how the loss of each mechanism falls with compute."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from depthmix.cli.shared import Backbone, Data, can_draw, flag, print_ending, print_points, resumable, switch
from depthmix.cli.study_options import STUDY_BACKBONE, Runs, StudyOutput, make_grid, run_arms
from depthmix.studies import Size, Study, make_arms
from depthmix.studies.arms import per_parameter
from depthmix.studies.page import describe_study
from depthmix.studies.publish import check_target, write_study
from depthmix.studies.published import describe_regime, find_published
from depthmix.studies.scaling_page import (
    Scaling,
    console_laws,
    draw_scaling,
    fit_scaling,
    read_points,
    render,
    verdict_lines,
)
from depthmix.support.terminal import print_table

EXAMPLES = (
    "depthmix scaling --sizes 2 4 --tokens 1e4 -s run.validate_batches=2",
    "depthmix scaling --sizes 2 4 --tokens 1e4 -s run.validate_batches=2 --json",
)


@dataclass(frozen=True, kw_only=True)
class Arms:
    mixers: Annotated[tuple[str, ...], flag("Mechanisms; the first is the baseline.", "NAME ...")] = (
        *("residual", "block_attnres"),
    )
    sizes: Annotated[
        tuple[str, ...],
        flag("Depths in sublayers (the width follows), or DEPTHxDIM; use at least three for an interval.", "SIZE ..."),
    ] = ("4", "6", "8", "12")
    backbone: Annotated[Backbone, STUDY_BACKBONE] = "qwen3"


@dataclass(frozen=True, kw_only=True)
class Training(Runs):
    seeds: Annotated[int, flag("Runs of each arm and size; the law is fitted to their means.", "N")] = 1
    tokens_per_parameter: Annotated[
        float, flag("Length of a run, per parameter of its size's baseline without embeddings.", "TOKENS")
    ] = 20
    tokens: Annotated[
        float | None, flag("Instead of --tokens-per-parameter: the same number for every size.", "TOKENS", default="")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Fit:
    irreducible: Annotated[
        bool,
        switch("Also fit an irreducible loss, which no compute removes; use at least four sizes for an interval."),
    ] = False
    beside: Annotated[
        str | None,
        flag("Draw and list the points and laws of a paper beside yours, never as part of a fit: attnres-paper.",
             "NAME", default=""),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Output(StudyOutput):
    folder: Annotated[Path, flag("Folder of the study.", "FOLDER")] = Path("studies/scaling")


def run(
    *,
    arms: Arms = Arms(),
    data: Data = Data(),
    training: Training = Training(),
    fit: Fit = Fit(),
    output: Output = Output(),
) -> int:
    """Fit a scaling law to each mechanism and say what it is worth in compute.

    Several sizes of each mechanism are trained, and L = a C^(−b) is fitted to their losses. Runs, seeds and resuming
    are as in `depthmix compare`. The folder receives scaling.md, scaling.json and a figure.
    """
    with_figures = can_draw()
    sizes = [Size.of(size) for size in arms.sizes]
    grid = make_grid(arms.mixers, sizes, data, training, backbone=arms.backbone)
    if len(arms.sizes) < 2:
        raise ValueError(f"sizes {' '.join(arms.sizes)}; expected at least two")
    if "run.steps" in grid.settings:
        raise ValueError("run.steps is the same for every size; expected --tokens or --tokens-per-parameter instead")
    check_target(output.publish, output.folder)
    published = None if fit.beside is None else find_published(fit.beside)
    tokens = training.tokens
    budget = per_parameter(training.tokens_per_parameter) if tokens is None else lambda config, asked: tokens
    all_arms = make_arms(grid, budget, across_sizes=False)
    with resumable():
        study = run_arms(all_arms, training, output)
    scaling = fit_scaling(read_points(study), baseline=all_arms[0].mixer, irreducible=fit.irreducible)
    scaling = dataclasses.replace(scaling, notes=[*scaling.notes, describe_regime(study)], beside=published)
    provenance = describe_study(study, seeds=training.seeds)
    figures = draw_scaling(scaling, output.folder / "figures") if with_figures else {}
    text = render(scaling, study.sweeps, provenance, figures, output.folder)
    page, result = write_study(study, "scaling", text, provenance, scaling.to_dict(), figures, output.publish)
    print(result, end="") if output.json else print_scaling(scaling, study, page)
    return 1 if study.failures else 0


def print_scaling(scaling: Scaling, study: Study, page: Path) -> None:
    print_table(scaling.formula, *console_laws(scaling))
    print_points(verdict_lines(scaling))
    print_ending(study.failures, page)
