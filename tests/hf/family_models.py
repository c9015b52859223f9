"""Tiny models of every family that `dm.wrap` knows. Import it after `pytest.importorskip("transformers")`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import depthmix as dm
from depthmix.hf.families import FAMILIES
from depthmix.hf.wrapped_model import obstacle_to_values

VOCABULARY, LAYERS, DIM = 61, 4, 32
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": DIM,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {**LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1}  # fmt: skip
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
KINDS = ["linear_attention", "full_attention"] * 2
OWN: dict[str, dict[str, Any]] = {  # fields that a family has besides, or that it names in another way
    "cohere": {"num_key_value_heads": 2},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "dots1": {**DEEPSEEK, "num_key_value_heads": 2, "layer_types": ["full_attention"] * LAYERS},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 4},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 4},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {**DEEPSEEK, "num_key_value_heads": 2},
    "gpt2": {"n_embd": DIM, "n_layer": LAYERS, "n_head": 4, "n_positions": 128},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "granite": {"residual_multiplier": 0.7, "embedding_multiplier": 2.0},
    "granitemoe": {"residual_multiplier": 0.7, "num_local_experts": 4},
    "kimi_linear": {**DEEPSEEK, **EXPERTS, "linear_head_dim": 8, "linear_num_heads": 4, "layer_types": KINDS},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "mixtral": {"num_local_experts": 4},
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "phi3": {"rope_parameters": None},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": {**LINEAR, "layer_types": KINDS},
    "qwen3_moe": EXPERTS,
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "qwen3_next": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 24, "layer_types": KINDS},
}
SEQUENTIAL = {"gpt_neox": {"use_parallel_residual": False}}  # beside the default form


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with random weights that are larger than at their start, so that greedy texts vary."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    torch.manual_seed(0)
    config_class = CONFIG_MAPPING[model_type]
    special = ("vocab_size", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    fields = SMALL if model_type != "gpt2" else {name: SMALL[name] for name in special}
    config = config_class(**{**fields, **OWN.get(model_type, {}), **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            elif "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def kv_mixer_for(model_type: str, name: str = "depth_attention") -> str | None:
    """The KV mechanism, where values of the family can be mixed."""
    return None if obstacle_to_values(tiny_model(model_type)) else name


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def mixers_of(model: Any) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if "depthmix" in name]


@torch.no_grad()
def move_mixers(model: Any, size: float = 0.5) -> Any:
    """Away from their start, so that every mixer mixes."""
    for parameter in mixers_of(model):
        parameter.add_(torch.randn_like(parameter), alpha=size)
    return model


def wrapped(model_type: str = "qwen3", mixer: str = "block_attnres", dtype: torch.dtype = torch.float64, *,
            kv_mixer: Any = None, moved: bool = True, **options: Any) -> Any:  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = dm.wrap(tiny_model(model_type, dtype), mixer, kv_mixer=kv_mixer, **options)
    return move_mixers(model) if moved else model


ALWAYS = ("gpt2", "llama", "qwen3")  # the other families are tested by `make test-hf`
DEFAULT_AND_FULL = [t if t in ALWAYS else pytest.param(t, marks=pytest.mark.full) for t in sorted(FAMILIES)]
