"""Tiny models of transformers in folders, to continue. Import it after `pytest.importorskip("transformers")`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers

from depthmix.data import ByteTokenizer
from depthmix.hf.base import without_bars
from depthmix.hf.tokenizer import from_tokenizer
from depthmix.training import TrainConfig, override, retrofit_config
from tests.runs import SMALL

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 8}),
    "llama, tied": ("LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
    "experts": (
        "Qwen3MoeConfig",
        {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gpt2": ("GPT2Config", {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "cohere": ("CohereConfig", SIZES),
}


def base_model(kind: str = "qwen3", **changes: Any) -> Any:
    name, sizes = CONFIGS[kind]
    config = getattr(transformers, name)(**{**sizes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def save_base(folder: Path, kind: str = "qwen3", **changes: Any) -> Any:
    """The model, saved with a tokenizer of bytes in the form of transformers."""
    model = base_model(kind, **changes)
    with without_bars():
        model.save_pretrained(folder)
    from_tokenizer(ByteTokenizer()).save_pretrained(folder)
    return model


def continued_run(folder: Path, mixer: str = "block_attnres", *, kind: str = "qwen3", **changes: Any) -> TrainConfig:
    """A run of the model in the folder `base` beside it, which is made if it is not there; changes as in `tiny_run`."""
    base, text = folder.parent / "base", folder.parent / "text.txt"
    if not base.is_dir():
        save_base(base, kind)
    if not text.is_file():
        words = random.Random(0)
        choice = ["depth", "mixes", "what", "a", "layer", "reads"]
        text.write_text("\n".join(" ".join(words.choice(choice) for _ in range(30)) for _ in range(100)))
    given = {name: changes.pop(name) for name in ("freeze_base", "blend", "tokenizer") if name in changes}
    config = retrofit_config(str(base), mixer, run=str(folder), **given)
    where = {"data.source": str(text), "data.folder": str(folder.parent / "tokens"), "data.validation": 0.2}
    quick = {"optimizer.lr": 1e-2, "schedule.warmup": 0.0}
    for key, value in {**where, **SMALL, **quick, **{k.replace("__", "."): v for k, v in changes.items()}}.items():
        config = override(config, key, value)
    return config
