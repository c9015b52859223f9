"""The command line: `depthmix VERB`, one file a verb."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Run a verb. Exit codes: 2 for wrong input, 1 for trouble with files or memory, 130 for Ctrl-C, with a message."""
    import tyro

    from depthmix.cli import bench, compare, generate, scaling, show, train, verify
    from depthmix.cli import eval as eval_verb
    from depthmix.cli import list as list_verb
    from depthmix.support.terminal import say

    verbs: dict[str, Callable[..., int]] = {
        "list": list_verb.run,
        "show": show.run,
        "train": train.run,
        "eval": eval_verb.run,
        "compare": compare.run,
        "scaling": scaling.run,
        "generate": generate.run,
        "verify": verify.run,
        "bench": bench.run,
    }
    try:
        code: int | None = tyro.extras.subcommand_cli_from_dict(
            verbs,
            prog="depthmix",
            description="What should a layer read from the layers below it?",
            args=args,
        )
    except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError) as error:
        say(f"depthmix: {error}")
        return 2
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 141
    except OSError as error:  # a full disk, a folder that may not be written, no network
        say(f"depthmix: {error}")
        return 1
    except KeyboardInterrupt as error:
        say(f"\ndepthmix: {str(error) or 'stopped'}")
        return 130
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        say(f"depthmix: not enough memory ({first_line(error)}); choose smaller sizes or batches")
        return 1
    return int(code or 0)


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class of its own for GPUs only."""
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
