"""A study without its weights: what a reader of its page may want to see, small enough to keep beside it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from depthmix.studies.arms import changed
from depthmix.studies.study import Study
from depthmix.support.files import replacing, write_text
from depthmix.training.folder import CONFIG, RESULT

COPIED = ("metrics.jsonl", RESULT)
SNAPSHOTS = "snapshots"


def check_target(target: Path | None, folder: Path) -> None:
    """Before the first hour, not after it."""
    if target is None:
        return
    ours, theirs = target.resolve(), folder.resolve()
    if ours == theirs or theirs in ours.parents or ours in theirs.parents:
        raise ValueError(f"publish={target} and folder={folder} lie in each other; expected two separate folders")
    if target.exists() and not target.is_dir():
        raise ValueError(f"publish={target} is no folder")


def publish_study(study: Study, target: Path, pages: Sequence[Path]) -> None:
    """Copy `pages`, and of every complete run what tells how it went; what else is there stays."""
    for page in pages:
        copy(page, target / page.relative_to(study.folder))
    for task in study.done:
        place = task.folder.relative_to(study.folder)
        for name in COPIED:
            copy(task.folder / name, target / place / name)
        # Folders are the business of the machine that it ran on; the digest leaves them out.
        config = changed(task.config, folder=place.as_posix())
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, folder=None))
        write_text(target / place / CONFIG, config.to_toml())
        for snapshot in sorted((task.folder / SNAPSHOTS).glob("*.safetensors")):
            copy(snapshot, target / place / SNAPSHOTS / snapshot.name)


def copy(source: Path, target: Path) -> None:
    with replacing(target) as part:
        shutil.copyfile(source, part)
