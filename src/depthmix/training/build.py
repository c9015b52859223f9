"""The initial model of a run, and models loaded from a run's folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from depthmix.data import ByteTokenizer, Corpus, FileTokenizer, prepare
from depthmix.data.tokenizers import TOKENIZER_FILE, BatchTokenizer
from depthmix.mechanisms.record import with_records
from depthmix.models import Decoder, count_parameters, load_model, save_model
from depthmix.models.decoder import empty_decoder
from depthmix.models.io import refuse_functions
from depthmix.parallel import ranks
from depthmix.support.checks import check_device, check_memory, user_path
from depthmix.support.files import format_of, parse_toml, read_object, read_text, seed_of
from depthmix.training import checkpoint
from depthmix.training.config import RESTORE, DataConfig, TrainConfig

RESULT_AGAIN = "Remove it, and `depthmix train` creates it again from the newest checkpoint"


def open_corpus(data: DataConfig) -> Corpus:
    """The tokens that a configuration names, prepared if they do not exist yet."""
    return prepare(
        data.source, tokenizer=data.tokenizer, folder=data.path, validation=data.validation, field=data.field
    )


def check_tokens(corpus: Corpus, digest: str, folder: Path) -> None:
    if digest != corpus.digest:
        raise ValueError(
            f"the tokens in {corpus.folder} are not those that {folder} was trained on (digest {corpus.digest[:12]}, "
            f"expected {digest[:12]}). Restore the data, or choose another folder"
        )


def check_outside_source(data: DataConfig, folder: Path) -> None:
    """Raise an error if files written to `folder` would be read as training text."""
    source, target = user_path(data.source), folder.resolve()
    if data.source != "stdlib" and source.is_dir() and source.resolve() in (target, *target.parents):
        raise ValueError(
            f"folder={folder} is inside data.source={data.source}, so files written there would be read as text. "
            "Choose a folder outside it"
        )


def initial_model(config: TrainConfig) -> Decoder:
    """Each parameter is drawn by (seed, its name), so parameters that two models share start equal."""
    seed, draw = config.run.seed, config.run.weights_seed
    size = count_parameters(config.model).total
    copies = 3 if config.run.device == "cpu" else 1  # for another device, only the weights are created here
    check_memory(
        f"{size:,} parameters{' with their gradients and the state of the optimiser' if copies > 1 else ''}",
        4.0 * copies * size,
        "Choose a smaller depth, model.dim or model.vocab_size",
    )
    model = empty_decoder(config.model)
    model.reset_parameters(seed=seed_of(seed, "weights", draw) if draw else seed)
    return model.train()


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise an OSError where safetensors raises its own error, such as for a full disk."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def export(model: Decoder, directory: Path, tokenizer: Path | None = None) -> None:
    """Save weights, configuration and tokenizer for `depthmix generate`; the model may be sharded."""
    tensors = {name: ranks.full_tensor(tensor) for name, tensor in model.state_dict().items()}
    if ranks.rank() == 0:
        with torch.device("meta"):
            plain = Decoder(model.config)
        plain.load_state_dict(tensors, assign=True)
        with disk_errors():
            save_model(plain, directory)
        if tokenizer is not None and tokenizer.is_file():
            shutil.copyfile(tokenizer, directory / "tokenizer.json")


class OpenedRun(NamedTuple):
    model: Decoder
    digest: str  # of the tokens that it was trained on
    step: int | None  # of the checkpoint that it was read from; None: the run is finished


def load_run(folder: str | os.PathLike[str], device: torch.device | str = "cpu") -> Decoder:
    """The model of a run: the final one if it is complete, otherwise that of its newest checkpoint."""
    return open_run(Path(folder), device).model


def open_run(
    folder: Path, device: torch.device | str, *, dtype: torch.dtype | None = None, functions: bool = True
) -> OpenedRun:
    """The model of a run, in evaluation mode; `dtype` and `functions` as in `load_model`."""
    if not functions:
        check_functions(folder / "config.toml")
    if (folder / "final").is_dir() and (folder / "result.json").is_file():
        result = read_object(folder / "result.json", RESULT_AGAIN, ("data_digest",))
        format_of(result, folder / "result.json")
        model = load_model(folder / "final", device=device, dtype=dtype, functions=functions)
        return OpenedRun(model, result["data_digest"], None)
    config = read_config(folder)
    newest = checkpoint.load_latest(folder / "checkpoints")
    if newest is None:
        raise FileNotFoundError(
            f"{folder} has neither a final model nor a checkpoint; expected a run with at least one checkpoint"
        )
    model = Decoder(config.model)
    step, state = newest
    model.load_state_dict(with_records(model, state["model"]))
    for parameter in model.parameters() if dtype is not None else ():
        parameter.data = parameter.data.to(dtype)  # buffers keep theirs, as in `load_model`
    return OpenedRun(model.to(check_device(str(device))).eval(), state["corpus"], step)


def check_functions(path: Path) -> None:
    """Refuse a run whose configuration names functions to import, before it is read as one: that imports them."""
    model = parse_toml(read_text(path, RESTORE), str(path), RESTORE).get("model")
    if isinstance(model, dict):
        refuse_functions(path, model)


def run_tokenizer(folder: Path, data: DataConfig) -> BatchTokenizer:
    """As in training: nothing is put around a text, nothing is cut off."""
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    file = tokenizer_file(folder, data)
    if not file.is_file():
        raise FileNotFoundError(f"no {file}; expected the tokenizer that {folder} was trained with")
    return FileTokenizer(file)


def tokenizer_file(folder: Path, data: DataConfig) -> Path:
    """The copy beside the finished model, else the one beside the tokens."""
    final = folder / "final" / TOKENIZER_FILE
    return final if final.is_file() else data.path / TOKENIZER_FILE


def read_config(folder: str | os.PathLike[str]) -> TrainConfig:
    path = Path(folder) / "config.toml"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}; expected the folder of a `depthmix train` run")
    return TrainConfig.from_file(path)
