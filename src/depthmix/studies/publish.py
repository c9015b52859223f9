"""Write a study's page and result into its folder, and publish them with its runs, without the large weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthmix.studies.arms import with_changes
from depthmix.studies.page import Provenance
from depthmix.studies.study import Study
from depthmix.support.files import replacing, write_text
from depthmix.training.folder import CONFIG, RESULT

COPIED = ("metrics.jsonl", RESULT)
MEASURED = ("trace.json", "trace.safetensors", "ablation.json")  # by `depthmix report`, for runs that have them
SNAPSHOTS = "snapshots"


def check_target(target: Path | None, folder: Path) -> None:
    """Raise an error for an unusable target before the first run, not after the last."""
    if target is None:
        return
    copy, original = target.resolve(), folder.resolve()
    if copy == original or original in copy.parents or copy in original.parents:
        raise ValueError(
            f"publish={target} and folder={folder} are the same folder, or one contains the other; expected two "
            "separate folders"
        )
    if target.exists() and not target.is_dir():
        raise ValueError(f"publish={target} is not a folder; expected a folder or a new path")


def write_study(
    study: Study,
    name: str,
    page: str,
    provenance: Provenance,
    result: Mapping[str, Any],
    figures: Mapping[str, Path],
    publish: Path | None,
) -> tuple[Path, str]:
    """Write NAME.md, and the whole result as NAME.json, into the study's folder; copy them to `publish` if given.

    Returns the path of the page and the JSON text.
    """
    content = {"about": dataclasses.asdict(provenance), "learning_rates": study.sweeps, **result}
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    page_file, data_file = (study.folder / f"{name}.{kind}" for kind in ("md", "json"))
    write_text(page_file, page)
    write_text(data_file, text)
    if publish is not None:
        publish_study(study, publish, [page_file, data_file, *figures.values()])
    return page_file, text


def publish_study(study: Study, target: Path, pages: Sequence[Path]) -> None:
    """Copy `pages` and the complete runs, without their weights; other files in `target` stay."""
    for page in pages:
        copy_file(page, target / page.relative_to(study.folder))
    for task in study.done:
        run = task.folder.relative_to(study.folder)
        for name in (*COPIED, *(name for name in MEASURED if (task.folder / name).is_file())):
            copy_file(task.folder / name, target / run / name)
        # Folders belong to the machine of the run, so they are left out; they are not part of the digest.
        config = with_changes(task.config, folder=run.as_posix())
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, folder=None))
        write_text(target / run / CONFIG, config.to_toml())
        for snapshot in sorted((task.folder / SNAPSHOTS).glob("*.safetensors")):
            copy_file(snapshot, target / run / SNAPSHOTS / snapshot.name)


def copy_file(source: Path, target: Path) -> None:
    with replacing(target) as part:
        shutil.copyfile(source, part)
