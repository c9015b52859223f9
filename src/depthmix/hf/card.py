"""Model cards of models of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthmix.mechanisms import DepthStack, KVMixer
from depthmix.mechanisms.registry import name_of
from depthmix.models.card import model_card, write_card

TRAINING = "depthmix_training"  # attribute of a model: how it was trained, as the card shall say it
USAGE = """\
import depthmix
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}")"""


def write_model_card(
    model: Any, folder: Any, stack: DepthStack, values: Sequence[KVMixer], options: Mapping[str, Any]
) -> None:
    """Write the card of a saved model. `options` are those of `save_pretrained`: only the main process writes."""
    if not options.get("is_main_process", True):
        return
    names = " and ".join([stack.name, *(name_of(type(mixer)) for mixer in values[-1:])])
    config = model.config
    family = "Decoder of depthmix" if config.model_type == "depthmix" else config.model_type
    sizes = {
        "model": family,
        "width": config.hidden_size,
        "layers": config.num_hidden_layers,
        "vocabulary": config.vocab_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(config.dtype).removeprefix("torch."),
    }
    usage = USAGE.format(folder=Path(folder).name)
    training = vars(model).get(TRAINING, {})
    mixer = values[-1] if values else None
    text = model_card(f"{family} with {names}", "transformers", stack, mixer, sizes, training, usage)
    write_card(Path(folder), text)
