"""What a run tells of itself: lines of JSON, norms over depth, and the mixing matrix of a fixed batch.

Axes: B batch, T token, D channel, L executions of sublayers.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.analysis import trace
from depthmix.models import Decoder
from depthmix.ops.memory import status
from depthmix.support.files import replacing, write_text
from depthmix.training import ranks
from depthmix.training.build import disk_errors

CHANNELS = 8  # of a mechanism whose weights differ by channel, so many are looked at


class Metrics:
    """`metrics.jsonl`: each step once, whatever happened on the way."""

    def __init__(self, path: Path, step: int, tracker: str = "none") -> None:
        """Lines beyond `step` are of a future that a restart runs again: they go, and so does half a line."""
        self.track, self.end = make_tracker(tracker, path.parent, step)
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        write_text(path, "".join(json_line(line) for line in kept))
        self.file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        try:
            self.file.write(json_line(line))
            self.file.flush()
        except OSError as error:
            why = f"{os.strerror(error.errno or 0)}; the checkpoints are as they were"
            raise OSError(error.errno, why, self.file.name) from error
        self.track(line)

    def sync(self) -> None:
        """Before a checkpoint: after a crash of the machine no line up to it is missing."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.end()
        with suppress(OSError):  # every line was flushed; of a full disk its own error tells
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
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # cut by a kill
            continue
    return [line for line in found if isinstance(line, dict) and "step" in line]


def make_tracker(name: str, folder: Path, step: int) -> tuple[Callable[[Mapping[str, Any]], None], Callable[[], None]]:
    """What takes a line, and what to call at the end."""
    if name == "none":
        return lambda line: None, lambda: None
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

            def track(line: Mapping[str, Any]) -> None:
                for key, value in scalars(line):
                    board.add_scalar(key, value, line["step"])

            return track, board.close
        trackio: Any = importlib.import_module(name)
        trackio.init(project="depthmix", name=folder.as_posix(), resume="allow" if step else "never")
        return lambda line: trackio.log(dict(scalars(line)), step=line["step"]), trackio.finish
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"run.tracker={name!r} needs the package {name}: pip install {name}") from error


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if key in ("kind", "step", "problem") or value is None:
            continue
        parts = enumerate(value) if isinstance(value, list) else [(None, value)]
        for i, part in parts:
            yield f"{line['kind']}/{key}" + ("" if i is None else f"/{i}"), float(part)


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


@contextmanager
def watching(model: Decoder) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """While open, the outputs of the sublayers as they run: root mean squares, and those of their gradients."""
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []

    def see(module: nn.Module, inputs: Any, found: tuple[Tensor, Any]) -> None:
        y = found[0]
        outputs.append(size(y))
        if y.requires_grad:
            y.register_hook(lambda g: gradients.append(size(g)))

    handles = [sublayer.register_forward_hook(see) for sublayer in model.sublayers]
    try:
        yield outputs, gradients
    finally:
        for handle in handles:
            handle.remove()


def size(x: Tensor) -> Tensor:
    return x.detach().float().norm() / x[..., 0].numel() ** 0.5  # mean over tokens of the squared norm, its root


def depth_norms(model: Decoder, loss: Callable[[], Tensor]) -> tuple[list[float], list[float]]:
    """Norms of every execution's output and of its gradient, on a batch that trains nothing."""
    was = model.training
    model.eval()  # experts do not count its tokens
    try:
        with watching(model) as (outputs, gradients):
            loss().backward()
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was)
    found = [torch.stack(each).double().tolist() for each in (outputs, gradients[::-1])]
    return found[0], found[1]


@torch.no_grad()
def query_norms(model: Decoder) -> list[float] | None:
    queries = [ranks.whole(q) for m in model.depth.all_mixers() if isinstance(q := getattr(m, "query", None), Tensor)]
    return [float(q.float().norm()) for q in queries] or None


def mixing(model: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    """M [L+1, L+1] averaged over tokens, heads and channels; the entropy of each row of it, token by token and then
    averaged; and the value matrix [N, N] where attention mixes values."""
    step = max(1, model.config.dim // CHANNELS)
    was = model.training
    model.eval()
    try:
        found = trace(model, tokens, channels=range(0, model.config.dim, step))
    finally:
        model.train(was)
    M = found.M.double()
    share = M.abs() / M.abs().sum(-1, keepdim=True).clamp(min=1e-300)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    about = {"M": M.flatten(0, -3).mean(0), "entropy": entropy.flatten(0, -2).mean(0)}
    if found.values is not None:
        about["values"] = found.values.double().flatten(0, -3).mean(0)
    return about


def save_snapshot(path: Path, step: int, config: Any, found: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    about = {"step": str(step), "mixer": json.dumps(config.saved()["mixer"])}
    with replacing(path) as part, disk_errors():
        save_file({name: tensor.float().contiguous() for name, tensor in found.items()}, part, about)


def largest_layer(model: Decoder, loss: Callable[[], Tensor]) -> str:
    """Where a bad loss comes from: the first sublayer whose output is not finite, else the one with the largest."""
    with torch.no_grad(), watching(model) as (outputs, _):
        loss()
    sizes = torch.stack(outputs).double()
    broken = (~sizes.isfinite()).nonzero()
    index = int(broken[0]) if len(broken) else int(sizes.argmax())
    layer, kind = model.config.layer_order[index // 2], ("attention", "MLP")[index % 2]
    return f"sublayers.{2 * layer + index % 2} ({kind}), output norm {float(sizes[index]):.4g}"
