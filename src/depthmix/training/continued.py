"""Continued pretraining of a model of transformers: its default configuration, its start, its files.

`depthmix.hf` is imported inside functions: `import depthmix.training` does not import transformers.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from depthmix.data import ByteTokenizer
from depthmix.data.tokenizers import TOKENIZER_FILE, vocabulary_size
from depthmix.parallel import ranks
from depthmix.parallel.layout import Layout, whole_layout
from depthmix.parallel.sharded import ShardedModel
from depthmix.support.checks import check_memory, user_path
from depthmix.support.files import parse_toml, read_text
from depthmix.training import checkpoint
from depthmix.training.card import training_facts
from depthmix.training.config import RESTORE, DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from depthmix.training.dial import split_mixer
from depthmix.training.retrofit import KIND, RetrofitConfig, count_parameters

BASE = "base"  # in a run's folder: what the model needs besides its weights
RATE, MIXER_RATE = 1e-4, 1e-3  # a trained model must not be shaken; with a frozen base nothing can be
STEPS, WARMUP = 1000, 0.05
ROW = 512  # tokens


def retrofit_config(
    folder: str,
    mixer: str = "residual",
    *,
    tokenizer: str | None = None,
    freeze_base: bool = False,
    blend: bool = True,
    run: str | None = None,
) -> TrainConfig:
    """The configuration by which a model of transformers is trained further, with a mechanism put into it.

    Args:
        folder: that of the model, which `save_pretrained` wrote, with safetensors.
        mixer: a mechanism's name; a KV mechanism alone uses the plain residual; join two with +. "residual" trains the
            model as it is.
        tokenizer: a tokenizer.json or bytes; None: that of the folder.
        freeze_base: train the mixers only.
        blend: let a KV mechanism add only g times its change, with one learned number g per layer that is 0 at first.
        run: folder of the run.
    """
    model = RetrofitConfig.of(folder, **split_mixer(mixer), blend=blend, freeze_base=freeze_base)
    name = f"{user_path(folder).resolve().name}-{mixer}"
    return TrainConfig(
        model=model,
        data=DataConfig(
            tokenizer=tokenizer or retrofit_tokenizer(folder), tokens_per_row=min(ROW, model.positions - 1)
        ),
        optimizer=OptimizerConfig(name="adamw", lr=retrofit_rate(model)),
        schedule=ScheduleConfig(warmup=WARMUP),
        run=RunConfig(folder=run or f"runs/{name}", steps=STEPS),
    )


def retrofit_tokenizer(folder: str) -> str:
    """The tokenizer of a folder, as a configuration names it."""
    from depthmix.hf.base import tokenizer_path

    return tokenizer_path(folder)


def retrofit_rate(model: RetrofitConfig) -> float:
    """The default learning rate, of both optimisers."""
    return MIXER_RATE if model.freeze_base else RATE


def check_retrofit(config: TrainConfig, model: RetrofitConfig) -> None:
    """Whether the folder is what it was, and rows and token ids fit the model; before any token is prepared."""
    check_unchanged(model)
    data = config.data
    if data.tokens_per_row >= model.positions:
        raise ValueError(
            f"data.tokens_per_row={data.tokens_per_row}; expected at most {model.positions - 1}: rows have one token "
            f"more, and the model in {model.from_hf} has {model.positions} positions"
        )
    if (size := vocabulary_size(data.tokenizer)) > model.vocab_size:
        raise ValueError(
            f"data.tokenizer={data.tokenizer} has {size} ids; expected at most {model.vocab_size}, the vocabulary of "
            f"the model in {model.from_hf}: use its own tokenizer"
        )


def retrofit_layout(config: TrainConfig, model: RetrofitConfig) -> Layout:
    """FSDP2 and copies of it; what is not there is refused by name."""
    check_retrofit(config, model)
    processes = ranks.launched()
    if config.run.compile and processes > 1:
        raise ValueError("run.compile=true on several processes with a model of transformers; expected false")
    if (every := config.run.recompute) not in (0, sites := model.depth // model.layers):
        raise ValueError(
            f"run.recompute={every}; expected 0 or {sites}: a layer of transformers, {sites} sublayers here, is "
            "recomputed as a whole"
        )
    return whole_layout(config.parallel, processes=processes, rows=config.data.rows)


def distribute_retrofit(
    config: TrainConfig, model: RetrofitConfig, layout: Layout, device: torch.device, seed: int, dtype: torch.dtype
) -> ShardedModel:
    """The model of the folder with its mixers at their start, on the ranks of a layout."""
    from depthmix.hf.base import load_folder
    from depthmix.hf.continued import ContinuedModel, draw_mixers, wrapped

    trains_all = config.run.device == "cpu" and not model.freeze_base  # gradients and optimiser need memory here too
    size = dtype.itemsize * count_parameters(model).total * (3 if trains_all and layout.size == 1 else 1)
    check_memory(f"parameters of {model.from_hf} and their training", size, "Choose a smaller model")
    base = Path(config.run.folder) / BASE
    checkpoint.on_rank_0(lambda: keep_companions(model.path, base))
    loaded = load_folder(model.path, dtype)
    module = wrapped(loaded, model.wrapping(), freeze_base=model.freeze_base)
    draw_mixers(module, seed)
    part = ContinuedModel(module, base)
    if config.run.recompute:
        part.recompute_layers()
    return ShardedModel(
        part,
        layout,
        device,
        compile=config.run.compile,
        bfloat16=config.run.precision == "bfloat16",
    )


def keep_companions(folder: Path, base: Path) -> None:
    """Copy what the model needs besides its weights into the run, unless it is there."""
    from depthmix.hf.base import CONFIG, copy_companions

    if not base.is_dir():
        copy_companions(folder, base)
    elif not (base / CONFIG).is_file() or (base / CONFIG).read_bytes() != (folder / CONFIG).read_bytes():
        raise ValueError(
            f"{base} is not the copy of {folder}'s configuration that this run would keep there. Remove it, or choose "
            "another folder for the run"
        )


def check_unchanged(model: RetrofitConfig) -> None:
    """The folder must hold what the run began with."""
    from depthmix.hf.base import digest_of_folder, sizes_of_folder

    if (digest := digest_of_folder(model.existing_path())) != model.digest:
        raise ValueError(
            f"{model.from_hf} has changed since the run began (digest {digest[:12]}, expected {model.digest[:12]}): "
            "its configuration, weights or tokenizer are others. Restore them, or begin another run"
        )
    for name, size in sizes_of_folder(model.path)._asdict().items():
        if (given := getattr(model, name)) != size:
            raise ValueError(f"model.{name}={given}; expected {size}, that of the folder {model.from_hf}")


def is_retrofit(folder: Path) -> bool:
    """Whether this is the folder of a run whose model comes from transformers."""
    path = folder / "config.toml"
    if not path.is_file():
        return False
    fields = parse_toml(read_text(path, RESTORE), str(path), RESTORE).get("model")
    return isinstance(fields, dict) and KIND in fields


def open_retrofit(
    folder: Path, config: TrainConfig, model: RetrofitConfig, final: bool, dtype: torch.dtype | None
) -> tuple[Any, str | None, int | None]:
    """The wrapped model of a run, finished or not, and of a checkpoint the digest of its tokens and its step."""
    from depthmix.hf.base import empty_model, load_folder
    from depthmix.hf.continued import check_saved, filled, load_continued, wrapped

    digest, step = None, None
    if final:
        check_saved(folder / "final")
        loaded = load_folder if model.is_plain else load_continued
        module = loaded(folder / "final", parameter_type(config))
        module = wrapped(module, model.wrapping()) if model.is_plain else module
    else:
        newest = checkpoint.load_latest(folder / "checkpoints")
        if newest is None:
            raise FileNotFoundError(f"{folder} has neither a final model nor a checkpoint; expected at least one")
        step, state = newest
        digest = state["corpus"]
        module = wrapped(empty_model(folder / BASE, parameter_type(config)), model.wrapping())
        filled(module, state["model"])
    for parameter in module.parameters() if dtype is not None else ():
        parameter.data = parameter.data.to(dtype)
    return module, digest, step


def parameter_type(config: TrainConfig) -> torch.dtype:
    return torch.float64 if config.run.precision == "float64" else torch.float32


def export_retrofit(module: Any, directory: Path, folder: Path, config: TrainConfig, tokenizer: Path | None) -> None:
    """Save a model of a run with the tokenizer that it was trained with, for the Auto classes of transformers."""
    from depthmix.hf.continued import save_continued
    from depthmix.hf.tokenizer import from_tokenizer

    assert isinstance(config.model, RetrofitConfig)
    given = None if config.uses_own_tokenizer else tokenizer
    with tempfile.TemporaryDirectory() as made:
        if config.data.tokenizer == "bytes":
            from_tokenizer(ByteTokenizer()).save_pretrained(made)
            given = Path(made) / TOKENIZER_FILE
        facts = training_facts(config)
        save_continued(module, directory, folder / BASE, given, plain=config.model.is_plain, training=facts)


def check_retrofit_files(directory: Path) -> None:
    from depthmix.hf.continued import check_saved

    check_saved(directory)


def warn_of_changes(model: RetrofitConfig) -> list[str]:
    """Sentences about mechanisms that do not keep the model's function at the start."""
    from depthmix.hf.base import empty_model
    from depthmix.hf.wrap import wrap

    fields = model.wrapping()
    mixer = {key: value for key, value in fields["mixer"].items() if key != "name"}
    with warnings.catch_warnings(record=True) as caught, torch.device("meta"):
        warnings.simplefilter("always", UserWarning)
        wrap(empty_model(model.path), fields["mixer"]["name"], kv_mixer=fields["kv_mixer"], blend=model.blend, **mixer)
    return [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
