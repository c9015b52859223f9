"""The configuration of a Kimi Linear checkpoint as that of a decoder, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from depthmix.models.config import DecoderConfig
from depthmix.models.names.base import check_sizes
from depthmix.models.names.checkpoint import Checkpoint
from depthmix.models.names.kimi_linear_fields import (
    LINEAR,
    LISTS,
    check_fixed,
    layer_kinds,
    public_fields,
    unknown_fields,
)

KV_NORM_EPS = 1e-6  # of the latent's norm: a constant of the other implementations, in no configuration


def read_config(checkpoint: Checkpoint) -> tuple[DecoderConfig, tuple[str, ...]]:
    """The decoder that a configuration describes, and what a user should know."""
    fields = public_fields(checkpoint)
    check_fixed(checkpoint, fields)
    layers, dim = (checkpoint.number(fields, name, int) for name in ("num_hidden_layers", "hidden_size"))
    check_sizes(dim, layers)
    kinds = layer_kinds(checkpoint, fields, layers)
    parts = {"kda": read_kda, "mla": read_mla}
    given: dict[str, Any] = {name: read(checkpoint, fields) for name, read in parts.items() if name in kinds}
    given |= {"dim": dim, "layers": layers, "attention": kinds, "moe": read_moe(checkpoint, fields, layers)}
    sizes = {"vocab_size": "vocab_size", "heads": "num_attention_heads", "hidden": "intermediate_size"}
    given |= {ours: checkpoint.number(fields, theirs, int) for ours, theirs in sizes.items()}
    given["norm_eps"] = float(checkpoint.number(fields, "rms_norm_eps", float))
    given["tie_embeddings"] = bool(fields.get("tie_word_embeddings"))
    if fields.get("initializer_range") is not None:
        given["init_std"] = float(checkpoint.number(fields, "initializer_range", float, zero=True))
    try:
        config = DecoderConfig(**given)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path} describes a model that the decoder cannot be: {error}") from error
    return config, unknown_fields(fields)


def read_kda(checkpoint: Checkpoint, fields: Mapping[str, Any]) -> dict[str, Any]:
    names = {"heads": "num_heads", "head_dim": "head_dim", "conv": "short_conv_kernel_size"}
    return {
        ours: checkpoint.number(fields[LINEAR], theirs, int, f"It is one of {LINEAR}") for ours, theirs in names.items()
    }


def read_mla(checkpoint: Checkpoint, fields: Mapping[str, Any]) -> dict[str, Any]:
    names = {"rank": "kv_lora_rank", "nope": "qk_nope_head_dim", "value": "v_head_dim"}
    sizes = {ours: checkpoint.number(fields, theirs, int) for ours, theirs in names.items()}
    return {**sizes, "shared": checkpoint.number(fields, "qk_rope_head_dim", int, zero=True), "norm_eps": KV_NORM_EPS}


def read_moe(checkpoint: Checkpoint, fields: Mapping[str, Any], layers: int) -> dict[str, Any] | None:
    """The experts; None if all layers have a dense MLP."""
    dense = dense_layers(checkpoint, fields, layers)
    if dense == layers:
        return None
    names = {"experts": "num_experts", "active": "num_experts_per_token", "hidden": "moe_intermediate_size"}
    sizes = {ours: checkpoint.number(fields, theirs, int) for ours, theirs in names.items()}
    shared = fields.get("num_shared_experts") and checkpoint.number(fields, "num_shared_experts", int)
    scale = float(checkpoint.number(fields, "routed_scaling_factor", float))
    return {
        **sizes,
        "shared": shared or 0,
        "scale": scale,
        "scoring": "sigmoid",
        "balance": "bias",
        "dense_layers": dense,
    }


def dense_layers(checkpoint: Checkpoint, fields: Mapping[str, Any], layers: int) -> int:
    """The number of first layers without experts."""
    types, first = fields.get("mlp_layer_types"), fields.get("first_k_dense_replace")
    if types is None:
        if fields.get("num_experts") is None:
            return layers
        return min(layers, checkpoint.number(fields, "first_k_dense_replace", int, zero=True))
    count = types.count("dense") if isinstance(types, list) else 0
    if types != ["dense"] * count + ["sparse"] * (layers - count) or first not in (None, count):
        raise ValueError(
            f"{checkpoint.path} has mlp_layer_types={types!r} and first_k_dense_replace={first!r}; expected {layers} "
            "names, 'dense' for the first layers and 'sparse' for all others, and their number or null"
        )
    return count


def write_config(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """The public fields for a decoder; an error if they cannot express it."""
    check_expressible(config)
    kinds = config.attention_kinds
    linear: dict[str, Any] = {
        theirs: [n for n, kind in enumerate(kinds, 1) if kind == ours] for ours, theirs in LISTS.items()
    }
    if config.kda is not None:
        linear |= {"num_heads": config.kda.heads, "head_dim": config.kda.head_dim}
        linear["short_conv_kernel_size"] = config.kda.conv
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": dtype,
        **{f"{token}_token_id": None for token in ("bos", "eos", "pad")},
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "intermediate_size": config.hidden,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        LINEAR: linear,
        **write_mla(config),
        **write_moe(config),
    }


def write_mla(config: DecoderConfig) -> dict[str, Any]:
    if config.mla is None:
        return {}
    mla = config.mla
    sizes = {"kv_lora_rank": mla.rank, "qk_nope_head_dim": mla.nope, "qk_rope_head_dim": mla.shared}
    return {"q_lora_rank": None, **sizes, "v_head_dim": mla.value, "mla_use_nope": True}


def write_moe(config: DecoderConfig) -> dict[str, Any]:
    if config.moe is None:
        return {"first_k_dense_replace": config.layers}
    moe = config.moe
    return {
        "num_experts": moe.experts,
        "num_experts_per_token": moe.active,
        "num_shared_experts": moe.shared,
        "moe_intermediate_size": moe.hidden,
        "routed_scaling_factor": moe.scale,
        "first_k_dense_replace": moe.dense_layers,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "moe_layer_freq": 1,
        "num_expert_group": 1,
        "topk_group": 1,
    }


def check_expressible(config: DecoderConfig) -> None:
    """Raise an error for the first thing of a decoder that a Kimi Linear checkpoint cannot say."""
    moe, mla, kda = config.moe, config.mla, config.kda
    refused = {
        f"attention={config.attention!r}": ("'kda' and 'mla' only", "gqa" in config.attention_kinds),
        f"loop={config.loop}": ("loop=None", config.loop is not None),
        f"kda.bound={kda and kda.bound}": ("kda.bound=None", kda is not None and kda.bound is not None),
        f"mla.norm_eps={mla and mla.norm_eps}": (
            f"mla.norm_eps={KV_NORM_EPS}, which is a constant there",
            mla is not None and mla.norm_eps != KV_NORM_EPS,
        ),
        f"moe.scoring={moe and moe.scoring!r}": ("moe.scoring='sigmoid'", moe is not None and moe.scoring != "sigmoid"),
        f"mixer={config.mixer.name!r}": (
            "mixer='residual', since other readers of these files would ignore the mixers and compute another "
            "function. Write the mixers alone with --to kimi_k3 or --to fla",
            config.mixer.name != "residual",
        ),
    }
    for what, (expected, wrong) in refused.items():
        if wrong:
            raise ValueError(f"a decoder with {what} cannot be written as kimi_linear; expected {expected}")
