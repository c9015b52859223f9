"""Tiny decoders in float64, away from their start, for the tests of models and generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from depthmix.models import Decoder, DecoderConfig

FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {"moe": {"experts": 4, "active": 2, "shared": 1, "hidden": 16}},
    "looped": {"loop": {"first": 1, "last": 2, "repeats": 2}},
}
KIMI: dict[str, Any] = {  # the attention of Kimi Linear, with one layer of MLA
    "layers": 4,
    "attention": ("kda", "kda", "kda", "mla"),
    "kda": {"heads": 2, "head_dim": 8},
    "mla": {"rank": 12, "nope": 8, "shared": 4, "value": 6},
}
VOCABULARY = 61


def tiny_config(form: str = "dense", **changes: Any) -> DecoderConfig:
    size = {"vocab_size": VOCABULARY, "dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 40}
    return DecoderConfig(**{**size, **FORMS[form], **changes})


def tiny(form: str = "dense", dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    """Parameters are moved from their start, so that every mixer mixes."""
    torch.manual_seed(0)
    model = Decoder(tiny_config(form, **changes)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
