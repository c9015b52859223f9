"""`depthmix scaling`: how the loss of each mechanism falls with compute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from depthmix.analysis.figures import new_figure
from depthmix.cli.compare import Several, about_of, close, leave, make_grid, runs_of, show_table
from depthmix.studies.arms import Size, make_arms, per_parameter
from depthmix.studies.publish import check_target
from depthmix.studies.scaling_page import Point, Scaling, draw_scaling, law_cells, law_headings, render, scale
from depthmix.studies.study import Study, run_study


def run(
    mixers: tuple[str, ...] = ("residual", "block_attnres"),
    sizes: tuple[str, ...] = ("4", "6", "8", "12"),
    folder: Path = Path("studies/scaling"),
    seeds: int = 1,
    tokens_per_parameter: float = 20,
    tokens: float | None = None,
    irreducible: bool = False,
    lrs: tuple[float, ...] = (),
    lr_share: float = 0.25,
    sweep: Annotated[Several, tyro.conf.arg(metavar="KEY=VALUE,VALUE")] = (),
    data: str = "stdlib",
    tokenizer: str = "bytes",
    set_: Annotated[Several, tyro.conf.arg(name="set", aliases=("-s",), metavar="KEY=VALUE")] = (),
    jobs: int = 1,
    publish: Path | None = None,
    json: bool = False,
) -> int:
    """Train several sizes of each mechanism, fit L = a C^(−b), and say what a mechanism is worth in compute.

    Runs, seeds, resuming and the other options are as in `depthmix compare`. Writes scaling.md, scaling.json and a
    figure into the folder.

    Args:
        mixers: mechanisms; the first is the baseline.
        sizes: depths in sublayers (the dial derives the rest), or DEPTHxDIM; three at least for an interval.
        folder: of the study.
        seeds: runs of each arm and size; a law goes through their means.
        tokens_per_parameter: length of a run, by the parameters of its size's baseline without embeddings.
        tokens: the same number for every size instead.
        irreducible: fit a loss that no compute removes as well; four sizes at least for an interval.
        lrs: learning rates to try for each arm and size in short runs; the best is taken.
        lr_share: length of such a short run, as a share of a long one.
        sweep: vary an option, such as mixer.block_sublayers=2,4.
        data: stdlib, a folder, a text, JSONL or Parquet file, or hf:NAME.
        tokenizer: bytes, bpe:4096, or a tokenizer.json.
        set_: any field for all arms by its dotted key; once for each.
        jobs: runs at once, each with its share of the threads.
        publish: also copy all but weights, checkpoints and logs into this folder.
        json: print the whole result as one object.
    """
    new_figure()
    grid = make_grid(mixers, [Size.of(size) for size in sizes], sweep, set_, data, tokenizer)
    if len(sizes) < 2:
        raise ValueError(f"sizes {' '.join(sizes)}; expected at least two")
    if "run.steps" in grid.settings:
        raise ValueError("run.steps is the same for every size; expected --tokens or --tokens-per-parameter instead")
    check_target(publish, folder)
    budget = per_parameter(tokens_per_parameter) if tokens is None else lambda config, asked: tokens
    arms = make_arms(grid, budget, across_sizes=False)
    try:
        study = run_study(arms, seeds=seeds, folder=folder, lrs=lrs, lr_share=lr_share, jobs=jobs)
    except KeyboardInterrupt:
        print("\ndepthmix: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    scaling = scale(points_of(study), baseline=arms[0].mixer, irreducible=irreducible)
    about = about_of(study, seeds=seeds)
    figures = draw_scaling(scaling, folder / "figures")
    text = render(scaling, study.sweeps, about, figures, folder)
    page, whole = leave(study, "scaling", text, about, scaling.to_dict(), figures, publish)
    print(whole, end="") if json else print_scaling(scaling, study, page)
    return 1 if study.failures else 0


def points_of(study: Study) -> list[Point]:
    runs = runs_of(study)
    found = [
        Point(arm=arm.mixer, size=str(arm.size), runs=tuple(run for run in runs if run.arm == arm.label))
        for arm in sorted(study.arms, key=lambda arm: list(dict.fromkeys(a.mixer for a in study.arms)).index(arm.mixer))
    ]
    return [point for point in found if point.runs]


def print_scaling(scaling: Scaling, study: Study, page: Path) -> None:
    show_table(scaling.formula, law_headings(scaling), law_cells(scaling))
    for line in (*scaling.verdicts, *scaling.notes):
        print(f"- {line}")
    close(study.failures, page)
