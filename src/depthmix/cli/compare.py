"""`depthmix compare`: does a mechanism help, by how much, and what does it cost?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from depthmix.cli.shared import (
    Backbone,
    Data,
    Several,
    can_draw,
    flag,
    print_ending,
    print_points,
    repeatable,
    resumable,
)
from depthmix.cli.study_options import STUDY_BACKBONE, Runs, StudyOutput, make_grid, run_arms
from depthmix.studies import Comparison, Size, make_arms
from depthmix.studies.arms import equal_compute
from depthmix.studies.comparison_figures import draw_comparison
from depthmix.studies.comparison_page import console_losses, render, verdict_lines
from depthmix.studies.page import describe_study
from depthmix.studies.publish import check_target, write_study
from depthmix.studies.study import compare_study
from depthmix.support.terminal import print_table
from depthmix.training import RetrofitConfig

EXAMPLES = (
    "depthmix compare --depth 2 --tokens 1e4 --seeds 1",
    "depthmix compare --depth 2 --tokens 1e4 --seeds 1 --json",
)


@dataclass(frozen=True, kw_only=True)
class Arms:
    mixers: Annotated[
        tuple[str, ...],
        flag("Mechanisms; the first is the baseline. A KV mechanism alone uses the plain residual; join two with +, "
             "such as attnres+value_residual. Repeat a name to add a control run, which must show no difference.",
             "NAME ..."),
    ] = ("residual", "block_attnres")  # fmt: skip
    depth: Annotated[
        int | None, flag("Number of sublayers, attention and MLP counted separately.", "L", default="12")
    ] = None
    dim: Annotated[int | None, flag("Width.", "D", default="follows from the depth")] = None
    backbone: Annotated[Backbone, STUDY_BACKBONE] = "qwen3"
    shapes: Annotated[
        str | None,
        flag("Instead of --depth and --dim: several depths and widths at equal compute, such as 12x256,24x128. "
             "--tokens are those of the first.", "LxD,LxD", default=""),
    ] = None  # fmt: skip
    from_hf: Annotated[
        str | None,
        flag("Instead of --depth and --dim: continue the pretraining of the model of Hugging Face transformers in a "
             "local folder. All arms start from its weights; the arm residual continues it as it is.", "FOLDER",
             default=""),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Training(Runs):
    seeds: Annotated[int, flag("Runs of each arm; use at least 3 for a meaningful interval.", "N")] = 3
    tokens: Annotated[
        float | None,
        flag(
            "Tokens per run.",
            "TOKENS",
            default="20 per parameter of the baseline, without embeddings; with --from-hf 1000 steps",
        ),
    ] = None
    lr_of: Annotated[
        Several,
        repeatable("Learning rate of one mechanism, such as residual=1.5e-3; cannot be combined with --lrs.",
                   "NAME=RATE"),
    ] = ()  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Output(StudyOutput):
    folder: Annotated[Path, flag("Folder of the study.", "FOLDER")] = Path("studies/compare")


def run(*, arms: Arms = Arms(), data: Data = Data(), training: Training = Training(), output: Output = Output()) -> int:
    """Train several mechanisms on the same data and compare their losses.

    Each run is a process of its own. Runs with the same seed share the order of the data and, where shapes agree, the
    initial weights; they are compared in pairs, with confidence intervals. The folder receives comparison.md,
    comparison.json and figures.

    Complete runs in the folder are used again and interrupted runs resume: after any interruption, start the same
    command again. Exit code 1 if a run failed; the others are still compared.
    """
    with_figures = can_draw()  # said before the first hour and not after it
    sizes = sizes_of(arms)
    check_target(output.publish, output.folder)
    if training.lrs and training.lr_of:
        tried, fixed = list(training.lrs), list(training.lr_of)
        raise ValueError(f"lrs={tried} and lr_of={fixed}; expected only one: rates to try, or a rate for each arm")
    grid = make_grid(
        arms.mixers,
        sizes,
        data,
        training,
        rates=training.lr_of,
        backbone=arms.backbone,
        from_hf=arms.from_hf,
    )
    tokens = training.tokens
    if tokens is not None and "run.steps" in grid.settings:
        raise ValueError(f"tokens={tokens:g} and run.steps={grid.settings['run.steps']}; expected only one of them")
    with resumable():
        study = run_arms(make_arms(grid, equal_compute(tokens)), training, output)
    comparison, provenance = compare_study(study), describe_study(study, seeds=training.seeds)
    figures = draw_comparison(comparison, study.sweeps, output.folder / "figures") if with_figures else {}
    text = render(comparison, study.sweeps, provenance, figures, output.folder)
    page, result = write_study(study, "comparison", text, provenance, comparison.to_dict(), figures, output.publish)
    print(result, end="") if output.json else print_comparison(comparison, study.failures, page)
    return 1 if study.failures else 0


def sizes_of(arms: Arms) -> list[Size]:
    if arms.from_hf is not None:
        backbone = None if arms.backbone == "qwen3" else arms.backbone  # the default is not a choice
        starts = {"depth": arms.depth, "dim": arms.dim, "shapes": arms.shapes, "backbone": backbone}
        for name, given in starts.items():
            if given is not None:
                raise ValueError(f"from_hf={arms.from_hf} and {name}={given}; expected only one of them")
        model = RetrofitConfig.of(arms.from_hf)
        return [Size(depth=model.depth, dim=model.dim)]
    if arms.shapes:
        return [Size.of(text) for text in arms.shapes.split(",")]
    return [Size(depth=12 if arms.depth is None else arms.depth, dim=arms.dim)]


def print_comparison(comparison: Comparison, failures: Mapping[str, str], page: Path) -> None:
    print_table("Final validation loss; differences are from the baseline, paired by seed", *console_losses(comparison))
    print_points(verdict_lines(comparison))
    print_ending(failures, page)
