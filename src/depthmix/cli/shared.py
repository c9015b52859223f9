"""What the verbs share: how an option is declared, groups of options, how a command ends."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from depthmix.analysis.figures import new_figure
from depthmix.parallel.ranks import main_process
from depthmix.support.terminal import print_wrapped, say
from depthmix.training.build import OpenedRun, open_run

Several = tyro.conf.UseAppendAction[tuple[str, ...]]  # a flag that can be repeated


def flag(meaning: str, metavar: str | None = None, *, default: str | None = None, **more: Any) -> Any:
    """An option with its meaning in the help. `default` tells what happens without it where its value does not."""
    hint = None if default is None else f"(default: {default})" if default else ""
    return tyro.conf.arg(help=meaning, metavar=metavar, help_behavior_hint=hint, **more)


def switch(meaning: str, **more: Any) -> Any:
    """A flag without a value, off by default."""
    return flag(meaning, default="", **more)


def repeatable(meaning: str, metavar: str, **more: Any) -> Any:
    """A flag that is given once for each value."""
    return tyro.conf.arg(help=meaning, metavar=metavar, help_behavior_hint="(repeatable)", **more)


SET = repeatable(
    "Set any field of the configuration by its dotted key, such as mixer.block_sublayers=4 or schedule.warmup=0.05. "
    "Repeat the flag for each field.",
    "KEY=VALUE",
    name="set",
    aliases=("-s",),
)


Backbone = Literal["qwen3", "kimi_linear"]
BACKBONE = flag(
    "What stands around the mechanism: qwen3, grouped-query attention with RoPE and an MLP in every layer; or "
    "kimi_linear, KDA and MLA 3:1 with experts.",
    default="qwen3; kimi_linear with --preset attnres",
)


@dataclass(frozen=True, kw_only=True)
class Data:  # no docstring here or below: the help would print it
    data: Annotated[
        str | None,
        flag("stdlib, a folder, a text, JSONL or Parquet file, or hf:NAME for a Hugging Face dataset.", "SOURCE",
             default="stdlib, the sources of Python's standard library"),
    ] = None  # fmt: skip
    tokenizer: Annotated[
        str | None, flag("bytes, bpe:SIZE (trained on the data), or a tokenizer.json.", "TOKENIZER", default="bytes")
    ] = None


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


def print_result(text: str) -> None:
    """One line for programs that read it; on a terminal it is broken between words."""
    print_wrapped(text) if sys.stdout.isatty() else print(text)


def print_points(lines: Iterable[str]) -> None:
    """As a list, broken between words only."""
    for line in lines:
        print_wrapped(f"- {line}", indent="  ")


def print_ending(failures: Mapping[str, str], page: Path) -> None:
    """Runs without a result, and where the page is."""
    for label, why in failures.items():
        print_wrapped(f"failed: {label}: {why}")
    print(f"\nthe whole page: {page}")


def open_run_folder(
    folder: Path, device: str, *, dtype: torch.dtype | None = None, functions: bool = True
) -> OpenedRun:
    """As `open_run`; says which step it uses where the run is unfinished."""
    opened = open_run(folder, device, dtype=dtype, functions=functions)
    say_unfinished(folder, opened.step)
    return opened


def say_unfinished(folder: Path, step: int | None) -> None:
    """Which step is used of an unfinished run; None: it is finished."""
    if step is not None and main_process():
        say(f"{folder} is unfinished: using its checkpoint of step {step}")
