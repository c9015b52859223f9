"""What several verbs share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import tyro

from depthmix.analysis.figures import new_figure
from depthmix.support.terminal import console, say, wrapped
from depthmix.training.build import OpenedRun, open_run

Several = tyro.conf.UseAppendAction[tuple[str, ...]]  # a flag that can be repeated


@contextmanager
def resumable() -> Iterator[None]:
    """Ctrl-C ends the command with a hint."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command resumes from here") from None


def can_draw() -> bool:
    """Whether matplotlib is installed; says what to install where it is not."""
    try:
        new_figure()
    except ModuleNotFoundError:
        say("matplotlib is not installed, so figures are left out; add them with: pip install 'depthmix[figures]'")
        return False
    return True


def print_points(lines: Iterable[str]) -> None:
    """As a list, broken between words only."""
    for line in lines:
        print("\n".join(wrapped(f"- {line}", console().width, indent="  ")))


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
