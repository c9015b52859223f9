"""The fields of a Kimi Linear configuration: those of the public checkpoint, and those that transformers writes.

A field that describes something the decoder does not compute is refused, with its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from depthmix.models.names.checkpoint import Checkpoint
from depthmix.models.saved import CONFIG, list_first

LINEAR = "linear_attn_config"
LISTS = {"kda": "kda_layers", "mla": "full_attn_layers"}  # layers count from 1 there
TYPES = {"linear_attention": "kda", "full_attention": "mla"}  # of transformers
FLAT = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
FLAT |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}  # in transformers, the fields of LINEAR
ALIASES = {  # names that transformers understands as well
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "max_position_embeddings": "model_max_length",
}
FIXED: dict[str, Any] = {  # the only value of a field that the decoder can compute; it may also be absent or null
    "hidden_act": "silu",
    "q_lora_rank": None,
    "attention_bias": False,
    "attention_dropout": 0,
    "mla_use_nope": True,
    "rope_scaling": None,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "quantization_config": None,
}
K3: dict[str, Any] = {  # the same, of what Kimi K3 added
    "gate_lower_bound": None,
    "use_full_rank_gate": False,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
    "attn_res_block_size": None,
}
IGNORED = {  # nothing that the decoder computes depends on these
    *("architectures", "auto_map", "depthmix", "depthmix_format", "dtype", "torch_dtype", "model_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache", "_name_or_path"),
    *("head_dim", "qk_head_dim", "model_max_length", "rope_theta", "rope_parameters", "use_grouped_topk"),
    *("output_router_logits", "output_attentions", "output_hidden_states", "pretraining_tp", "return_dict"),
    *("chunk_size_feed_forward", "id2label", "label2id", "is_encoder_decoder", "problem_type", "tie_encoder_decoder"),
}
USED = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "rms_norm_eps", "tie_word_embeddings", "initializer_range", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts", "num_experts_per_token"),
    *("num_shared_experts", "moe_intermediate_size", "routed_scaling_factor", "first_k_dense_replace"),
    *(LINEAR, "layer_types", "mlp_layer_types"),
}


def public_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields under their public names, those of LINEAR in its place."""
    fields: dict[str, Any] = {}
    linear = checkpoint.config.get(LINEAR)
    if linear is not None and not isinstance(linear, Mapping):
        raise ValueError(f"{checkpoint.path} has {LINEAR}={linear!r}; expected an object such as {{'kda_layers': …}}")
    inner = dict(linear or {})
    for name, value in checkpoint.config.items():
        target, name = (inner, FLAT[name]) if name in FLAT else (fields, ALIASES.get(name, name))
        if name != LINEAR and target.setdefault(name, value) != value:
            raise ValueError(
                f"{checkpoint.path} has two values of {name}, {target[name]!r} and {value!r}, under two names; "
                "expected one"
            )
    return {**fields, LINEAR: inner}


def check_fixed(checkpoint: Checkpoint, fields: Mapping[str, Any]) -> None:
    """Raise an error for the first field that says something else than the decoder computes."""
    heads, kv_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    given = {**fields[LINEAR], **fields}
    for name, only in {**FIXED, **K3, "num_key_value_heads": heads}.items():
        if (value := given.get(name)) is None or value == only:
            continue
        reason = f"the decoder has {name}={only!r} only" if only is not None else f"the decoder has no {name}"
        if name == "attn_res_block_size":
            reason = "this format has plain residuals; the depth mixing of Kimi K3 is read by --from kimi_k3"
        elif name in K3:
            reason += ", which Kimi K3 added to Kimi Linear"
        elif name == "num_key_value_heads":
            reason = f"the heads of MLA share one latent: expected num_attention_heads={heads}, not {kv_heads}"
        raise ValueError(f"{checkpoint.path} has {name}={value!r}, which cannot be read: {reason}")


def layer_kinds(checkpoint: Checkpoint, fields: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """The kind of attention of each layer, by the two lists of layers from 1, or by layer_types."""
    lists, types = {kind: fields[LINEAR].get(name) for kind, name in LISTS.items()}, fields.get("layer_types")
    found = []
    if any(value is not None for value in lists.values()):
        found.append(kinds_of_lists(checkpoint, lists, layers))
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= TYPES.keys():
            raise ValueError(
                f"{checkpoint.path} has layer_types={types!r}; expected a list of {layers} of {', '.join(TYPES)}"
            )
        found.append(tuple(TYPES[kind] for kind in types))
    if not found:  # other readers fall back to different orders
        raise ValueError(
            f"{checkpoint.path} does not say which layers have which attention; expected {LINEAR} with "
            f"{' and '.join(LISTS.values())}, or layer_types"
        )
    if found[0] != found[-1]:
        raise ValueError(f"{checkpoint.path} has {LINEAR} and layer_types that contradict each other; expected one")
    return found[0]


def kinds_of_lists(checkpoint: Checkpoint, lists: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    kinds: dict[int, str] = {}
    for kind, numbers in lists.items():
        if not isinstance(numbers, list) or not all(type(n) is int and 1 <= n <= layers for n in numbers):
            raise ValueError(
                f"{checkpoint.path} has {LISTS[kind]}={numbers!r}; expected a list of layers from 1 to {layers}"
            )
        if twice := [n for n in numbers if kinds.setdefault(n, kind) != kind]:
            raise ValueError(f"{checkpoint.path} has layer {twice[0]} in both {' and '.join(LISTS.values())}")
    if absent := [n for n in range(1, layers + 1) if n not in kinds]:
        raise ValueError(f"{checkpoint.path} has layer {absent[0]} in neither {' nor '.join(LISTS.values())}")
    return tuple(kinds[n] for n in range(1, layers + 1))


def unknown_fields(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence about the fields that this version does not know."""
    inner = {*LISTS.values(), *FLAT.values()}
    known = USED | IGNORED | FIXED.keys() | K3.keys()
    unknown = sorted(fields.keys() - known) + sorted(fields[LINEAR].keys() - inner - K3.keys())
    return (
        (f"fields of {CONFIG} that depthmix does not know and did not use: {list_first(unknown)}",) if unknown else ()
    )
