"""Tiny decoders as models of transformers. Import it after `pytest.importorskip("transformers")`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from depthmix.hf import DepthmixForCausalLM
from tests.decoders import KIMI, tiny

KINDS: dict[str, dict[str, Any]] = {
    "block_attnres": {"mixer": {"name": "block_attnres", "num_blocks": 2}},
    "attnres, tied": {"mixer": "attnres", "tie_embeddings": True},
    "mhc": {"mixer": "mhc"},
    "depth_attention": {"kv_mixer": "depth_attention"},
    "looped, value_residual": {"form": "looped", "mixer": "block_attnres", "kv_mixer": "value_residual"},
    "experts": {"form": "moe", "mixer": "block_attnres"},
}
KIMI_BLOCKS = {**KIMI, "mixer": {"name": "block_attnres", "num_blocks": 2}}  # without caches of transformers
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def wrapped(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> DepthmixForCausalLM:
    return DepthmixForCausalLM.from_decoder(tiny(dtype=dtype, **{**KINDS.get(kind, KIMI_BLOCKS), **changes}))
