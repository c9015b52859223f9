"""Defaults that follow from the one dial, depth, and the fields that the name of a mixer sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from depthmix.mechanisms import is_kv
from depthmix.models import DecoderConfig, count_parameters


def dial_tokens(model: DecoderConfig) -> int:
    """20 tokens per active parameter, without embeddings."""
    return 20 * count_parameters(model).active_without_embeddings


def split_mixer(mixer: str | Mapping[str, Any]) -> dict[str, Any]:
    """Decoder fields for a name such as "block_attnres", "depth_attention" or "attnres+value_residual"."""
    if not isinstance(mixer, str):
        return {"mixer": mixer}
    children: dict[str, Any] = {}
    for name in mixer.split("+"):
        child = "kv_mixer" if is_kv(name) else "mixer"
        if child in children:
            kind = "KV" if child == "kv_mixer" else "depth"
            raise ValueError(
                f"mixer={mixer!r} has two {kind} mechanisms, {children[child]} and {name}; expected at most one of "
                "each kind, such as attnres+value_residual"
            )
        children[child] = name
    return children


def initial_std(dim: int) -> float:
    """Larger where the width is smaller, so that narrow models do not start with tiny outputs; 0.02 at dim 625."""
    return float(f"{0.5 / math.sqrt(dim):.2g}")


def output_init(depth: int) -> float:
    """Projections that end a sublayer start smaller where there are more of them, so that the stream keeps its size."""
    return float(f"{depth**-0.5:.2g}")


def learning_rate(dim: int, optimizer: str = "muon") -> float:
    """The highest rate of the schedule; it falls with the square root of the width."""
    at, width, most = {"muon": (1e-2, 96, 1e-2), "adamw": (3e-3, 256, 5e-3)}[optimizer]
    return min(float(f"{at * math.sqrt(width / dim):.2g}"), most)
