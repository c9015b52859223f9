"""Checkpoints that are whole or not there, written by torch.distributed.checkpoint as safetensors.

`checkpoints/step-00001000/` holds one safetensors file a rank, `state.json` (all that is no tensor) and `manifest.json`
with the size and SHA-256 of both kinds. It is written under another name beside, flushed and renamed. Nothing is ever
unpickled: DCP's own format keeps its metadata in a pickle, so its safetensors form is used instead; and nothing but the
manifest is read before all hashes have been checked.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from depthmix.mechanisms.record import is_record
from depthmix.support.files import digest, flush, read_json
from depthmix.training import ranks

FORMAT = 1
MANIFEST, STATE, PART = "manifest.json", "state.json", ".part"
SIGN = "|"  # between the keys of nested mappings


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written; those before it are as they were."""


def save(
    folder: Path, step: int, state: Mapping[str, Any], *, keep: int = 3, asynchronous: bool = False
) -> Future[None] | None:
    """Write nested mappings of tensors and of what JSON can hold; then remove all but the newest `keep`.

    Asynchronous: tensors are copied, and a thread writes the copies. The future's `result()` raises what went wrong;
    wait for it before the next save. Over several ranks every rank calls this.
    """
    tensors, rest = flatten(state)
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    if not asynchronous:
        write(folder, step, tensors, rest, keep, None)
        return None
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    rest = json.loads(json.dumps(rest))
    # Messages of the writers must not mix with those of the training that goes on.
    group = dist.new_group(backend="gloo") if ranks.several() else None
    pool = ThreadPoolExecutor(1)
    future = pool.submit(write, folder, step, copies, rest, keep, group)
    pool.shutdown(wait=False)
    return future


def write(folder: Path, step: int, tensors: dict[str, Tensor], rest: Any, keep: int, group: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    target, part = place(folder, step), place(folder, step).with_suffix(PART)
    try:
        together(lambda: fresh(part), group)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "assuming the intent is to save in a single process"
            dcp_save(
                tensors,
                storage_writer=HuggingFaceStorageWriter(str(part), save_distributed=True),
                process_group=group,
                no_dist=not ranks.several(),
            )
        together(lambda: seal(part, target, step, rest), group)
    except (OSError, CheckpointException) as error:
        if ranks.rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
        others = [path.name for path in checkpoints(folder)]
        kept = f"Intact in {folder}: {', '.join(others)}" if others else f"No earlier one is in {folder}"
        raise CheckpointError(f"the checkpoint of step {step} could not be written: {cause(error)}. {kept}") from error
    finally:
        if group is not None:
            dist.destroy_process_group(group)
    if ranks.rank() == 0:
        there = checkpoints(folder)
        newer = [path for path in there if number(path) > step]  # passed over, damaged, by an earlier start
        for path in newer + [path for path in there if number(path) <= step][:-keep]:
            shutil.rmtree(path, ignore_errors=True)


def together(work: Callable[[], None], group: Any) -> None:
    """On rank 0; all learn whether it went well."""
    problem: Exception | None = None
    if ranks.rank() == 0:
        try:
            work()
        except OSError as error:
            problem = error
    if ranks.several():
        failed = torch.tensor(float(problem is not None))
        dist.all_reduce(failed, group=group)
        if failed and problem is None:
            raise OSError("rank 0 could not write its files")
    if problem is not None:
        raise problem


def fresh(part: Path) -> None:
    for path in part.parent.glob(f"*{PART}"):  # of saves that were killed
        shutil.rmtree(path)
    part.mkdir(parents=True)


def seal(part: Path, target: Path, step: int, rest: Any) -> None:
    (part / STATE).write_text(json.dumps(rest), encoding="utf-8")
    files = {path.name: {"bytes": path.stat().st_size, "sha256": digest(path)} for path in sorted(part.iterdir())}
    manifest = {"format": FORMAT, "step": step, "files": files}
    (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in (*part.iterdir(), part):
        flush(path)
    if target.exists():  # found damaged at the start of this run, else it would have been passed
        shutil.rmtree(target)
    part.rename(target)
    flush(target.parent)


def cause(error: BaseException) -> str:
    """DCP keeps the reason of each rank inside its own exception."""
    failures = getattr(error, "failures", None)
    if failures:
        return "; ".join(
            f"rank {rank}: {found[0] if isinstance(found, tuple) else found}" for rank, found in failures.items()
        )
    return str(error)


def latest(folder: Path, into: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]] | None:
    """The newest whole checkpoint: its step and its state. Damaged ones are passed over, with a message on stderr; one
    of another version is an error.

    `into` holds tensors, sharded ones too, that are filled in place; without it they are made.
    """
    step = -1
    if ranks.rank() == 0:
        step = newest_whole(folder)
    if ranks.several():
        found = torch.tensor(step)
        dist.broadcast(found, 0)
        step = int(found)
    return None if step < 0 else (step, read(place(folder, step), into))


def newest_whole(folder: Path) -> int:
    there = checkpoints(folder)
    while there:
        path = there.pop()
        problem = damage(path)
        if problem is None:
            return number(path)
        next_ = f"Falling back to {there[-1].name}" if there else "No other is left: the run begins anew"
        print(f"depthmix: {problem}. {next_}", file=sys.stderr, flush=True)
    return -1


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, by its manifest; the whole work of another version is not called damaged."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(about["bytes"]), str(about["sha256"])) for name, about in manifest["files"].items()}
        version, step = manifest["format"], manifest["step"]
    except FileNotFoundError:
        return f"{path / MANIFEST} is missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{path / MANIFEST} is damaged ({type(error).__name__}: {error})"
    if version != FORMAT:
        raise ValueError(
            f"{path} has format {version!r}; this version of depthmix reads {FORMAT}. Go on with the one that wrote "
            "it, or choose another folder"
        )
    if step != number(path):
        return f"{path / MANIFEST} is of step {step}"
    if strange := sorted({p.name for p in path.iterdir()} - {*files, MANIFEST}):
        return f"{path} holds {', '.join(strange)}, which its manifest does not name"
    for name, (size, expected) in files.items():
        file = path / name
        if file.parent != path or not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size:,} bytes; its manifest expects {size:,}"
        if digest(file) != expected:
            return f"{file} is altered: its SHA-256 is not the one in {MANIFEST}"
    return None if STATE in files else f"{path / STATE} is missing"


