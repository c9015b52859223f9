"""How many parameters and how many bytes of cache a Kimi Linear model has, from formulas alone.

D model width, H heads, d channels of a head, P = H d, W width of a convolution, r latent rank, n and m channels of a
key of its own head and of the one that heads share, c channels of a value, F width of an expert, V vocabulary.

    KDA     3 D P + 3 P W + 2 (D d + d P) + P + H + D H + d + P D     q k v; conv; decay and gate; dt_bias; A_log; beta;
                                                                      o_norm; o_proj
    MLA     D H (n + m) + D (r + m) + r + r H (n + c) + H c D         q; latent; kv_norm; keys and values; o_proj
    dense   3 D (its width);   expert  3 D F;   router  D E
    norms   2 D per layer and D before the head;   embedding and head  V D each
    depth   2 L D for L sublayers of attention residuals              query and key weight of sublayers 2 ... L and head
    cache   MLA: r + m values per token;   KDA: d P in float32 and 3 (W - 1) P values per row, whatever its length

The bias that balances experts is a buffer, not a parameter. `shapes` lists every tensor of a checkpoint by its public
name, so that the formulas can be summed in a second way.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Model:
    """`attention` has "kda" or "mla" for each layer; the first `dense_layers` have a dense MLP."""

    attention: tuple[str, ...]
    dim: int
    heads: int
    dense_hidden: int
    expert_hidden: int
    experts: int
    active: int = 8
    shared: int = 1
    dense_layers: int = 1
    vocabulary: int = 163840
    head_dim: int = 128
    conv: int = 4
    rank: int = 512
    own_key: int = 128
    shared_key: int = 64
    value: int = 128


def three_to_one(layers: int) -> tuple[str, ...]:
    """Every fourth layer and the last one are MLA."""
    return tuple("mla" if i % 4 == 3 or i == layers - 1 else "kda" for i in range(layers))


def scaling_law(layers: int, heads: int, dim: int, expert_hidden: int) -> Model:
    """One of the five sizes of arXiv 2603.15031: 8 of 64 experts; the dense width is a fit, the paper has none."""
    return Model(
        attention=three_to_one(layers),
        dim=dim,
        heads=heads,
        dense_hidden=6 * dim,
        expert_hidden=expert_hidden,
        experts=64,
    )


KIMI_LINEAR_48B = Model(
    attention=three_to_one(27), dim=2304, heads=32, dense_hidden=9216, expert_hidden=1024, experts=256
)
SCALING_LAW = {
    "194M": scaling_law(12, 12, 896, 400),
    "241M": scaling_law(13, 13, 960, 432),
    "296M": scaling_law(14, 14, 1024, 464),
    "436M": scaling_law(16, 16, 1168, 528),
    "528M": scaling_law(17, 17, 1264, 560),
}


def kda(model: Model) -> int:
    D, H, d, W = model.dim, model.heads, model.head_dim, model.conv
    P = H * d
    return 3 * D * P + 3 * P * W + 2 * (D * d + d * P) + P + H + D * H + d + P * D


def mla(model: Model) -> int:
    D, H, r, n, m, c = model.dim, model.heads, model.rank, model.own_key, model.shared_key, model.value
    return D * H * (n + m) + D * (r + m) + r + r * H * (n + c) + H * c * D


def expert(model: Model) -> int:
    return 3 * model.dim * model.expert_hidden


def router(model: Model) -> int:
    return model.dim * model.experts


def dense(model: Model) -> int:
    return 3 * model.dim * model.dense_hidden


def embeddings(model: Model) -> int:
    """The embedding and the head."""
    return 2 * model.vocabulary * model.dim


def count(model: Model, *, experts: int) -> int:
    """All parameters but the embeddings, with so many routed experts in every layer that has them."""
    kinds = {"kda": kda(model), "mla": mla(model)}
    layers = len(model.attention)
    sparse = layers - model.dense_layers
    mixture = router(model) + (experts + model.shared) * expert(model)
    norms = (2 * layers + 1) * model.dim
    return sum(kinds[kind] for kind in model.attention) + model.dense_layers * dense(model) + sparse * mixture + norms


def total(model: Model) -> int:
    return count(model, experts=model.experts) + embeddings(model)


def active(model: Model) -> int:
    """What one token uses, the whole embedding included."""
    return count(model, experts=model.active) + embeddings(model)


def attnres(model: Model) -> int:
    """What attention residuals add; blocks have no parameters, so their number does not matter."""
    return 2 * 2 * len(model.attention) * model.dim


def cache_per_token(model: Model, *, element: int = 2) -> int:
    """Bytes; `element` are those of the cache's dtype (bfloat16: 2)."""
    return model.attention.count("mla") * (model.rank + model.shared_key) * element


def cache_per_row(model: Model, *, element: int = 2) -> int:
    """Bytes, whatever the length: the states in float32 and the last raw projections in the cache's dtype."""
    P = model.heads * model.head_dim
    return model.attention.count("kda") * (4 * model.head_dim * P + 3 * (model.conv - 1) * P * element)


def cache(model: Model, *, tokens: int, rows: int = 1, element: int = 2) -> int:
    """Bytes of rows with so many tokens each."""
    return rows * (tokens * cache_per_token(model, element=element) + cache_per_row(model, element=element))


def kda_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    D, H, d = model.dim, model.heads, model.head_dim
    P = H * d
    matrices = {"f_a": (d, D), "f_b": (P, d), "g_a": (d, D), "g_b": (P, d), "b": (H, D), "o": (D, P)}
    return {
        **{f"{part}_proj.weight": (P, D) for part in "qkv"},
        **{f"{part}_conv1d.weight": (P, 1, model.conv) for part in "qkv"},
        **{f"{part}_proj.weight": shape for part, shape in matrices.items()},
        "A_log": (1, 1, H, 1),
        "dt_bias": (P,),
        "o_norm.weight": (d,),
    }


def mla_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    D, H, r = model.dim, model.heads, model.rank
    return {
        "q_proj.weight": (H * (model.own_key + model.shared_key), D),
        "kv_a_proj_with_mqa.weight": (r + model.shared_key, D),
        "kv_a_layernorm.weight": (r,),
        "kv_b_proj.weight": (H * (model.own_key + model.value), r),
        "o_proj.weight": (D, H * model.value),
    }


def mlp_shapes(model: Model, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    D, F, E = model.dim, model.expert_hidden, model.experts

    def swiglu(place: str, width: int, names: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape in zip(names, ((width, D), (width, D), (D, width)), strict=True):
            yield f"{place}.{name}.weight", shape

    parts = ("gate_proj", "up_proj", "down_proj")
    if layer < model.dense_layers:
        yield from swiglu("mlp", model.dense_hidden, parts)
        return
    yield "block_sparse_moe.gate.weight", (E, D)
    yield "block_sparse_moe.gate.e_score_correction_bias", (E,)
    for e in range(E):
        yield from swiglu(f"block_sparse_moe.experts.{e}", F, ("w1", "w3", "w2"))
    yield from swiglu("block_sparse_moe.shared_experts", model.shared * F, parts)


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint, by its public name."""
    D, V = model.dim, model.vocabulary
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for i, kind in enumerate(model.attention):
        layer = f"model.layers.{i}"
        for name, shape in (kda_shapes if kind == "kda" else mla_shapes)(model).items():
            tensors[f"{layer}.self_attn.{name}"] = shape
        for name, shape in mlp_shapes(model, i):
            tensors[f"{layer}.{name}"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = (D,)
    return {**tensors, "model.norm.weight": (D,), "lm_head.weight": (V, D)}


def elements(tensors: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in tensors.values())
