"""`depthmix compare`: does a mechanism help, by how much, and what does it cost?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import tyro

from depthmix.cli.shared import Several, can_draw, print_ending, print_points, resumable
from depthmix.studies import Comparison, Grid, Size, make_arms, run_study
from depthmix.studies.arms import equal_compute
from depthmix.studies.comparison_figures import draw_comparison
from depthmix.studies.comparison_page import console_losses, render, verdict_lines
from depthmix.studies.page import describe_study
from depthmix.studies.publish import check_target, write_study
from depthmix.studies.study import compare_study
from depthmix.support.terminal import print_table


def run(
    mixers: tuple[str, ...] = ("residual", "block_attnres"),
    folder: Path = Path("studies/compare"),
    seeds: int = 3,
    depth: int = 12,
    dim: int | None = None,
    tokens: float | None = None,
    lrs: tuple[float, ...] = (),
    lr_share: float = 0.25,
    lr_of: Annotated[Several, tyro.conf.arg(metavar="MIXER=RATE")] = (),
    sweep: Annotated[Several, tyro.conf.arg(metavar="KEY=VALUE,VALUE")] = (),
    shapes: str | None = None,
    data: str = "stdlib",
    tokenizer: str = "bytes",
    set_: Annotated[Several, tyro.conf.arg(name="set", aliases=("-s",), metavar="KEY=VALUE")] = (),
    jobs: int = 1,
    publish: Path | None = None,
    json: bool = False,
) -> int:
    """Train several mechanisms on the same data and say what differs, with intervals.

    Each run is a process of its own; runs with the same seed have the same order of the data and the same
    initial weights where shapes agree, and are compared in pairs. Complete runs in the folder are used again and
    interrupted ones resume: start the same command again after any interruption. Writes comparison.md,
    comparison.json and figures into the folder. Exit code 1 where a run failed; the others are compared nevertheless.

    Args:
        mixers: mechanisms; the first is the baseline. depth_attention and value_residual alone go with the residual,
            attnres+value_residual has both. Repeat a name to add a control run, which must show no difference.
        folder: of the study.
        seeds: runs of each arm; use at least 3 for a meaningful interval.
        depth: the dial: sublayers, attention and MLP counted separately.
        dim: width; by default as the dial derives it.
        tokens: for each run; by default 20 for each parameter of the baseline.
        lrs: learning rates to try for each arm in short runs; its best is taken. One alone is taken as it is.
        lr_share: length of such a short run, as a share of a long one.
        lr_of: learning rate of one mechanism, such as residual=1.5e-3; repeat the flag for each. Others keep the
            dial's. Not together with --lrs.
        sweep: vary an option, such as mixer.block_sublayers=1,2,4,8 or optimizer.weight_decay=0,0.1; several, each with
            its own --sweep, make a grid. An option of a mechanism varies the arms that have it.
        shapes: depths against widths at equal compute, such as 12x256,24x128, in the place of depth and dim; tokens are
            those of the first.
        data: stdlib, a folder, a text, JSONL or Parquet file, or hf:NAME.
        tokenizer: bytes, bpe:4096, or a tokenizer.json.
        set_: any field for all arms by its dotted key, such as run.precision=bfloat16; repeat the flag for each field.
        jobs: runs at once, each with its share of the threads. Small models gain by it; tokens/s are then those of a
            machine that is shared.
        publish: also copy page, figures, comparison.json and, of each run, config.toml, metrics.jsonl, result.json and
            snapshots into this folder: all but weights, checkpoints and logs.
        json: print the whole result as one object.
    """
    with_figures = can_draw()  # said before the first hour and not after it
    sizes = [Size.of(text) for text in shapes.split(",")] if shapes else [Size(depth=depth, dim=dim)]
    check_target(publish, folder)
    if lrs and lr_of:
        raise ValueError(f"lrs={list(lrs)} beside lr_of={list(lr_of)}; expected rates to try, or a rate for each arm")
    grid = Grid.parse(mixers, sizes, sweep=sweep, settings=set_, rates=lr_of, data=data, tokenizer=tokenizer)
    if tokens is not None and "run.steps" in grid.settings:
        raise ValueError(f"tokens={tokens:g} beside run.steps={grid.settings['run.steps']}; expected one of them")
    arms = make_arms(grid, equal_compute(tokens))
    with resumable():
        study = run_study(arms, seeds=seeds, folder=folder, lrs=lrs, lr_share=lr_share, jobs=jobs)
    comparison, provenance = compare_study(study), describe_study(study, seeds=seeds)
    figures = draw_comparison(comparison, study.sweeps, folder / "figures") if with_figures else {}
    text = render(comparison, study.sweeps, provenance, figures, folder)
    page, result = write_study(study, "comparison", text, provenance, comparison.to_dict(), figures, publish)
    print(result, end="") if json else print_comparison(comparison, study.failures, page)
    return 1 if study.failures else 0


def print_comparison(comparison: Comparison, failures: Mapping[str, str], page: Path) -> None:
    print_table("Final validation loss; differences are from the baseline, paired by seed", *console_losses(comparison))
    print_points(verdict_lines(comparison))
    print_ending(failures, page)
