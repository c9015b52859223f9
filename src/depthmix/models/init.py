"""The initialisation of every parameter of a decoder, in one table. Mixers initialise their own parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from depthmix.support.files import seed_of

if TYPE_CHECKING:
    from depthmix.mechanisms import DepthMixer, KVMixer
    from depthmix.models.config import DecoderConfig
    from depthmix.models.decoder import SublayerLoop

NORMAL = "normal, with the configuration's init_std"
OUTPUT = "normal, with init_std · output_init"
ONE, ZERO = "1", "0"
CONV = "uniform in ±1/√W, where W is the width of the convolution"
STEPS = "softplus of it log-uniform in [0.001, 0.1]"
RATES = "exp of it uniform in [1, 16]; 0 if the decay has a bound"
OF_KDA = {CONV: "start_conv", STEPS: "start_steps", RATES: "start_rates"}  # functions of models/kda.py
TABLE: tuple[tuple[str, str], ...] = (
    (r"embed\.weight|head\.weight", NORMAL),
    (r"(.*\.)?(norm|q_norm|k_norm|o_norm|kv_norm)\.weight", ONE),
    (r"sublayers\.\d+\.[qkv]_proj\.weight", NORMAL),
    (r"sublayers\.\d+\.(kv_a|kv_b)\.weight", NORMAL),
    (r"sublayers\.\d+\.(f_a|f_b|g_a|g_b|b)_proj\.weight", NORMAL),
    (r"sublayers\.\d+\.[qkv]_conv", CONV),
    (r"sublayers\.\d+\.dt_bias", STEPS),
    (r"sublayers\.\d+\.A_log", RATES),
    (r"sublayers\.\d+\.o_proj\.weight", OUTPUT),
    (r"sublayers\.\d+\.(shared\.)?(gate|up)_proj(\.weight)?", NORMAL),
    (r"sublayers\.\d+\.(shared\.)?down_proj(\.weight)?", OUTPUT),
    (r"sublayers\.\d+\.router\.weight", NORMAL),
)


@torch.no_grad()
def initialise(
    model: SublayerLoop, seed: int | None = None, chosen: Callable[[Tensor], bool] = lambda tensor: True
) -> None:
    """Initialise every parameter, from torch's generator or, with a seed, from one generator per (seed, name).

    With a seed, parameters of the same name and shape are equal in two decoders, whatever else these contain, and in a
    segment of one. Such weights are drawn on the CPU. Parameters that are not `chosen` stay as they are.
    """
    for name, mixer in named_mixers(model):
        tensors = [*mixer.parameters(), *mixer.buffers()]
        kept = [(tensor, tensor.clone()) for tensor in tensors if not chosen(tensor)]
        if tensors and len(kept) == len(tensors):
            continue
        if seed is not None:
            torch.manual_seed(seed_of(seed, "mixer", name, type(mixer).__name__))
        mixer.reset_parameters()
        for tensor, value in kept:
            tensor.copy_(value)
    for name, parameter in model.named_parameters():
        if name.startswith(("depth.", "kv_mixers.")) or not chosen(parameter):
            continue
        draw(parameter, start_of(name), model.config, None if seed is None else seed_of(seed, name))


def named_mixers(model: SublayerLoop) -> Iterator[tuple[str, DepthMixer | KVMixer]]:
    """Mixers of both kinds that own parameters: "0", "1", … "out", then "0", "1", … of the attention layers; in a
    segment, those that it holds."""
    yield from model.depth.mixers.named_children()  # type: ignore[misc]
    if model.depth.out is not None:
        yield "out", model.depth.out
    yield from model.kv_mixers.named_children()  # type: ignore[misc]


def draw(parameter: Tensor, start: str, config: DecoderConfig, seed: int | None) -> None:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    if start in (NORMAL, OUTPUT):
        std = config.init_std * (config.output_init if start == OUTPUT else 1.0)
        parameter.normal_(std=std, generator=generator)
    elif start == RATES and config.kda is not None and config.kda.bound is not None:
        parameter.zero_()
    elif start in OF_KDA:
        getattr(import_module("depthmix.models.kda"), OF_KDA[start])(parameter, generator)
    else:
        parameter.fill_(float(start))


def start_of(name: str) -> str:
    for pattern, start in TABLE:
        if re.fullmatch(pattern, name):
            return start
    raise ValueError(f"{name} is missing from the table of initialisations in models/init.py")
