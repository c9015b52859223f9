"""Which submodules of a family's layer write to its residual stream and which read it, for `dm.wrap`.

A **writer** is the submodule whose output the layer adds to its stream; a **reader** is one that takes the stream. With
these names a mechanism takes the place of the additions without a word of the family's own code being rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from depthmix.support.checks import did_you_mean

Alternatives = tuple[str, ...]  # names of a submodule, of which a layer has one


@dataclass(frozen=True, kw_only=True)
class Family:
    """The layers of a model type.

    layers: the list of layers in the base model.
    attention: the attention of a layer.
    writers: the writer of each sublayer, in order.
    readers: the readers of sublayers 2, 3 …; the first one reads the layer's input.
    parallel: both branches read the layer's input: they are one sublayer, whose output is their sum.
    scale: attribute of the layer by which it multiplies what a branch writes.
    prenorm: whether every reader normalises what it reads, so that a mechanism may change its scale.
    kv: whether attention caches keys and values of heads, which a KV mechanism can mix.
    """

    layers: str = "layers"
    attention: Alternatives = ("self_attn",)
    writers: tuple[Alternatives, ...] = (("self_attn",), ("mlp",))
    readers: tuple[str, ...] = ("post_attention_layernorm",)
    parallel: bool = False
    scale: str | None = None
    prenorm: bool = True
    kv: bool = True

    @property
    def sites(self) -> int:
        """The number of sublayers in a layer."""
        return 1 if self.parallel else len(self.writers)


LLAMA = Family()
MIXED = Family(attention=("self_attn", "linear_attn"), writers=(("self_attn", "linear_attn"), ("mlp",)), kv=False)
SANDWICH = Family(
    writers=(("post_attention_layernorm",), ("post_feedforward_layernorm",)), readers=("pre_feedforward_layernorm",)
)
POST_NORM = replace(SANDWICH, readers=("mlp",), prenorm=False)
NEOX = Family(attention=("attention",), writers=(("post_attention_dropout",), ("post_mlp_dropout",)))

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            *("arcee", "dots1", "ernie4_5", "gemma", "glm", "glm4_moe", "gpt_oss"),
            *("helium", "hunyuan_v1_dense", "llama", "mistral", "mixtral", "nemotron", "olmo", "qwen2", "qwen2_moe"),
            *("qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
        ),
        LLAMA,
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), replace(LLAMA, kv=False)),
    **dict.fromkeys(("kimi_linear", "qwen3_5_text", "qwen3_next"), MIXED),
    **dict.fromkeys(("gemma2", "gemma3_text"), SANDWICH),
    **dict.fromkeys(("exaone4", "olmo2", "olmo3"), POST_NORM),
    **dict.fromkeys(("cohere", "cohere2"), Family(parallel=True, readers=())),
    "glm4": Family(writers=(("post_self_attn_layernorm",), ("post_mlp_layernorm",))),
    "gpt2": Family(layers="h", attention=("attn",), writers=(("attn",), ("mlp",)), readers=("ln_2",)),
    "gpt_neox": NEOX,
    "granite": replace(LLAMA, scale="residual_multiplier"),
    "granitemoe": Family(writers=(("self_attn",), ("block_sparse_moe",)), scale="residual_multiplier"),
    "lfm2": Family(
        attention=("self_attn", "conv"),
        writers=(("self_attn", "conv"), ("feed_forward",)),
        readers=("ffn_norm",),
        kv=False,
    ),
    "phi": Family(writers=(("resid_dropout",),), parallel=True, readers=(), kv=False),
    "phi3": Family(writers=(("resid_attn_dropout",), ("resid_mlp_dropout",))),
}

REFUSED: dict[str, str] = {
    "bloom": "its layers add to the stream inside a function, where nothing can be put between",
    "deepseek_v4": "it has hyper-connections of its own; `depthmix convert --from deepseek_v4` reads them",
    "falcon": "its layers add to the stream inside a function, where nothing can be put between",
    "gemma3n": "its layers read inputs of their own beside the stream and share keys and values",
    "gemma4": "its layers read inputs of their own beside the stream and share keys and values",
    "gemma4_text": "its layers read inputs of their own beside the stream and share keys and values",
    "gptj": "its layers add to the stream inside a function, where nothing can be put between",
    "jamba": "its layers keep a recurrent state whose sublayers are not in the table",
    "mamba": "it is a recurrent network without attention and MLP sublayers",
    "mamba2": "it is a recurrent network without attention and MLP sublayers",
    "mpt": "its layers add to the stream inside a function, where nothing can be put between",
    "opt": "its layers reshape the stream, and some of its models normalise after the addition",
}


def family_of(config: Any) -> Family:
    """The family of a model's configuration, or an error that says why there is none."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"model_type={name!r} is an encoder and a decoder; expected a decoder alone, such as llama")
    if name in REFUSED:
        raise ValueError(f"model_type={name!r} cannot be wrapped: {REFUSED[name]}. Expected one of {known()}")
    if name not in FAMILIES:
        if name.removesuffix("_moe") in ("gemma3", "mllama", "qwen3_5") or hasattr(config, "vision_config"):
            raise ValueError(
                f"model_type={name!r} holds a language model beside other parts; expected the language model alone. "
                f"Expected one of {known()}"
            )
        raise ValueError(
            f"model_type={name!r} is not known. {did_you_mean(name, FAMILIES)}Expected one of {known()}. For a "
            "model of your own, put a dm.DepthStack into its forward pass"
        )
    if name == "gpt_neox" and config.use_parallel_residual:
        return replace(NEOX, parallel=True, readers=())
    if name == "stablelm" and config.use_parallel_residual:
        raise ValueError("stablelm with use_parallel_residual=True cannot be wrapped; expected the sequential form")
    return FAMILIES[name]


def known() -> str:
    return ", ".join(sorted(FAMILIES))
