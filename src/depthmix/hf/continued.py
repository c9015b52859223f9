"""A wrapped model in training: its loss, its layers, the role of each parameter, and its files.

Axes: B batch, T token.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from depthmix.hf.base import TOKENIZER, copy_companions, empty_model, without_bars
from depthmix.hf.card import card_of
from depthmix.hf.layer import MIXERS, VALUE_MIXER
from depthmix.hf.wrap import unwrap, wrap
from depthmix.hf.wrapped_model import layers_of
from depthmix.mechanisms import DepthMixer, DepthStack, KVMixer
from depthmix.mechanisms.record import with_records
from depthmix.models import Choice
from depthmix.models.card import write_card
from depthmix.models.decoder import mean_loss
from depthmix.models.roles import Role
from depthmix.support.files import digest, flush, read_object, seed_of

RECORD = "depthmix.json"  # beside a saved model: the SHA-256 of its files
ROUTER = re.compile(r"\.(gate|router)\.")  # each row of its weight is the vector of one expert


class ContinuedModel:
    """What the trainer needs of a wrapped model, which runs as it is."""

    def __init__(self, module: Any, base: Path) -> None:
        """`base` is a folder with the configuration, from which the model can be built again."""
        self.module, self.base = module, base

    @property
    def depth(self) -> DepthStack:
        stack: DepthStack = self.module.depth_stack()
        return stack

    def units(self) -> list[nn.Module]:
        return [*layers_of(self.module)]

    def recompute_layers(self) -> None:
        """Activation checkpointing of each layer; never reentrant, which would drop gradients of the mixers."""
        function = functools.partial(checkpoint, use_reentrant=False)
        self.module._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean next-token loss of tokens [B, T]; in training with the loss by which the family balances its experts."""
        out = self.module(input_ids=tokens, use_cache=False)
        loss = mean_loss(out.logits, tokens, None, None)
        auxiliary = getattr(out, "aux_loss", None)
        if self.module.training and auxiliary is not None:
            loss = loss + self.module.config.router_aux_loss_coef * auxiliary
        return loss

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def modules(self) -> Iterator[nn.Module]:
        return self.module.modules()

    def state_dict(self) -> dict[str, Tensor]:
        """Each tensor once: a head that is the embedding is not saved a second time."""
        state = self.module.state_dict()
        return {name: state[name] for name, first in first_names(self.module).items() if name == first}

    def mixer_names(self) -> dict[nn.Parameter, str]:
        own = {id(p) for p in self.depth.parameters()}
        return {parameter: name for name, parameter in self.named_parameters() if id(parameter) in own}

    def parameter_roles(self) -> Iterator[tuple[str, nn.Parameter, Role]]:
        """Matrices are those of linear maps in the layers, routers excepted."""
        layers = {id(p) for layer in self.units() for p in layer.parameters()}
        tables = {id(p) for m in self.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        for name, parameter in self.named_parameters():
            if f".{MIXERS}." in name:
                continue
            role: Role = "vector"
            if parameter.dim() >= 2 and f".{VALUE_MIXER}." not in name:
                inner = id(parameter) in layers and id(parameter) not in tables and parameter.dim() == 2
                role = "matrix" if inner and ROUTER.search(name) is None else "table"
            yield name, parameter, role

    def rebuilt(self, state: Mapping[str, Tensor]) -> Any:
        dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
        fields = self.module.config.depthmix
        return filled(wrapped(empty_model(self.base, dtype), fields), state)


def first_names(module: nn.Module) -> dict[str, str]:
    """For each name of the state dict the first name of the same tensor: tied ones have several."""
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}


def filled(module: Any, state: Mapping[str, Tensor]) -> Any:
    """A module with the weights of `ContinuedModel.state_dict`."""
    whole = with_records(module, state)
    for name, first in first_names(module).items():
        whole.setdefault(name, whole[first])
    module.load_state_dict(whole)
    return module


def wrapped(model: Any, fields: Mapping[str, Any], *, freeze_base: bool = False) -> Any:
    """The model with the mechanisms that a configuration names, every option given; no warning says what they change,
    which the beginning of a run does."""
    mixer = Choice.of(fields["mixer"])
    options: dict[str, Any] = {"kv_mixer": fields["kv_mixer"], "blend": fields["blend"], "freeze_base": freeze_base}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return wrap(model, mixer.name, **options, **mixer.options)


@torch.no_grad()
def draw_mixers(model: Any, seed: int) -> None:
    """Draw what is random in the mixers' start: by seed and name, equal on all ranks."""
    for name, module in model.named_modules():
        if isinstance(module, (DepthMixer, KVMixer)):
            torch.manual_seed(seed_of(seed, "mixer", name, type(module).__name__))
            module.reset_parameters()


def save_continued(
    model: Any, target: Path, base: Path, tokenizer: Path | None, *, plain: bool, training: Mapping[str, object]
) -> None:
    """Save a model as a folder that the Auto classes read; what the folder held stays until this one is complete.

    Args:
        model: a wrapped model; with `plain` its mechanism is taken out.
        target: the folder.
        base: where the files besides the weights are.
        tokenizer: a tokenizer.json that replaces the base's; None: the base's.
        plain: whether the mechanism adds nothing, so that transformers alone can read the model.
        training: what the card says of its training.
    """
    part, old = (target.with_name(f"{target.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    remove_leftovers(target)
    card = card_of(model, target.name, model.depth_stack(), model.value_mixers(), training)
    if plain:
        model = unwrap(model)
    if tokenizer is None:
        copy_companions(base, part)
    else:
        part.mkdir(parents=True)
        shutil.copyfile(tokenizer, part / TOKENIZER)
    with without_bars():
        model.save_pretrained(part)
    write_card(part, card)
    files = {path.name: digest(path) for path in sorted(part.iterdir())}
    (part / RECORD).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    for path in (*part.iterdir(), part):
        flush(path)
    if target.exists():
        target.rename(old)
    part.rename(target)
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(target: Path) -> None:
    """Of saves that were killed; between its two renames, the older folder comes back."""
    for old in [] if target.exists() else sorted(target.parent.glob(f"{target.name}.*.old")):
        old.rename(target)
        break
    pattern = re.compile(rf"{re.escape(target.name)}\.\d+\.(part|old)(\.part)?")
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        if path.is_dir() and pattern.fullmatch(path.name):
            shutil.rmtree(path)


def check_saved(folder: Path) -> None:
    """Check that a folder's files are those that `save_continued` wrote."""
    again = "Remove the folder and result.json of its run, and `depthmix train` writes both again"
    if not (folder / RECORD).is_file():
        raise FileNotFoundError(f"no {RECORD} in {folder}. {again}")
    for name, expected in read_object(folder / RECORD, again, ("files",))["files"].items():
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no {name} in {folder}. {again}")
        if digest(folder / name) != expected:
            raise ValueError(f"{folder / name} was altered: its SHA-256 is not the one in {RECORD}. {again}")


def load_continued(folder: Path, dtype: torch.dtype) -> Any:
    """A wrapped model that `save_continued` wrote."""
    loader: Any = AutoModelForCausalLM
    with without_bars():
        return loader.from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True)
