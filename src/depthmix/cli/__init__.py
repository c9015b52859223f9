"""The command line: `depthmix VERB`, one file for each verb."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

VERBS = {  # each is a module of this package with a function `run` and two EXAMPLES
    "list": "list the mechanisms with their state, parameters and cost",
    "show": "show one mechanism (equations, code, options, cost) or one preset",
    "train": "train a decoder; started again, it resumes",
    "eval": "evaluate a run: its loss on text, or its results on benchmarks",
    "generate": "continue a prompt with a trained model",
    "trace": "measure what the layers of a trained model read, on any text",
    "ablate": "cut routes of a trained model and measure what changes",
    "explore": "ask runs about texts in a browser, and cut what their layers read",
    "compare": "train several mechanisms on the same data and compare their losses",
    "scaling": "fit scaling laws and say what a mechanism is worth in compute",
    "report": "what runs or a study have learned over depth, as one HTML page",
    "convert": "read others' checkpoints or their depth mixing, and write them",
    "verify": "check every mechanism's invariants on this machine",
    "bench": "measure the speed and memory of depth mixing on this machine",
}
INDENT = "  "


def main(args: Sequence[str] | None = None) -> int:
    """Run a verb.

    Exit codes, each with a message: 2 for wrong input, 1 for a run that failed and for problems with files or memory,
    130 after Ctrl-C.
    """
    from depthmix.support.terminal import say

    arguments = [*(sys.argv[1:] if args is None else args)]  # `list` is a verb here
    try:
        return dispatch(arguments)
    except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError) as error:
        say_on_ranks(f"depthmix: {error}")
        return 2
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 141
    except OSError as error:  # a full disk, a folder that may not be written, no network
        say_on_ranks(f"depthmix: {error}")
        return 1
    except KeyboardInterrupt as error:
        say(f"\ndepthmix: {str(error) or 'stopped'}")
        return 130
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        say(f"depthmix: not enough memory ({first_line(error)}); choose smaller sizes or batches")
        return 1


def say_on_ranks(message: str) -> None:
    """Before they communicate, wrong input is the same on all processes of torchrun: the first one says so. Later
    errors may be of one process, and each says its own."""
    from depthmix.support.terminal import say

    rank = os.environ.get("RANK", "0")
    if rank == "0":
        say(message)
    elif (ranks := sys.modules.get("depthmix.parallel.ranks")) is not None and ranks.met:
        say(f"rank {rank}: {message}")


def dispatch(arguments: list[str]) -> int:
    from depthmix.support.checks import did_you_mean

    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from depthmix.support.files import version

        print(f"depthmix {version()}")
        return 0
    verb, *options = arguments
    if verb not in VERBS:
        raise ValueError(f"unknown verb {verb!r}. {did_you_mean(verb, VERBS)}Expected one of: {', '.join(VERBS)}")
    return run_verb(verb, options)


def overview() -> str:
    """The help of `depthmix` itself: one line for each verb."""
    width = len("--version") + 2
    return "\n".join(
        [
            "usage: depthmix VERB [OPTIONS]",
            "",
            "What should a layer read from the layers below it?",
            "Published answers as exchangeable parts for PyTorch.",
            "",
            *(f"{INDENT}{verb:{width}}{meaning}" for verb, meaning in VERBS.items()),
            "",
            f"{INDENT}{'--version':{width}}print the version",
            f"{INDENT}{'--help':{width}}print this help; after a verb, its options and examples",
        ]
    )


def run_verb(verb: str, options: list[str]) -> int:
    """Parse the options of one verb and run it. After its options, the help prints its notes and examples."""
    import tyro

    module = import_module(f"{__name__}.{verb}")
    summary, *notes = paragraphs(module.run)
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
    try:
        code: int | None = tyro.cli(
            module.run, prog=f"depthmix {verb}", description=summary, args=options, config=config
        )
    except SystemExit as end:
        if not end.code and {"-h", "--help"} & set(options):
            print("\n\n".join([*notes, "\n".join(["examples:", *(INDENT + line for line in module.EXAMPLES)])]))
        raise
    return int(code or 0)


def paragraphs(function: Callable[..., Any]) -> list[str]:
    """Of the docstring, wrapped for the terminal."""
    width = min(shutil.get_terminal_size().columns, 100)
    texts = (inspect.getdoc(function) or "").split("\n\n")
    return [textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False) for text in texts]


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class of its own for GPUs only."""
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
