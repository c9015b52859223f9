"""What several verbs share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import tyro

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
