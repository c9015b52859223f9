"""Checkpoints that are complete or absent, written by torch.distributed.checkpoint as safetensors.

`checkpoints/step-00001000/` holds one safetensors file per rank, `state.json` (everything that is not a tensor) and
`manifest.json` with the size and SHA-256 of these files. It is written under a temporary name, flushed and renamed.
Nothing is ever unpickled: DCP's own format keeps its metadata in a pickle, so its safetensors form is used instead; and
only the manifest is read before all hashes have been checked.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from depthmix.mechanisms.record import is_record
from depthmix.parallel import ranks
from depthmix.support.files import flush, read_json
from depthmix.training.manifest import STATE, list_checkpoints, newest_intact, path_of, step_of, write_manifest

PART = ".part"  # suffix of a checkpoint that is being written or removed
SEPARATOR = "|"  # between the keys of nested mappings


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; earlier ones are unchanged."""


def save(
    folder: Path, step: int, state: Mapping[str, Any], *, keep: int = 3, asynchronous: bool = False
) -> Future[None] | None:
    """Write nested mappings of tensors and JSON values; then remove all but the newest `keep` checkpoints.

    Asynchronous: tensors are copied, and a thread writes the copies. The future's `result()` raises any error; wait for
    it before the next save. With several ranks, every rank must call this.
    """
    tensors, rest = flatten(state)
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    if not asynchronous:
        write(folder, step, tensors, rest, keep, None)
        return None
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    rest = json.loads(json.dumps(rest))
    # Messages of the writers must not mix with those of training, which continues.
    group = dist.new_group(backend="gloo") if ranks.is_distributed() else None
    pool = ThreadPoolExecutor(1)
    future = pool.submit(write, folder, step, copies, rest, keep, group)
    pool.shutdown(wait=False)
    return future


def write(folder: Path, step: int, tensors: dict[str, Tensor], rest: Any, keep: int, group: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    target, part = path_of(folder, step), path_of(folder, step).with_suffix(PART)
    try:
        on_rank_0(lambda: make_part(part), group)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "assuming the intent is to save in a single process"
            dcp_save(
                tensors,
                storage_writer=HuggingFaceStorageWriter(str(part), save_distributed=True),
                process_group=group,
                no_dist=not ranks.is_distributed(),
            )
        on_rank_0(lambda: finalize(part, target, step, rest), group)
    except (OSError, CheckpointException) as error:
        if ranks.rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
        others = [path.name for path in list_checkpoints(folder)]
        kept = f"Unchanged in {folder}: {', '.join(others)}" if others else f"{folder} has no earlier checkpoint"
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written: {reason_of(error)}. {kept}"
        ) from error
    finally:
        if group is not None:
            dist.destroy_process_group(group)
    if ranks.rank() == 0:
        remove_old(folder, step, keep)


def remove_old(folder: Path, step: int, keep: int) -> None:
    saved = list_checkpoints(folder)
    newer = [path for path in saved if step_of(path) > step]  # damaged: this run did not resume from them
    for path in newer + [path for path in saved if step_of(path) <= step][:-keep]:
        with suppress(OSError):  # the new checkpoint is there; the next save tries again
            shutil.rmtree(path.rename(path.with_suffix(PART)))  # killed here, none looks damaged


def on_rank_0(work: Callable[[], Any], group: Any = None) -> Any:
    """What the work returns on rank 0, which alone does it; if it fails, every rank raises the same error."""
    if not ranks.is_distributed():
        return work()
    result, problem = None, None
    if ranks.rank() == 0:
        try:
            result = work()
        except (OSError, ValueError, TypeError) as error:
            problem = error
    shared = [result, problem]
    dist.broadcast_object_list(shared, 0, group)
    result, problem = shared
    if problem is not None:
        raise problem
    return result


def make_part(part: Path) -> None:
    for path in part.parent.glob(f"*{PART}"):  # left by a process that was killed
        shutil.rmtree(path)
    part.mkdir(parents=True)


def finalize(part: Path, target: Path, step: int, rest: Any) -> None:
    (part / STATE).write_text(json.dumps(rest), encoding="utf-8")
    write_manifest(part, step)
    for path in (*part.iterdir(), part):
        flush(path)
    if target.exists():  # damaged: otherwise this run would have resumed from it
        shutil.rmtree(target)
    part.rename(target)
    flush(target.parent)