def read(path: Path, into: Mapping[str, Any] | None) -> dict[str, Any]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    rest = read_json(path / STATE, "Remove this checkpoint, and an older one is taken")
    there: dict[str, Any] = dict(HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata)
    if into is None:
        tensors = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in there.items()}
    else:
        tensors, _ = flatten(into)
        tensors = {name: tensor for name, tensor in tensors.items() if not is_record(name)}  # `config` says the same
        shapes = {name: list(about.size) for name, about in there.items() if not is_record(name)}
        check_fit(path, {name: list(tensor.shape) for name, tensor in tensors.items()}, shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(
            tensors,
            storage_reader=HuggingFaceStorageReader(str(path)),
            no_dist=into is None or not ranks.several(),
        )
    return unflatten(tensors, rest)


def check_fit(path: Path, wanted: Mapping[str, list[int]], there: Mapping[str, list[int]]) -> None:
    wrong = sorted(name for name in {*wanted, *there} if wanted.get(name) != there.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{path} is of another model: {name} has shape {there.get(name)} there and {wanted.get(name)} here"
            f"{f', and {len(wrong) - 1} more differ' if wrong[1:] else ''}. Choose another folder"
        )


def place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """Those in place, oldest first."""
    return sorted((p for p in folder.glob("step-*") if p.is_dir() and p.name[5:].isdigit()), key=number)


def flatten(state: Mapping[str, Any], above: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by their joined keys, and the rest as it was."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{above}{SIGN}{key}" if above else key
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Mapping):
            inner, rest[key] = flatten(value, name)
            tensors.update(inner)
        else:
            rest[key] = value
    return tensors, rest


def unflatten(tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    for name, tensor in tensors.items():
        *above, last = name.split(SIGN)
        spot = rest
        for key in above:
            spot = spot.setdefault(key, {})
        spot[last] = tensor
    return rest
