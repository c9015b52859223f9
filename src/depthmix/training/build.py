"""The initial model of a run, and models loaded from a run's folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from depthmix.data import ByteTokenizer, Corpus, FileTokenizer, prepare
from depthmix.data.tokenizers import TOKENIZER_FILE, BatchTokenizer
from depthmix.mechanisms.record import with_records
from depthmix.models import Decoder, DecoderConfig, count_parameters, load_model, save_model
from depthmix.models.card import decoder_card, write_card
from depthmix.models.decoder import empty_decoder
from depthmix.models.io import check_weights, refuse_functions
from depthmix.parallel import ranks
from depthmix.parallel.distributed import DistributedDecoder
from depthmix.parallel.layout import Layout, make_layout
from depthmix.parallel.model import DistributedModel
from depthmix.support.checks import check_device, check_memory, user_path
from depthmix.support.files import format_of, parse_toml, read_object, read_text, seed_of
from depthmix.training import checkpoint
from depthmix.training.card import training_facts
from depthmix.training.config import RESTORE, DataConfig, TrainConfig
from depthmix.training.continued import (
    check_retrofit_files,
    distribute_retrofit,
    export_retrofit,
    is_retrofit,
    open_retrofit,
    retrofit_layout,
)
from depthmix.training.retrofit import RetrofitConfig

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


def layout_of(config: TrainConfig) -> Layout:
    """The processes of a run and their parts in it, or an error: before they communicate."""
    data, run, model = config.data, config.run, config.model
    if isinstance(model, RetrofitConfig):
        return retrofit_layout(config, model)
    return make_layout(
        config.parallel,
        model,
        processes=ranks.launched(),
        rows=data.rows,
        tokens=data.tokens_per_row + 1,
        accumulate=run.accumulate,
        dtype=getattr(torch, run.precision),
        compile=run.compile,
    )


def distribute(config: TrainConfig, layout: Layout, device: torch.device) -> DistributedModel:
    """The initial model of a run, on the ranks of its layout.

    Each parameter is drawn by (seed, its name), so parameters that two models share start equal, and so do the parts of
    a model on different ranks.
    """
    model = config.model
    if isinstance(model, RetrofitConfig):
        return distribute_retrofit(config, model, layout, device, weights_seed(config), parameter_dtype(config))
    size = count_parameters(model).total
    size //= layout.size // layout.replicate
    copies = 3 if config.run.device == "cpu" else 1  # for another device, only the weights are created here
    check_memory(
        f"{size:,} parameters{' with their gradients and the state of the optimiser' if copies > 1 else ''}",
        4.0 * copies * size * (2 if config.run.precision == "float64" else 1),
        "Choose a smaller depth, model.dim or model.vocab_size",
    )
    return DistributedDecoder(
        model,
        layout,
        device,
        prepare=lambda part: part.reset_parameters(seed=weights_seed(config)),
        dtype=parameter_dtype(config),
        recompute=config.run.recompute or None,
        compile=config.run.compile,
        bfloat16=config.run.precision == "bfloat16",
    )


def initial_model(config: TrainConfig) -> Decoder:
    """The initial model of a run in one process, as a plain decoder."""
    model = empty_decoder(decoder_of(config))
    model.reset_parameters(seed=weights_seed(config))
    return model.to(parameter_dtype(config)).train()


def decoder_of(config: TrainConfig) -> DecoderConfig:
    """The configuration of the decoder, or an error for a run of another model."""
    if not isinstance(config.model, DecoderConfig):
        raise ValueError(f"the model comes from {config.model.from_hf}; expected a depthmix decoder")
    return config.model


def weights_seed(config: TrainConfig) -> int:
    seed, draw = config.run.seed, config.run.weights_seed
    return seed_of(seed, "weights", draw) if draw else seed


def parameter_dtype(config: TrainConfig) -> torch.dtype:
    return torch.float64 if config.run.precision == "float64" else torch.float32


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise an OSError where safetensors raises its own error, such as for a full disk."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def export(
    model: nn.Module | None, directory: Path, config: TrainConfig, *, folder: Path, tokenizer: Path | None = None
) -> None:
    """Save weights, configuration and tokenizer for `depthmix generate`; `model` is None on all ranks but one.

    `folder` is that of the run, which may have been moved.
    """
    if model is None:
        return
    with disk_errors():
        if isinstance(config.model, RetrofitConfig):
            export_retrofit(model, directory, folder, config, tokenizer)
            return
        assert isinstance(model, Decoder)
        save_model(model, directory)
    write_card(directory, decoder_card(model, directory, training_facts(config)))
    if tokenizer is not None and tokenizer.is_file():
        shutil.copyfile(tokenizer, directory / "tokenizer.json")


def check_final(config: TrainConfig, directory: Path) -> None:
    """Check that the weights of a finished run are those that it wrote."""
    if isinstance(config.model, RetrofitConfig):
        check_retrofit_files(directory)
    else:
        check_weights(directory)


class OpenedRun(NamedTuple):
    model: Any  # a Decoder, or a wrapped model of transformers
    digest: str  # of the tokens that it was trained on
    step: int | None  # of the checkpoint that it was read from; None: the run is finished


def load_run(folder: str | os.PathLike[str], device: torch.device | str = "cpu") -> Any:
    """The model of a run: the final one if it is complete, otherwise that of its newest checkpoint.

    A `Decoder`; of a run that began with a model of transformers that model, wrapped.
    """
    return open_run(Path(folder), device).model


def open_run(
    folder: Path, device: torch.device | str, *, dtype: torch.dtype | None = None, functions: bool = True
) -> OpenedRun:
    """The model of a run, in evaluation mode; `dtype` and `functions` as in `load_model`."""
    if not functions:
        check_functions(folder / "config.toml")
    place, finished = check_device(str(device)), None
    if (folder / "final").is_dir() and (folder / "result.json").is_file():
        finished = read_object(folder / "result.json", RESULT_AGAIN, ("data_digest",))
        format_of(finished, folder / "result.json")
    if is_retrofit(folder):
        config = read_config(folder)
        assert isinstance(config.model, RetrofitConfig)
        module, digest, step = open_retrofit(folder, config, config.model, finished is not None, dtype)
        return OpenedRun(module.to(place).eval(), digest or (finished or {})["data_digest"], step)
    if finished is not None:
        model = load_model(folder / "final", device=device, dtype=dtype, functions=functions)
        return OpenedRun(model, finished["data_digest"], None)
    config = read_config(folder)
    newest = checkpoint.load_latest(folder / "checkpoints")
    if newest is None:
        raise no_model(folder)
    model = Decoder(decoder_of(config))
    step, state = newest
    model.load_state_dict(with_records(model, state["model"]))
    for parameter in model.parameters() if dtype is not None else ():
        parameter.data = parameter.data.to(dtype)  # buffers keep theirs, as in `load_model`
    return OpenedRun(model.to(place).eval(), state["corpus"], step)


def no_model(folder: Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"{folder} has neither a final model nor a checkpoint; expected a run with at least one checkpoint"
    )


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
