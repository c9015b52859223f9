"""`depthmix compare`: does a mechanism help, by how much, and what does it cost?"""

from __future__ import annotations

import json as json_format
import math
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from depthmix.analysis.figures import new_figure
from depthmix.studies.arms import Grid, Size, equal_compute, make_arms, parse_sweep
from depthmix.studies.comparison import Comparison, Run, compare, read_run
from depthmix.studies.comparison_figures import draw_comparison
from depthmix.studies.comparison_page import LOSS_HEADINGS, About, loss_cells, render
from depthmix.studies.publish import check_target, publish_study
from depthmix.studies.study import Study, run_study, settings
from depthmix.support.checks import split_pair
from depthmix.support.files import write_text
from depthmix.support.terminal import console

Several = tyro.conf.UseAppendAction[tuple[str, ...]]


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
    interrupted ones go on: start the same command again after anything that happened. Writes comparison.md,
    comparison.json and figures into the folder. Exit code 1 where a run failed; the others are compared nevertheless.

    Args:
        mixers: mechanisms; the first is the baseline. depth_attention and value_residual alone go with the residual,
            attnres+value_residual has both. A name that comes again is a control: it must show no difference.
        folder: of the study.
        seeds: runs of each arm; three at least for a statement worth the name.
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
        set_: any field for all arms by its dotted key, such as run.precision=bfloat16; once for each.
        jobs: runs at once, each with its share of the threads. Small models gain by it; tokens/s are then those of a
            machine that is shared.
        publish: also copy page, figures, comparison.json and, of each run, config.toml, metrics.jsonl, result.json and
            snapshots into this folder: all but weights, checkpoints and logs.
        json: print the whole result as one object.
    """
    new_figure()  # tells where matplotlib is missing, before the first hour and not after it
    sizes = [Size.of(text) for text in shapes.split(",")] if shapes else [Size(depth=depth, dim=dim)]
    check_target(publish, folder)
    if lrs and lr_of:
        raise ValueError(f"lrs={list(lrs)} beside lr_of={list(lr_of)}; expected rates to try, or a rate for each arm")
    rates = dict(map(parse_rate, lr_of))
    grid = replace(make_grid(mixers, sizes, sweep, set_, data, tokenizer), rates=rates)
    if tokens is not None and "run.steps" in grid.settings:
        raise ValueError(f"tokens={tokens:g} beside run.steps={grid.settings['run.steps']}; expected one of them")
    arms = make_arms(grid, equal_compute(tokens))
    try:
        study = run_study(arms, seeds=seeds, folder=folder, lrs=lrs, lr_share=lr_share, jobs=jobs)
    except KeyboardInterrupt:
        print("\ndepthmix: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    configs = {arm.label: arm.config for arm in arms}
    baselines = {arm.label: arm.baseline for arm in arms if arm.baseline is not None}
    controls = [label for label, base in baselines.items() if configs[label] == configs[base]]
    comparison = compare(runs_of(study), baselines, controls)
    about = about_of(study, seeds=seeds)
    figures = draw_comparison(comparison, study.sweeps, folder / "figures")
    text = render(comparison, study.sweeps, about, figures, folder)
    page, whole = leave(study, "comparison", text, about, comparison.to_dict(), figures, publish)
    print(whole, end="") if json else print_comparison(comparison, study.failures, page)
    return 1 if study.failures else 0


def make_grid(
    mixers: Sequence[str], sizes: Sequence[Size], sweep: Sequence[str], set_: Sequence[str], data: str, tokenizer: str
) -> Grid:
    chosen = dict(split_pair(text, "optimizer.weight_decay=0.1") for text in set_)
    sweeps: dict[str, Sequence[str]] = {}
    for text in sweep:
        key, values = parse_sweep(text)
        if key in sweeps:
            raise ValueError(f"{key} is varied twice; expected all its values in one --sweep")
        sweeps[key] = values
    return Grid(mixers=mixers, sizes=sizes, sweeps=sweeps, settings=chosen, data=data, tokenizer=tokenizer)


def parse_rate(text: str) -> tuple[str, float]:
    """Of "residual=1.5e-3"."""
    mixer, _, rate = text.partition("=")
    try:
        value = float(rate)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"lr_of {text!r}; expected MIXER=RATE with a rate above 0, such as residual=1.5e-3")
    return mixer.strip(), value


def runs_of(study: Study) -> list[Run]:
    """With folders as seen from the study's own, so that all of it can be moved."""
    return [
        replace(
            read_run(task.folder, arm=task.arm, seed=task.seed, lr=task.config.optimizer.lr),
            folder=task.folder.relative_to(study.folder).as_posix(),
        )
        for task in study.tasks
    ]


def about_of(study: Study, **more: Any) -> About:
    first = study.arms[0].config
    data = f"{first.data.source}, tokens {first.data.tokenizer}, digest {study.corpus.digest[:12]}"
    return About(
        command=shlex.join(["depthmix", *sys.argv[1:]]),
        machine=f"{platform.system()} {platform.machine()}, {first.run.device}, torch {torch.__version__}",
        data=data,
        settings=settings(study, **more),
        failures={label: why.replace(f"{study.folder}/", "") for label, why in study.failures.items()},
    )


def leave(
    study: Study,
    name: str,
    text: str,
    about: About,
    found: Mapping[str, Any],
    figures: Mapping[str, Path],
    publish: Path | None,
) -> tuple[Path, str]:
    """The page and all of the result as JSON in the study's folder, and a copy where it is published."""
    everything = {"about": asdict(about), "learning_rates": study.sweeps, **found}
    whole = json_format.dumps(everything, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    page, data = (study.folder / f"{name}.{kind}" for kind in ("md", "json"))
    write_text(page, text)
    write_text(data, whole)
    if publish is not None:
        publish_study(study, publish, [page, data, *figures.values()])
    return page, whole


def print_comparison(comparison: Comparison, failures: Mapping[str, str], page: Path) -> None:
    told = [k for k, heading in enumerate(LOSS_HEADINGS) if heading not in ("parameters", "sd", "against")]
    cells = [[row[k] for k in told] for row in loss_cells(comparison)]
    show_table("Final validation loss", [LOSS_HEADINGS[k] for k in told], cells)
    for row in comparison.rows:
        print(f"- {row.verdict}")
    close(failures, page)


def show_table(title: str, headings: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Columns that say nothing are left out."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    shown = [k for k in range(len(headings)) if any(row[k] for row in cells)]
    for k in shown:
        table.add_column(headings[k], overflow="fold", no_wrap=k > 0)
    for row in cells:
        table.add_row(*(row[k] for k in shown))
    console().print(table)


def close(failures: Mapping[str, str], page: Path) -> None:
    for label, why in failures.items():
        print(f"failed: {label}: {why}")
    print(f"\nthe whole page: {page}")
