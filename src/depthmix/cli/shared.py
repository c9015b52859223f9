"""What several verbs share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import tyro

from depthmix.support.terminal import say
from depthmix.training.build import OpenedRun, open_run

Several = tyro.conf.UseAppendAction[tuple[str, ...]]  # a flag that can be repeated


@contextmanager
def resumable() -> Iterator[None]:
    """Ctrl-C ends the command with a hint."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command resumes from here") from None


def print_ending(failures: Mapping[str, str], page: Path) -> None:
    """Runs without a result, and where the page is."""
    for label, why in failures.items():
        print(f"failed: {label}: {why}")
    print(f"\nthe whole page: {page}")


def open_run_folder(
    folder: Path, device: str, *, dtype: torch.dtype | None = None, functions: bool = True
) -> OpenedRun:
    """As `open_run`; says which step it uses where the run is unfinished."""
    opened = open_run(folder, device, dtype=dtype, functions=functions)
    if opened.step is not None:
        say(f"{folder} is unfinished: using its checkpoint of step {opened.step}")
    return opened
