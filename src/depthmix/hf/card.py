"""Model cards of models of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthmix.mechanisms import DepthStack, KVMixer
from depthmix.mechanisms.registry import name_of
from depthmix.models.card import model_card, write_card

USAGE = """\
import depthmix
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}")"""


def write_model_card(
    model: Any, folder: Any, stack: DepthStack, values: Sequence[KVMixer], options: Mapping[str, Any]
) -> None:
    """Write the card of a saved model. `options` are those of `save_pretrained`: only the main process writes."""
    if options.get("is_main_process", True):
        write_card(Path(folder), card_of(model, Path(folder).name, stack, values))


def card_of(
    model: Any, name: str, stack: DepthStack, values: Sequence[KVMixer], training: Mapping[str, object] | None = None
) -> str:
    """The text for a model in a folder of this name; `training` are facts about how it was trained."""
    names = " and ".join([stack.name, *(name_of(type(mixer)) for mixer in values[-1:])])
    config = model.config
    family = "Decoder of depthmix" if config.model_type == "depthmix" else config.model_type
    sizes = {
        "model": family,
        "width": config.hidden_size,
        "layers": config.num_hidden_layers,
        "vocabulary": config.vocab_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    mixer = values[-1] if values else None
    usage = USAGE.format(folder=name)
    return model_card(f"{family} with {names}", "transformers", stack, mixer, sizes, training or {}, usage)
