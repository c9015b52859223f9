"""The folder that a conversion writes: new, empty, or of the same kind."""

from __future__ import annotations

from pathlib import Path

from depthmix.models.saved import CONFIG, MODEL, MODEL_FILES, STACK, STAGED
from depthmix.support.files import read_json

REMEDY = "Choose another folder"


def check_target(folder: Path, kind: str) -> Path:
    """Return the folder if it may be written: `kind` is "stack", "model" or the name of a format."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder. {REMEDY}")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    others = [name for name in names if name not in MODEL_FILES and not name.endswith(".part")]
    if others:
        raise ValueError(
            f"{folder} is not empty: it has {sorted(others)[0]}, which was not converted. {REMEDY}; nothing was written"
        )
    if names and (found := kind_of(folder)) != kind:
        raise ValueError(
            f"{folder} is not empty: it holds {found or 'files of another origin'}, and what is to be written is "
            f"{kind}. {REMEDY}; nothing was written"
        )
    return folder


def kind_of(folder: Path) -> str | None:
    """What depthmix wrote into a folder; None: something else."""
    path = next((folder / name for name in (CONFIG, STAGED) if (folder / name).is_file()), None)
    config = None if path is None else read_json(path, REMEDY)
    if not isinstance(config, dict):
        return None
    if "format" in config:
        return next((content.field for content in (STACK, MODEL) if content.field in config), None)
    kind = config.get("depthmix_format")
    return kind if isinstance(kind, str) else None
