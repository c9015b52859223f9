"""The backbones of the dial: fields of a decoder that follow from its width and its number of layers."""

from __future__ import annotations

from typing import Any

from depthmix.support.checks import did_you_mean

QWEN3, KIMI_LINEAR = "qwen3", "kimi_linear"
SCALE = 2.446  # of the routed experts, in Kimi Linear 48B
PERIOD = 4  # in Kimi Linear, every fourth layer has MLA


def qwen3(dim: int, layers: int, heads: int, hidden: int) -> dict[str, Any]:
    """Grouped-query attention with RoPE, and MLPs."""
    return {}


def kimi_linear(dim: int, layers: int, heads: int, hidden: int) -> dict[str, Any]:
    """KDA and MLA without positions in the order of `kimi_layers`; experts in all layers but the first.

    Sizes are in about the proportions of the 48B model, with fewer experts: 2 of 8 and a shared one, each of a quarter
    of the dense MLP's width; a latent of half the width; keys that all heads share of half a head.
    """
    width = max(1, dim // heads)
    experts = {"experts": 8, "active": 2, "shared": 1, "hidden": max(1, hidden // 4)}
    return {
        **kimi_layers(layers, heads, width, rank=16 * max(1, round(dim / 32)), shared=width // 2),
        "moe": {**experts, **kimi_router(layers)},
    }


BACKBONES = {QWEN3: qwen3, KIMI_LINEAR: kimi_linear}


def derive(backbone: str, dim: int, layers: int, heads: int | None = None, hidden: int | None = None) -> dict[str, Any]:
    """The fields that follow from the width and the number of layers, and from `heads` and `hidden` if these are given.

    Heads come from `dial_heads`; an MLP is 8/3 as wide as the stream, rounded up to a multiple of 64.
    """
    if backbone not in BACKBONES:
        known = ", ".join(map(repr, BACKBONES))
        raise ValueError(f"backbone={backbone!r}. {did_you_mean(backbone, BACKBONES)}Expected one of {known}")
    sizes = {
        "heads": dial_heads(dim) if heads is None else heads,
        "hidden": -(-8 * dim // (3 * 64)) * 64 if hidden is None else hidden,
    }
    return {**sizes, **BACKBONES[backbone](dim, layers, **sizes)}


def dial_heads(dim: int) -> int:
    """The number of heads: of about 64 channels, or about 32 below a width of 256, since with one or two heads the
    losses of different seeds differ several times as much."""
    most = max(1, dim // (64 if dim >= 256 else 32))
    return next((heads for heads in range(most, 1, -1) if dim % (2 * heads) == 0), 1)


def kimi_layers(layers: int, heads: int, width: int, *, rank: int, shared: int) -> dict[str, Any]:
    """Three layers of KDA and one of MLA in turn, and MLA in the last layer; with `heads` of `width` in both.

    Where 4 divides the number of layers, the order is written as a pattern that repeats, which suits any multiple of 4.
    """
    period = ("kda",) * (PERIOD - 1) + ("mla",)
    order = period if layers % PERIOD == 0 else (*(period * layers)[: layers - 1], "mla")
    kda = {"heads": heads, "head_dim": width} if "kda" in order else None
    mla = {"rank": rank, "nope": width, "shared": shared, "value": width}
    return {"heads": heads, "attention": order, "kda": kda, "mla": mla}


def kimi_router(layers: int) -> dict[str, Any]:
    """How Kimi Linear routes tokens to experts; the first layer has none, unless it is the only one."""
    return {"scoring": "sigmoid", "scale": SCALE, "dense_layers": min(1, layers - 1)}
