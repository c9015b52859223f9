"""What `compare` and `scaling` share: the options of a study's runs and of its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from depthmix.cli.shared import SET, Data, Several, flag, repeatable, switch
from depthmix.studies import Arm, Grid, Size, Study, run_study

STUDY_BACKBONE = flag("Backbone of every arm: qwen3 or kimi_linear, as in `depthmix train`.")


@dataclass(frozen=True, kw_only=True)
class Runs:
    seeds: int  # each verb says what they mean there, as with tokens
    tokens: float | None
    lrs: Annotated[
        tuple[float, ...],
        flag("Learning rates to try for each arm in short runs; the best one is used. A single rate is used as it is.",
             "RATE ...", default="the rate that --depth and --dim imply"),
    ] = ()  # fmt: skip
    lr_share: Annotated[float, flag("Length of such a short run, as a share of a full run.", "SHARE")] = 0.25
    sweep: Annotated[
        Several,
        repeatable("Vary an option, such as mixer.block_sublayers=1,2,4,8 or optimizer.weight_decay=0,0.1. Several "
                   "flags make a grid. An option of a mechanism varies only the arms that have it.", "KEY=VALUE,VALUE"),
    ] = ()  # fmt: skip
    set_: Annotated[Several, SET] = ()
    jobs: Annotated[
        int,
        flag("Runs at a time, each with its share of the threads. Worthwhile for small models; tokens/s are then those "
             "of a shared machine.", "N"),
    ] = 1  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StudyOutput:
    folder: Path
    publish: Annotated[
        Path | None,
        flag("Also copy everything except weights, checkpoints and logs into this folder: the page, its figures and "
             "JSON, and each run's configuration, metrics, result and snapshots.", "FOLDER", default="no copy"),
    ] = None  # fmt: skip
    json: Annotated[bool, switch("Print the whole result as one JSON object.")] = False


def make_grid(
    mixers: Sequence[str],
    sizes: Sequence[Size],
    data: Data,
    training: Runs,
    rates: Sequence[str] = (),
    backbone: str = "qwen3",
    from_hf: str | None = None,
) -> Grid:
    return Grid.parse(
        mixers,
        sizes,
        sweep=training.sweep,
        settings=training.set_,
        rates=rates,
        data=data.data or "stdlib",
        tokenizer=data.tokenizer or (None if from_hf else "bytes"),
        backbone=backbone,
        from_hf=from_hf,
    )


def run_arms(arms: Sequence[Arm], training: Runs, output: StudyOutput) -> Study:
    return run_study(
        arms,
        seeds=training.seeds,
        folder=output.folder,
        lrs=training.lrs,
        lr_share=training.lr_share,
        jobs=training.jobs,
    )
