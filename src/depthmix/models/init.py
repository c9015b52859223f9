"""How every parameter of a decoder starts, in one table. Mixers start as their mechanism says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from depthmix.models.decoder import Decoder

NORMAL = "normal, with the configuration's init_std"
ONE, ZERO = "1", "0"
TABLE: tuple[tuple[str, str], ...] = (
    (r"embed\.weight|head\.weight", NORMAL),
    (r"(.*\.)?(norm|q_norm|k_norm)\.weight", ONE),
    (r"sublayers\.\d+\.[qkvo]_proj\.weight", NORMAL),
    (r"sublayers\.\d+\.(shared\.)?(gate|up|down)_proj(\.weight)?", NORMAL),
    (r"sublayers\.\d+\.router\.weight", NORMAL),
)


@torch.no_grad()
def initialise(model: Decoder) -> None:
    model.depth.reset_parameters()
    for mixer in model.kv_mixers:
        mixer.reset_parameters()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        if name.startswith(("depth.", "kv_mixers.")):
            continue
        start = next((start for pattern, start in TABLE if re.fullmatch(pattern, name)), None)
        if start is None:
            raise ValueError(f"{name} has no line in the table of initialisation, models/init.py")
        if start == NORMAL:
            parameter.normal_(std=model.config.init_std)
        else:
            parameter.fill_(float(start))
