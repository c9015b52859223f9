"""Open any folder that holds a model as a causal language model of transformers, with its tokenizer.

Only safetensors are read, no code of a checkpoint is run, and nothing is downloaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from depthmix.data import load_tokenizer
from depthmix.data.tokenizers import TOKENIZER_FILE
from depthmix.hf.config import DepthmixConfig
from depthmix.hf.model import DepthmixForCausalLM
from depthmix.hf.tokenizer import from_tokenizer, tokenizer_of
from depthmix.models import load_model
from depthmix.models.saved import CONFIG, STAGED, list_first
from depthmix.support.checks import check_device
from depthmix.support.files import read_json

AGAIN = "Save or copy the model again"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG, "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def open_pretrained(
    folder: str | os.PathLike[str], device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Any, Any]:
    """Model and tokenizer of a folder, in evaluation mode; `dtype` converts the parameters.

    The folder is one that `save_pretrained` or `dm.save_model` wrote, or that of a finished run, whose model is in
    `final`.
    """
    place = model_folder(Path(folder))
    target = check_device(device)
    if is_pretrained(place):
        return open_saved(place, target, dtype)
    decoder = load_model(place, device=target, dtype=dtype)
    return DepthmixForCausalLM.from_decoder(decoder), tokenizer_of(place)


def model_folder(folder: Path) -> Path:
    """Where the model of a folder is: in itself or in `final`."""
    for place in (folder, folder / "final"):
        if any((place / name).is_file() for name in (CONFIG, STAGED)):
            return place
    if (folder / "checkpoints").is_dir():
        raise FileNotFoundError(
            f"{folder} is an unfinished run; expected a finished one. In Python, evaluate its newest checkpoint with "
            "DepthmixForCausalLM.from_decoder(depthmix.training.load_run(folder)); `depthmix eval` does so by itself"
        )
    raise FileNotFoundError(
        f"{folder} has no {CONFIG}; expected the folder of a run, or one that dm.save_model or save_pretrained wrote"
    )


def is_pretrained(place: Path) -> bool:
    """Whether `save_pretrained` wrote the folder, which states a model type."""
    path = place / CONFIG
    content = read_json(path, AGAIN) if path.is_file() else None
    return isinstance(content, dict) and "model_type" in content


def open_saved(place: Path, device: torch.device, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """A folder that `save_pretrained` wrote: a decoder of depthmix, a wrapped model, or any other."""
    if not any(place.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{place} has no *.safetensors; other weights are not read, since unpickling runs code. Save the model "
            "with transformers' save_pretrained, which writes safetensors"
        )
    model, report = AutoModelForCausalLM.from_pretrained(
        place,
        dtype="auto" if dtype is None else dtype,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"the weights in {place} lack {list_first(missing)}; expected all of them. {AGAIN}")
    return model.to(device).eval(), saved_tokenizer(place, model)


def saved_tokenizer(place: Path, model: Any) -> Any:
    """The tokenizer beside a model. Without one, or with a bare tokenizer.json, a decoder's is that of its run."""
    ours = isinstance(model.config, DepthmixConfig)
    if ours and not (place / TOKENIZER_CONFIG).is_file():
        return from_tokenizer(load_tokenizer(place, model.config.vocab_size))
    if not any((place / name).is_file() for name in TOKENIZER_FILES):
        raise FileNotFoundError(
            f"{place} has no tokenizer; expected {TOKENIZER_FILE} or another file of one beside the model: "
            f"tokenizer.save_pretrained({str(place)!r})"
        )
    return AutoTokenizer.from_pretrained(place, trust_remote_code=False, local_files_only=True)
