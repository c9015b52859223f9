"""Parameters and FLOPs of a wrapped model, counted on the meta device from its configuration.

Axes: T token.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from depthmix.hf.base import CONFIG, empty_model
from depthmix.hf.continued import wrapped
from depthmix.hf.layer import MIXERS, VALUE_MIXER
from depthmix.hf.wrapped_model import head_dim, layers_of
from depthmix.mechanisms import KVStack
from depthmix.models import Choice
from depthmix.models.counting import Counts

RECURRENT = ("linear_attention", "conv", "recurrent")  # layer types whose cost does not grow with the row


class Counted(NamedTuple):
    counts: Counts
    multiplied: int  # parameters outside the mixers that multiply a token
    mixing: int  # FLOPs per token of the mixers
    attention: tuple[tuple[int, int | None], ...]  # of each layer: width of all heads, and its window

    def flops_per_token(self, tokens_per_row: int) -> int:
        """Of a training step: three times those of the forward pass."""
        attended = sum(4 * width * mean_attended(tokens_per_row, window) for width, window in self.attention)
        return 3 * (2 * self.multiplied + round(attended) + self.mixing)


def mean_attended(tokens: int, window: int | None) -> float:
    """How many tokens a token attends to on average."""
    near = tokens if window is None else min(window, tokens)
    return (near * (near + 1) / 2 + (tokens - near) * near) / tokens


def count(folder: Path, fields: Mapping[str, Any]) -> Counted:
    """All counts of the model of a folder with the mechanisms of `fields`."""
    stamp = (folder / CONFIG).stat().st_mtime_ns
    return count_once(folder, stamp, json.dumps(dict(fields), sort_keys=True))


@functools.lru_cache(maxsize=64)
def count_once(folder: Path, stamp: int, fields: str) -> Counted:
    chosen = json.loads(fields)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = wrapped(empty_model(folder), chosen)
    return Counted(count_parameters(model), count_multiplied(model), count_mixing(model, chosen), attention_of(model))


def count_parameters(model: Any) -> Counts:
    total = sum(p.numel() for p in model.parameters())
    ends = {p for part in ends_of(model) for p in part.parameters()}
    embedding = sum(p.numel() for p in ends)
    mixers = sum(p.numel() for name, p in model.named_parameters() if is_mixer(name))
    active = total - idle_parameters(model)
    return Counts(
        total=total,
        active=active,
        active_without_embeddings=active - embedding,
        embedding=embedding,
        mixer=mixers,
    )


def count_multiplied(model: Any) -> int:
    """A table that is also the head counts, any other table does not."""
    head = model.get_output_embeddings()
    tables = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    tables -= set() if head is None else {*head.parameters()}
    others = (p.numel() for name, p in model.named_parameters() if p not in tables and not is_mixer(name))
    return sum(others) - idle_parameters(model)


def ends_of(model: Any) -> list[nn.Module]:
    return [part for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]


def is_mixer(name: str) -> bool:
    return f".{MIXERS}." in name or f".{VALUE_MIXER}." in name


def idle_parameters(model: Any) -> int:
    """Those of the experts that a token is not routed to."""
    config = model.config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((n for name in names if isinstance(n := getattr(config, name, None), int) and n), 0)
    active = getattr(config, "num_experts_per_tok", None) or experts
    held = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return held * (experts - active) // experts if experts else 0


def count_mixing(model: Any, fields: Mapping[str, Any]) -> int:
    flops: int = model.depth_stack().facts.forward_flops
    if fields["kv_mixer"] is not None:
        config, kv = model.config, Choice.of(fields["kv_mixer"])
        sizes = {"head_dim": head_dim(model), "depth": len(layers_of(model)), "blend": fields["blend"]}
        stack = KVStack(kv.name, **sizes, **kv.options)
        heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
        flops += stack.facts(heads=heads, kv_heads=kv_heads).forward_flops or 0
    return flops


def attention_of(model: Any) -> tuple[tuple[int, int | None], ...]:
    config, layers = model.config, len(layers_of(model))
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    width = config.num_attention_heads * head_dim(model)
    if hasattr(config, "qk_nope_head_dim"):  # latent attention: other widths of keys and values
        width = config.num_attention_heads * (
            (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) // 2
        )
    return tuple((width, window if kind == "sliding_attention" else None) for kind in kinds if kind not in RECURRENT)
