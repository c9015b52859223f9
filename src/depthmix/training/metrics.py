"""The metrics of a run: one JSON object per line, the trackers that receive them too, and memory."""

from __future__ import annotations

import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from depthmix.ops.memory import status
from depthmix.support.checks import import_package
from depthmix.support.files import write_text

METRICS = "metrics.jsonl"


class MetricsFile:
    """`metrics.jsonl`: each step once, whatever happened on the way."""

    def __init__(self, path: Path, step: int, tracker: str = "none") -> None:
        """Lines beyond `step` are of a future that a restart runs again: they are removed, and so is half a line."""
        # The tracker first: wandb's reads what was sent to it from the lines that are removed here.
        self.track, self.close_tracker = TRACKERS[tracker](path.parent, step)
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        write_text(path, "".join(json_line(line) for line in kept))
        self.file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        try:
            self.file.write(json_line(line))
            self.file.flush()
        except OSError as error:
            reason = f"{os.strerror(error.errno or 0)}; the checkpoints are unchanged"
            raise OSError(error.errno, reason, self.file.name) from error
        self.track(line)

    def sync(self) -> None:
        """Before a checkpoint: after a crash of the machine no line up to it is missing."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.close_tracker()
        with suppress(OSError):  # every line was flushed, and a full disk has raised its error there
            self.file.close()


def json_line(line: Mapping[str, Any]) -> str:
    """Valid JSON for every reader: a number that is not finite becomes the text "nan", "inf" or "-inf"."""

    def writable(value: Any) -> Any:
        if isinstance(value, list):
            return [writable(each) for each in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({key: writable(value) for key, value in line.items()}, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a `metrics.jsonl`; none where there is no file."""
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:  # cut by a kill
            continue
    return [line for line in lines if isinstance(line, dict) and "step" in line]


Tracker = tuple[Callable[[Mapping[str, Any]], None], Callable[[], None]]  # takes a line; is called at the end


def no_tracker(folder: Path, step: int) -> Tracker:
    return lambda line: None, lambda: None


def tensorboard_tracker(folder: Path, step: int) -> Tracker:
    import_package("tensorboard", "run.tracker='tensorboard'", "'depthmix[tensorboard]'")
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def track(line: Mapping[str, Any]) -> None:
        for key, value in scalars(line):
            board.add_scalar(key, value, line["step"])

    return track, board.close


def trackio_tracker(folder: Path, step: int) -> Tracker:
    trackio = import_package("trackio", "run.tracker='trackio'", "'depthmix[trackio]'")
    trackio.init(project="depthmix", name=folder.as_posix(), resume="allow" if step else "never")
    return lambda line: trackio.log(dict(scalars(line)), step=line["step"]), trackio.finish


def wandb_tracker(folder: Path, step: int) -> Tracker:
    """The id of the run is kept in the run's folder, so that a resumed run continues the same one."""
    wandb = import_package("wandb", "run.tracker='wandb'", "'depthmix[wandb]'")
    id_file = folder / "wandb" / "run_id"
    sent = 0  # wandb's steps never go back: those that a resumed run repeats are there already
    if id_file.is_file():
        sent = max((line["step"] for line in read_metrics(folder / METRICS)), default=0)
    else:
        write_text(id_file, uuid.uuid4().hex)
    try:
        run = wandb.init(
            project="depthmix",
            name=folder.as_posix(),
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(folder),
            settings=wandb.Settings(console="off"),
        )
    except wandb.Error as error:
        raise OSError(
            f"run.tracker='wandb' could not start ({error}). Run `wandb login`, or set WANDB_MODE=offline to record "
            "without a network"
        ) from error

    def track(line: Mapping[str, Any]) -> None:
        if line["step"] > sent:
            run.log(dict(scalars(line)), step=line["step"])

    return track, run.finish


TRACKERS: dict[str, Callable[[Path, int], Tracker]] = {
    "none": no_tracker,
    "tensorboard": tensorboard_tracker,
    "trackio": trackio_tracker,
    "wandb": wandb_tracker,
}


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if key in ("kind", "step"):
            continue
        yield from numbers_in(f"{line['kind']}/{key}", value)


def numbers_in(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number of nested lists, by its path; words are left out."""
    if isinstance(value, list):
        for i, part in enumerate(value):
            yield from numbers_in(f"{key}/{i}", part)
    elif value is not None and not isinstance(value, str):
        yield key, float(value)


def memory_bytes(device: torch.device) -> int:
    """The most that this process has held at once: on the device, or resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        return status("VmHWM")
    except (OSError, KeyError):  # no Linux; what getrusage says there is not inherited from the parent, as it is here
        pass
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
