"""`depthmix scaling`: how the loss of each mechanism falls with compute."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from depthmix.cli.shared import Several, can_draw, print_ending, print_points, resumable
from depthmix.studies import Grid, Size, Study, make_arms, run_study
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
    beside: str | None = None,
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
        set_: any field for all arms by its dotted key; repeat the flag for each field.
        jobs: runs at once, each with its share of the threads.
        beside: draw and list a paper's own points and laws too, never as part of a fit: attnres-paper.
        publish: also copy all but weights, checkpoints and logs into this folder.
        json: print the whole result as one object.
    """
    with_figures = can_draw()
    shapes = [Size.of(size) for size in sizes]
    grid = Grid.parse(mixers, shapes, sweep=sweep, settings=set_, data=data, tokenizer=tokenizer)
    if len(sizes) < 2:
        raise ValueError(f"sizes {' '.join(sizes)}; expected at least two")
    if "run.steps" in grid.settings:
        raise ValueError("run.steps is the same for every size; expected --tokens or --tokens-per-parameter instead")
    check_target(publish, folder)
    published = None if beside is None else find_published(beside)
    budget = per_parameter(tokens_per_parameter) if tokens is None else lambda config, asked: tokens
    arms = make_arms(grid, budget, across_sizes=False)
    with resumable():
        study = run_study(arms, seeds=seeds, folder=folder, lrs=lrs, lr_share=lr_share, jobs=jobs)
    scaling = fit_scaling(read_points(study), baseline=arms[0].mixer, irreducible=irreducible)
    scaling = dataclasses.replace(scaling, notes=[*scaling.notes, describe_regime(study)], beside=published)
    provenance = describe_study(study, seeds=seeds)
    figures = draw_scaling(scaling, folder / "figures") if with_figures else {}
    text = render(scaling, study.sweeps, provenance, figures, folder)
    page, result = write_study(study, "scaling", text, provenance, scaling.to_dict(), figures, publish)
    print(result, end="") if json else print_scaling(scaling, study, page)
    return 1 if study.failures else 0


def print_scaling(scaling: Scaling, study: Study, page: Path) -> None:
    print_table(scaling.formula, *console_laws(scaling))
    print_points(verdict_lines(scaling))
    print_ending(study.failures, page)
