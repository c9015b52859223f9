"""A run's folder: whose it is, whether it is complete, and how a run is asked to stop."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from depthmix.models.io import check_weights
from depthmix.support.files import format_of, parse_toml, read_object, read_text, write_text
from depthmix.training import ranks
from depthmix.training.build import RESULT_AGAIN, read_config
from depthmix.training.checkpoint import checkpoints
from depthmix.training.config import RESTORE, TrainConfig
from depthmix.training.identity import difference, digest_of

CONFIG, RESULT = "config.toml", "result.json"
PATIENCE = 1.0  # seconds
OWN = (RESULT, "final", "checkpoints", "snapshots", "metrics.jsonl", "tensorboard")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a complete run found, as `result.json` holds it."""

    steps: int
    tokens: int
    seconds: float  # of training work
    tokens_per_second: float
    validation_loss: float
    bits_per_byte: float
    peak_memory_bytes: int
    flops: int  # of the model, by count
    parameters: int
    config_digest: str
    data_digest: str
    mixer: Mapping[str, Any] | None = None  # with every option; None in results of format 1
    kv_mixer: Mapping[str, Any] | None = None
    format: int = 1


@contextmanager
def claimed(config: TrainConfig, resume: bool) -> Iterator[None]:
    """The folder is this run's while it is open: no other process trains in it, and nothing that could go on is of
    another configuration."""
    folder = Path(config.run.folder)
    handle: list[IO[str]] = []

    def claim() -> None:
        if ranks.rank() != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        handle.append(locked(folder / "lock"))
        there = (folder / CONFIG).is_file()
        held = bool(checkpoints(folder / "checkpoints")) or (folder / RESULT).is_file()
        if held and not there:
            raise FileNotFoundError(f"no {folder / CONFIG} beside its run. Bring it back, or choose another folder")
        before = read_config(folder) if there else None  # an error where it is none of ours
        if before is not None and held and resume:
            check_same(before, config, f"{folder} holds a run of another configuration")
        elif before is not None:  # else these names are not ours
            clear(folder)
        if before is None or (before.saved() != config.saved() and not (folder / RESULT).is_file()):
            write_text(folder / CONFIG, config.to_toml())

    try:
        ranks.first_then_others(claim)
        yield
    finally:
        for file in handle:
            file.close()


def check_same(there: TrainConfig, now: TrainConfig, problem: str) -> None:
    if lines := difference(there, now):
        told = "\n  ".join([f"{problem}:", *lines])
        raise ValueError(f"{told}\nChoose another folder, or the configuration that is there")


def clear(folder: Path) -> None:
    """All but the configuration: a folder that was cleared by half is still ours."""
    for path in (folder / name for name in OWN):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def locked(path: Path) -> IO[str]:
    """The lock goes with the process, however it ends."""
    file = path.open("w")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ModuleNotFoundError:  # Windows
        pass
    except BlockingIOError:
        file.close()
        raise ValueError(f"another process trains in {path.parent}; wait for it, or choose another folder") from None
    return file


def finished(config: TrainConfig) -> Result | None:
    """The result of a complete run, whose model was found to be whole; None where there is no result."""
    folder = Path(config.run.folder)
    path = folder / RESULT
    if not path.is_file():
        return None
    about = read_object(path, RESULT_AGAIN)
    format_of(about, path)
    try:
        found = Result(**about)
    except TypeError as error:
        raise ValueError(f"{path} is damaged ({error}). {RESULT_AGAIN}") from error
    if found.config_digest not in (config.digest, digest_of_old(folder / CONFIG) if found.format == 1 else None):
        raise ValueError(f"{path} is of another configuration than {CONFIG} beside it. Choose another folder")
    try:
        check_weights(folder / "final")
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}. Or remove {path}, and `depthmix train` makes both again") from error
    return found


def digest_of_old(path: Path) -> str:
    """As 0.1.0 computed it, of the options that were given."""
    return digest_of(TrainConfig.from_dict(parse_toml(read_text(path, RESTORE), str(path), RESTORE)).to_dict())


def write_result(folder: Path, result: Result) -> Result:
    if ranks.rank() == 0:
        write_text(folder / RESULT, json.dumps(dataclasses.asdict(result), indent=2) + "\n")
    return result


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM set a flag, which the loop asks after a whole step; another one, later, ends at once.

    Not one that comes with the first: torchrun hands on to its processes what the terminal has sent them already.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked: list[float] = []
    before: dict[signal.Signals, Any] = {}

    def ask(number: int, frame: Any) -> None:
        if asked and time.monotonic() - asked[0] > PATIENCE:
            restore()
            signal.raise_signal(number)
        elif not asked:
            asked.append(time.monotonic())
            if ranks.rank() == 0:  # past the buffers of sys.stderr, which this may have interrupted
                os.write(2, b"\ndepthmix: stopping, with a checkpoint; again to stop at once\n")

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    for each in (signal.SIGINT, signal.SIGTERM):
        before[each] = signal.signal(each, ask)
    try:
        yield lambda: bool(asked)
    finally:
        if not asked:  # else the next signal restores them, unless it belongs to the first
            restore()
