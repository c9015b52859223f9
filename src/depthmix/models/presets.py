"""Named decoder configurations, in the sizes of the papers."""

from __future__ import annotations

from typing import Any

from depthmix.models.backbones import KIMI_LINEAR, derive, kimi_layers, kimi_router
from depthmix.models.config import DecoderConfig
from depthmix.support.checks import did_you_mean


def depth_attention(
    dim: int, hidden: int, layers: int, heads: int, kv_heads: int, stride: int, init_std: float
) -> dict[str, Any]:
    """Depth-Attention (arXiv 2606.05014).

    The names are the paper's and include untied embeddings. 1.5b and 3b have fewer parameters than their names say
    (1.34 and 2.75 billion). Keys are normed after RoPE and queries before it, as in the authors' code and weights.
    """
    return {
        "vocab_size": 50304,
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 64,
        "hidden": hidden,
        "norm_eps": 1e-5,
        "key_norm": "after_rope",
        "init_std": init_std,
        "kv_mixer": {"name": "depth_attention", "stride": stride},
    }


def depth_attention_looped() -> dict[str, Any]:
    """Depth-Attention's looped 500M (arXiv 2606.05014): the model of that size with all layers run 3 times.

    The paper has one paragraph on it and no code: a layer that runs again uses the values of its own earlier runs as
    extra sources. The rest is depthmix's choice: which layers are looped (all, as the model has no others); that the
    sources of the stride remain (loop="both"), with the plain model's stride of 12, so that layers 0 and 12 are sources
    in every loop; and the recipe of the loop itself, for which the paper cites other work.
    """
    plain = depth_attention(1152, 3072, 24, 18, 18, 12, 0.02)
    mixer = {**plain["kv_mixer"], "loop": "both"}
    return {**plain, "loop": {"first": 0, "last": 24, "repeats": 3}, "kv_mixer": mixer}


def attnres(layers: int, dim: int, hidden: int) -> dict[str, Any]:
    """Attention Residuals (arXiv 2603.15031), Table 2: as many heads as layers, 8 of 64 experts and a shared one, on
    the paper's backbone, Kimi Linear.

    The names count the parameters active per token, without embeddings and head. The table gives neither the sizes of
    the heads nor the MLP of the first layer. Those of the same authors' larger model (heads of 128, a latent of 512 and
    64 shared channels), MLA in the last layer and a first MLP of width 6 · dim give all five names to rounding; without
    MLA in the last layer nothing simple does. Vocabulary, router and scale of the experts are the larger model's too.
    """
    return {
        "vocab_size": 163840,
        "dim": dim,
        "layers": layers,
        "hidden": 6 * dim,
        "norm_eps": 1e-5,
        **kimi_layers(layers, layers, 128, rank=min(512, dim), shared=64),
        "moe": {"experts": 64, "active": 8, "shared": 1, "hidden": hidden, **kimi_router(layers)},
        "mixer": {"name": "block_attnres", "num_blocks": 8},
    }


def attnres_gqa(layers: int, dim: int, hidden: int) -> dict[str, Any]:
    """The same table with grouped-query attention and RoPE, and experts in every layer.

    Heads of 128 with as many key-value as query heads give 2.8 to 5.7 % fewer parameters than the names; half as many
    key-value heads 12 to 14 % fewer; heads of dim / heads channels 18 to 20 % fewer.
    """
    moe = {"experts": 64, "active": 8, "shared": 1, "hidden": hidden, "scoring": "sigmoid"}
    return {
        "vocab_size": 163840,
        "dim": dim,
        "layers": layers,
        "heads": layers,
        "head_dim": 128,
        "hidden": 9 * hidden,  # for the dense model of the same cost, with moe=None
        "norm_eps": 1e-5,
        "moe": moe,
        "mixer": {"name": "block_attnres", "num_blocks": 8},
    }


def kimi_linear_48b() -> dict[str, Any]:
    """Kimi Linear (arXiv 2510.26692) with Block AttnRes as in arXiv 2603.15031: 54 sublayers in 9 blocks of 6.

    49.1 billion parameters, of which a token uses 3.5; without embedding and head, 48.4 and 2.7.
    """
    return {
        "vocab_size": 163840,
        "dim": 2304,
        "layers": 27,
        "hidden": 9216,
        "norm_eps": 1e-5,
        **kimi_layers(27, 32, 128, rank=512, shared=64),
        "moe": {"experts": 256, "active": 8, "shared": 1, "hidden": 1024, **kimi_router(27)},
        "mixer": {"name": "block_attnres", "num_blocks": 9},
    }


def kimi_linear_tiny() -> dict[str, Any]:
    """The dial's Kimi Linear of 8 layers and width 128, on bytes: small enough to train on two cores."""
    return {
        "vocab_size": 256,
        "dim": 128,
        "layers": 8,
        **derive(KIMI_LINEAR, 128, 8),
        "init_std": 0.044,
        "output_init": 0.25,
        "mixer": {"name": "block_attnres", "num_blocks": 4},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "depth-attention-360m": depth_attention(960, 2540, 24, 15, 15, 12, 0.02),
    "depth-attention-500m": depth_attention(1152, 3072, 24, 18, 18, 12, 0.02),
    "depth-attention-500m-x3": depth_attention_looped(),
    "depth-attention-710m": depth_attention(1280, 3072, 32, 20, 20, 16, 0.02),
    "depth-attention-1.5b": depth_attention(1536, 4096, 48, 24, 6, 24, 0.01),
    "depth-attention-3b": depth_attention(2048, 6912, 48, 32, 8, 24, 0.01),
    "attnres-194m": attnres(12, 896, 400),
    "attnres-241m": attnres(13, 960, 432),
    "attnres-296m": attnres(14, 1024, 464),
    "attnres-436m": attnres(16, 1168, 528),
    "attnres-528m": attnres(17, 1264, 560),
    "attnres-194m-gqa": attnres_gqa(12, 896, 400),
    "attnres-241m-gqa": attnres_gqa(13, 960, 432),
    "attnres-296m-gqa": attnres_gqa(14, 1024, 464),
    "attnres-436m-gqa": attnres_gqa(16, 1168, 528),
    "attnres-528m-gqa": attnres_gqa(17, 1264, 560),
    "kimi-linear-48b": kimi_linear_48b(),
    "kimi-linear-tiny": kimi_linear_tiny(),
}


def preset(name: str, **overrides: Any) -> DecoderConfig:
    """The configuration of a name in `PRESETS`, with some of its fields overridden."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}. {did_you_mean(name, PRESETS)}Known: {', '.join(PRESETS)}")
    return DecoderConfig.from_dict({**PRESETS[name], **overrides})
