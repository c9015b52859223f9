"""The checkpoints in a folder, and whether they are intact: each has a manifest with the SHA-256 of its files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from depthmix.support.files import digest

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders of all checkpoints, oldest first."""
    return sorted((p for p in folder.glob("step-*") if p.is_dir() and p.name[5:].isdigit()), key=step_of)


def write_manifest(folder: Path, step: int) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": digest(path)} for path in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "step": step, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def newest_intact(folder: Path) -> int:
    """The step of the newest intact checkpoint, or -1; damaged ones are skipped, with a message."""
    remaining = list_checkpoints(folder)
    while remaining:
        path = remaining.pop()
        problem = find_damage(path)
        if problem is None:
            return step_of(path)
        remedy = "No intact checkpoint remains; training restarts from step 0"
        if remaining:
            remedy = f"Falling back to {remaining[-1].name}"
        print(f"depthmix: {problem}. {remedy}", file=sys.stderr, flush=True)
    return -1


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, according to its manifest; another format version is an error, not damage."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(file["bytes"]), str(file["sha256"])) for name, file in manifest["files"].items()}
        version, step = manifest["format"], manifest["step"]
    except FileNotFoundError:
        return f"{path / MANIFEST} is missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{path / MANIFEST} is damaged ({type(error).__name__}: {error})"
    if version != FORMAT:
        raise ValueError(
            f"{path} has format {version!r}; this version of depthmix reads {FORMAT}. Resume with the version "
            "that wrote it, or choose another folder"
        )
    if step != step_of(path):
        return f"{path / MANIFEST} names step {step}; expected step {step_of(path)}"
    if unlisted := sorted({p.name for p in path.iterdir()} - {*files, MANIFEST}):
        return f"{path} contains {', '.join(unlisted)}, which its manifest does not list"
    for name, (size, expected) in files.items():
        file = path / name
        if file.parent != path or not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size:,} bytes; its manifest expects {size:,}"
        if digest(file) != expected:
            return f"{file} was altered: its SHA-256 is not the one in {MANIFEST}"
    return None if STATE in files else f"{path / STATE} is missing"
