"""What names of tasks stand for, before anything runs: known or not, whether they execute code, whether data is there.

The harness keeps an index of its task files. It is read here without importing the functions that these files name,
since the import itself can run a model's code or download something.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.hf.tasks import FOLDER, SUITES, expand
from depthmix.support.checks import did_you_mean, import_package, user_path
from depthmix.support.terminal import say

INSTALL = "'depthmix[harness]'"
NEEDED_BY = "the evaluation of tasks"
GENERATED = 256  # tokens that a task generates unless it says otherwise
OFFLINE = (
    "Without a network, only data that was downloaded before can be used (HF_HOME says where it is), or a task file of "
    "yours with local data: --task-folder"
)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Tasks by name, each with the suite that named it (None: its own name), and the harness's index of all."""

    suites: Mapping[str, str | None]
    manager: Any
    allow_code: bool

    @functools.cached_property
    def definitions(self) -> dict[str, str]:
        """A digest of the task files behind each name, wherever they are."""
        return {name: definition(name, self.manager.task_index) for name in self.suites}

    def load(self, name: str) -> dict[str, Any]:
        """The tasks behind a name, with their data; downloaded if it is not there yet."""
        return dict(self.manager.load([name])["tasks"])


def choose_tasks(
    names: Iterable[str], folder: str | os.PathLike[str] | None = None, allow_code: bool = False
) -> Chosen:
    """Look up names of tasks, groups and suites; an error names those that are unknown or that execute code."""
    import_package("lm_eval", NEEDED_BY, INSTALL)
    suites = expand(names)
    if not suites:
        raise ValueError(f"no task was named; expected names of tasks, groups or suites ({', '.join(SUITES)})")
    folders = [FOLDER]
    if folder is not None:
        if not user_path(folder).is_dir():
            raise FileNotFoundError(f"{folder} is not a folder; expected one that contains task files (*.yaml)")
        folders.append(user_path(folder))
    manager = index_of(suites, folders)
    check_code(suites, manager.task_index, allow_code)
    return Chosen(suites=suites, manager=manager, allow_code=allow_code)


def index_of(names: Iterable[str], folders: list[Path]) -> Any:
    """The index that knows all names. The harness's own files, thousands of them, are read only if needed."""
    tasks = import_package("lm_eval.tasks", NEEDED_BY, INSTALL)
    for everything in (False, True):
        manager = tasks.TaskManager(include_path=folders, include_defaults=everything)
        if not hasattr(manager, "task_index"):
            raise ImportError(f"lm-eval is older than 0.4.13, which {NEEDED_BY} needs: pip install {INSTALL}")
        index = manager.task_index
        if all(config is not None for name in names for _, config in leaves(name, index)):
            return manager
    if unknown := [name for name in names if name not in index]:
        hint = did_you_mean(unknown[0], [*SUITES, *index])
        raise ValueError(
            f"unknown task {', '.join(map(repr, unknown))}. {hint}Expected names of tasks or groups of the "
            f"lm-evaluation-harness (`lm-eval ls tasks` lists them), of task files in --task-folder, or of a suite: "
            f"{', '.join(SUITES)}"
        )
    return manager


def leaves(name: str, index: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """The tasks behind a name with their configuration; None where the index has none of this name."""
    entry = index.get(name)
    if entry is None:
        yield name, None
    elif entry.kind.name == "TAG":
        for member in sorted(entry.tags):
            yield from leaves(member, index)
    elif entry.kind.name == "GROUP":
        yield from members(entry.cfg, index)
    else:
        yield name, entry.cfg or {}


def members(group: Mapping[str, Any], index: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """The tasks of a group. A part is a name, or a table: with changes of what it names, or defined on the spot."""
    for part in group.get("task") or ():
        changes = {} if isinstance(part, str) else part
        name = part if isinstance(part, str) else part.get("group") or part.get("task")
        if name in index:
            yield from (
                (leaf, None if config is None else {**config, **changes}) for leaf, config in leaves(name, index)
            )
        elif "group" in changes:
            yield from members(changes, index)
        else:
            yield name, changes or None


def check_code(names: Iterable[str], index: Mapping[str, Any], allow_code: bool) -> None:
    marked = [name for name in names if any((config or {}).get("unsafe_code") for _, config in leaves(name, index))]
    refuse_code(marked, allow_code)


def refuse_code(names: list[str], allow_code: bool) -> None:
    if names and not allow_code:
        raise ValueError(
            f"{', '.join(names)}: these tasks execute code that the model writes, on this machine and without a "
            "sandbox. Nothing was run. Leave them out, or allow it with --allow-code (allow_code=True in Python), in a "
            "container or another place where such code can do no harm"
        )


def prepare(chosen: Chosen, names: list[str], max_length: int) -> None:
    """Load the data of tasks once, so that what is missing is found before anything is evaluated."""
    for number, name in enumerate(names, 1):
        say(f"data of task {number} of {len(names)}: {name}")
        try:
            loaded = chosen.load(name)
        except Exception as error:  # of the harness, of datasets, of functions that a task file names
            raise load_error(name, error) from error
        refuse_code([leaf for leaf, task in loaded.items() if getattr(task, "UNSAFE_CODE", False)], chosen.allow_code)
        check_room(loaded, max_length)


def load_error(name: str, error: Exception) -> Exception:
    """The error about a task that cannot be loaded, by its cause."""
    reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
    if isinstance(error, ImportError):
        return ModuleNotFoundError(
            f"task {name!r} needs a package that cannot be imported ({reason}). Install it; for tasks of mathematics: "
            "pip install 'lm-eval[math]'"
        )
    if isinstance(error, OSError) or "offline" in str(error).lower() or "cache" in str(error).lower():
        return OSError(f"the data of task {name!r} cannot be loaded ({reason}). {OFFLINE}")
    return ValueError(f"task {name!r} cannot be loaded ({reason}). Check its task file and its data")


def check_room(tasks: Mapping[str, Any], max_length: int) -> None:
    """A context must have room for what a task generates."""
    for name, task in tasks.items():
        if task.OUTPUT_TYPE == "generate_until":
            wanted = (task.config.generation_kwargs or {}).get("max_gen_toks", GENERATED)
            if wanted >= max_length:
                raise ValueError(
                    f"task {name!r} generates up to {wanted} tokens, and the model's longest context is {max_length}: "
                    f"no room is left for a question. Set --tokens-per-row (max_length in Python) above {wanted}, as "
                    "far as the model was made for it"
                )


def definition(name: str, index: Mapping[str, Any]) -> str:
    files = [[leaf, without_folder(config)] for leaf, config in leaves(name, index)]
    return hashlib.sha256(json.dumps(files, sort_keys=True, default=str).encode()).hexdigest()


def without_folder(config: Mapping[str, Any] | None) -> Any:
    """A configuration whose functions have no path: the index spells them with the folder of their file."""
    return json.loads(
        json.dumps(config, default=str), object_hook=lambda fields: {key: bare(value) for key, value in fields.items()}
    )


def bare(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value
