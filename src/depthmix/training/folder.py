"""A run's folder: its lock and configuration, its result, and what stops a run: signals, and ranks that end."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from depthmix.parallel import ranks
from depthmix.support.checks import check_fields
from depthmix.support.files import format_of, lock, parse_toml, read_object, read_text, write_text
from depthmix.training.build import RESULT_AGAIN, check_final, read_config
from depthmix.training.checkpoint import on_rank_0
from depthmix.training.config import RESTORE, TrainConfig
from depthmix.training.identity import difference, digest_of
from depthmix.training.manifest import list_checkpoints

CONFIG, RESULT = "config.toml", "result.json"
REPEAT = 1.0  # seconds within which a second signal counts as a repeat of the first
MEASURED = ("trace.json", "trace.safetensors", "ablation.json", "measured")  # of its weights
RUN_FILES = (RESULT, "final", "base", "checkpoints", "snapshots", "metrics.jsonl", "tensorboard", "wandb", *MEASURED)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a complete run, as in `result.json`."""

    steps: int
    tokens: int
    seconds: float  # spent on training steps
    tokens_per_second: float
    validation_loss: float
    bits_per_byte: float
    peak_memory_bytes: int
    flops: int  # counted from the model's equations
    parameters: int
    config_digest: str
    data_digest: str
    mixer: Mapping[str, Any] | None = None  # with every option; None in results of format 1
    kv_mixer: Mapping[str, Any] | None = None
    processor_seconds: float | None = None  # of the whole run; None in results of 0.1.0
    recording_seconds: float | None = None  # the part of it that diagnostics and snapshots took
    format: int = 1

    def __post_init__(self) -> None:
        check_fields(self)


@contextmanager
def claim_folder(config: TrainConfig, resume: bool) -> Iterator[None]:
    """While open, no other process can train in the folder. A run to be resumed must have the same configuration."""
    folder = Path(config.run.folder)
    held_lock = ExitStack()
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):  # torchrun repeats the command after a rank has died:
        resume = True  # what `resume=False` was meant to remove is gone, and this run is to continue

    def claim() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        held_lock.enter_context(run_lock(folder))
        has_config = (folder / CONFIG).is_file()
        has_run = bool(list_checkpoints(folder / "checkpoints")) or (folder / RESULT).is_file()
        if has_run and not has_config:
            raise FileNotFoundError(f"{folder / CONFIG} of this run is missing. Restore it, or choose another folder")
        before = read_config(folder) if has_config else None  # raises an error if depthmix did not write it
        if before is not None and has_run and resume:
            check_same(before, config, f"{folder} contains a run with another configuration")
        elif before is not None:  # without a configuration, files of these names belong to no run
            remove_run(folder)
        if before is None or (before.saved() != config.saved() and not (folder / RESULT).is_file()):
            write_text(folder / CONFIG, config.to_toml())

    try:
        on_rank_0(claim)
        yield
    finally:
        held_lock.close()


def check_same(old: TrainConfig, new: TrainConfig, problem: str) -> None:
    if lines := difference(old, new):
        message = "\n  ".join([f"{problem}:", *lines])
        raise ValueError(
            f"{message}\nChoose another folder, use the earlier configuration, or train from step 0 with --restart "
            "(resume=False in Python)"
        )


def remove_run(folder: Path) -> None:
    """Remove all but the configuration, which still marks the folder as a run's if the removal is interrupted."""
    for path in (folder / name for name in RUN_FILES):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def run_lock(folder: Path) -> AbstractContextManager[None]:
    return lock(
        folder / "lock", f"another process is training in {folder}; wait for it to finish, or choose another folder"
    )


def finished_result(config: TrainConfig) -> Result | None:
    """The result of a complete run, after its model was checked; None if there is no result."""
    folder = Path(config.run.folder)
    path = folder / RESULT
    if not path.is_file():
        return None
    content = read_object(path, RESULT_AGAIN)
    format_of(content, path)
    try:
        result = Result(**content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}). {RESULT_AGAIN}") from error
    if result.config_digest not in (config.digest, old_digest(folder / CONFIG) if result.format == 1 else None):
        raise ValueError(f"{path} and {CONFIG} in its folder belong to different configurations. Choose another folder")
    try:
        check_final(config, folder / "final")
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}. Or remove {path}, and `depthmix train` creates both again") from error
    return result


def old_digest(path: Path) -> str:
    """The digest as 0.1.0 computed it, from the options that were given."""
    return digest_of(TrainConfig.from_dict(parse_toml(read_text(path, RESTORE), str(path), RESTORE)).to_dict())


def write_result(folder: Path, result: Result) -> Result:
    if ranks.rank() == 0:
        write_text(folder / RESULT, json.dumps(dataclasses.asdict(result), indent=2) + "\n")
    return result


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM set a flag, which the loop reads after each step; a second, later signal stops at once.

    A signal that follows within `REPEAT` seconds is ignored: torchrun sends its processes again what the terminal has
    already sent them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    requests: list[float] = []  # time of the first
    handlers: dict[signal.Signals, Any] = {}

    def request(number: int, frame: Any) -> None:
        if requests and time.monotonic() - requests[0] > REPEAT:
            restore()
            signal.raise_signal(number)
        elif not requests:
            requests.append(time.monotonic())
            if ranks.rank() == 0:  # unbuffered: the signal may have interrupted sys.stderr
                os.write(2, b"\ndepthmix: saving a checkpoint, then stopping; press Ctrl-C again to stop at once\n")

    def restore() -> None:
        for each, handler in handlers.items():
            signal.signal(each, handler)

    for each in (signal.SIGINT, signal.SIGTERM):
        handlers[each] = signal.signal(each, request)
    try:
        yield lambda: bool(requests)
    finally:
        if not requests:  # otherwise the next signal restores them, unless it repeats the first
            restore()


class LostContact(ConnectionError):
    """Another rank has ended, or did not answer in time."""


@contextmanager
def rank_contact() -> Iterator[None]:
    """Raise a short error where communication fails: only the rank that ended first can say more."""
    schedules = logging.getLogger("torch.distributed.pipelining.schedules")
    schedules.addFilter(is_no_error)
    try:
        yield
    except RuntimeError as error:
        if ranks.launched() == 1 or not (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
            raise
        reason = re.sub(r"\[/\S+\] ", "", str(error)).split(". ")[0].splitlines()[0]  # without torch's line of code
        raise LostContact(
            f"rank {os.environ['RANK']}: lost contact with another rank ({reason}), whose own messages say why it "
            "ended. The checkpoints are intact; torchrun --max-restarts N restarts all ranks from the newest one"
        ) from error
    finally:
        schedules.removeFilter(is_no_error)


def is_no_error(record: logging.LogRecord) -> bool:
    """False for the whole schedule, which torch prints before it raises an error."""
    return record.levelno < logging.ERROR
