"""A folder that `save_pretrained` wrote, as the start of a run: its sizes, its digest and its model.

Only local folders with safetensors are read. Nothing is downloaded, unpickled or imported from the folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from depthmix.hf.families import family_of
from depthmix.hf.wrapped_config import MODEL_TYPE
from depthmix.support.checks import user_path
from depthmix.support.files import digest, flush, read_object

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
EXPECTED = "expected a local folder that save_pretrained of transformers wrote"
RESTORE = "Restore the folder, or choose another"
# What a model needs besides its weights; copied into the run, so that its model can be built without the folder.
COMPANIONS = (
    *(CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model"),
)


class Sizes(NamedTuple):
    """What a configuration says of its model, in depthmix's words."""

    vocab_size: int
    dim: int
    layers: int
    depth: int  # sublayers
    head_dim: int
    positions: int  # longest row


def read_config(folder: Path) -> Any:
    """The configuration of a model that can be wrapped; an error says what is wrong with any other folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"from_hf={folder} is not a folder; {EXPECTED}. Nothing is downloaded: save it there")
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}; {EXPECTED}")
    content = read_object(folder / CONFIG, RESTORE)
    check_kind(folder, content)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    family_of(config)
    return config


def check_kind(folder: Path, content: dict[str, Any]) -> None:
    """Refuse what is not a plain model of transformers."""
    kind = content.get("model_type")
    if kind is None:
        ours = ": dm.save_model wrote it, and `depthmix train` resumes runs, not models" if "format" in content else ""
        raise ValueError(f"{folder / CONFIG} has no model_type{ours}; {EXPECTED}")
    if kind in (MODEL_TYPE, "depthmix"):
        raise ValueError(
            f"{folder} holds a model that has a mechanism of depthmix already (model_type {kind!r}); expected one "
            "without: save it after dm.unwrap(model), or give the folder that its run began with"
        )
    if kind not in CONFIG_MAPPING:
        family_of(SimpleNamespace(model_type=kind))  # raises the error
    if content.get("quantization_config"):
        raise ValueError(f"{folder} holds quantised weights; expected weights in a floating-point type")


def check_weights(folder: Path) -> list[Path]:
    """The files of the weights, all safetensors."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for end in ("bin", "pt", "pth") for path in folder.glob(f"*.{end}"))
        has = f"has only pickled weights ({', '.join(pickled)}), which are never read" if pickled else "has no weights"
        raise ValueError(
            f"{folder} {has}; expected *.safetensors: load the model with transformers and save it again with "
            "save_pretrained"
        )
    return files


def sizes_of_folder(folder: Path) -> Sizes:
    """From the configuration alone."""
    return sizes_of_config(read_config(folder))


def sizes_of_config(config: Any) -> Sizes:
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    return Sizes(
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        layers=layers,
        depth=family_of(config).sites * layers,
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        positions=int(getattr(config, "max_position_embeddings", None) or 2**31),
    )


def digest_of_folder(folder: Path) -> str:
    """The SHA-256 of what decides a run: configuration, weights and tokenizer. It does not depend on the path."""
    read_config(folder)
    others = [folder / name for name in (CONFIG, TOKENIZER) if (folder / name).is_file()]
    files = [*others, *check_weights(folder), *sorted(folder.glob("*.safetensors.index.json"))]
    return digest_of_files(tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@functools.lru_cache(maxsize=8)
def digest_of_files(files: tuple[tuple[str, int, int], ...]) -> str:
    """Size and time are there for the cache: weights are large, and a command asks for their digest several times."""
    each = {Path(path).name: digest(Path(path)) for path, _, _ in files}
    return hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest()


def load_folder(folder: Path, dtype: torch.dtype) -> Any:
    """The model, on the CPU in memory of its own; every weight must be in the folder."""
    read_config(folder)
    check_weights(folder)
    loader: Any = AutoModelForCausalLM
    with without_bars():
        model, report = loader.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    for what, keys in (("lacks", report["missing_keys"]), ("has other shapes for", report["mismatched_keys"])):
        if keys:
            raise ValueError(f"{folder} {what} {sorted(map(str, keys))[0]} ({len(keys)} tensors in all). {RESTORE}")
    for parameter in model.parameters():  # not mapped from the file, whose alignment changes the last bits
        parameter.data = parameter.data.clone()
    return model


@contextmanager
def without_bars() -> Iterator[None]:
    """While open, transformers shows no progress bars of its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def empty_model(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A model of this configuration with weights of no meaning; on the device of the context."""
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(read_config(folder))
    return model if dtype is None else model.to(dtype)


def copy_companions(folder: Path, target: Path, names: tuple[str, ...] = COMPANIONS) -> None:
    """Copy the files besides the weights; `target` holds all of them or does not exist."""
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, part / name)
            flush(part / name)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    flush(target.parent)


def tokenizer_path(folder: str) -> str:
    """The folder's tokenizer, as `--tokenizer` takes it; an error if it has none."""
    if not (user_path(folder) / TOKENIZER).is_file():
        raise FileNotFoundError(
            f"{folder} has no {TOKENIZER}; give the model's tokenizer with --tokenizer FILE (transformers writes one: "
            "AutoTokenizer.from_pretrained(…).save_pretrained(folder)), or bytes"
        )
    return f"{folder}/{TOKENIZER}" if not folder.endswith("/") else f"{folder}{TOKENIZER}"