def reason_of(error: BaseException) -> str:
    """The message of an error; DCP keeps the errors of all ranks inside its own exception."""
    failures = getattr(error, "failures", None)
    if failures:
        return "; ".join(
            f"rank {rank}: {failure[0] if isinstance(failure, tuple) else failure}"
            for rank, failure in failures.items()
        )
    return str(error)


def load_latest(
    folder: Path, into: Mapping[str, Any] | None = None, *, part: bool = False
) -> tuple[int, dict[str, Any]] | None:
    """The step and state of the newest intact checkpoint; None if there is none.

    Damaged ones are skipped, with a message on stderr; one of another format version is an error. `into` holds tensors,
    possibly sharded, to be filled in place; without it new ones are created. The checkpoint must have the tensors of
    `into` and no others; with `part=True` it may have others, which are not read: `{"model": segment.state_dict()}`
    loads a segment of the model.

    With several ranks, every rank must call this. Each fills the tensors that it gives, and the checkpoint must have
    those of all ranks together. An error is raised on every rank alike.
    """
    step = on_rank_0(lambda: newest_intact(folder))
    return None if step < 0 else (step, read(path_of(folder, step), into, part))


def read(path: Path, into: Mapping[str, Any] | None, part: bool = False) -> dict[str, Any]:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    rest, stored = on_rank_0(lambda: describe(path))
    if into is None:
        tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in stored.items()}
    else:
        tensors, _ = flatten(into)
        tensors = {name: t for name, t in tensors.items() if not is_record(name)}  # `config` has the same content
        wanted = shapes_on_all_ranks(tensors)
        shapes = {name: size for name, (size, _) in stored.items() if not is_record(name)}
        if part:
            check_has(path, wanted, shapes)
            shapes = {name: shapes[name] for name in wanted}
        check_fit(path, wanted, shapes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(
                tensors,
                storage_reader=HuggingFaceStorageReader(str(path)),
                no_dist=into is None or not ranks.is_distributed(),
            )
    except CheckpointException as error:
        raise OSError(f"{path} could not be read: {reason_of(error)}") from error
    return unflatten(tensors, rest)


def describe(path: Path) -> tuple[dict[str, Any], dict[str, tuple[list[int], torch.dtype]]]:
    """Everything in a checkpoint that is not a tensor, and the shape and dtype of each tensor."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    rest = read_json(path / STATE, "Remove this checkpoint to use an older one")
    stored: dict[str, Any] = dict(HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata)
    return rest, {name: ([*meta.size], meta.properties.dtype) for name, meta in stored.items()}


def shapes_on_all_ranks(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The shapes of the tensors that the ranks hold together: each rank of a pipeline has a part of them."""
    shapes = {name: [*tensor.shape] for name, tensor in tensors.items()}
    if not ranks.is_distributed():
        return shapes
    of_ranks: list[Any] = [None] * ranks.world_size()
    dist.all_gather_object(of_ranks, shapes)
    return {name: shape for of_rank in of_ranks for name, shape in of_rank.items()}


def check_has(path: Path, wanted: Iterable[str], stored: Collection[str]) -> None:
    if missing := sorted(set(wanted) - set(stored)):
        more = f" and {len(missing) - 1} more tensors" if missing[1:] else ""
        raise ValueError(
            f"{path} has no {missing[0]}{more}; expected every tensor of the part to load. Choose another folder, or "
            "another part of the model"
        )


def check_fit(path: Path, wanted: Mapping[str, list[int]], stored: Mapping[str, list[int]]) -> None:
    wrong = sorted(name for name in {*wanted, *stored} if wanted.get(name) != stored.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{path} belongs to another model: {name} has shape {stored.get(name)}, expected {wanted.get(name)}"
            f"{f' ({len(wrong) - 1} more tensors differ)' if wrong[1:] else ''}. Choose another folder"
        )


def flatten(state: Mapping[str, Any], above: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by their joined keys, and everything else nested as before."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{above}{SEPARATOR}{key}" if above else key
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
        *above, last = name.split(SEPARATOR)
        mapping = rest
        for key in above:
            mapping = mapping.setdefault(key, {})
        mapping[last] = tensor
    return rest
