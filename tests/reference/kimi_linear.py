"""Kimi Linear (arXiv 2510.26692) as a whole, from the tensors of a checkpoint under their public names.

Axes: B rows, T tokens, D model width, H heads, P = H times the channels of a head, W width of a convolution, E experts.

    v_0       = row of model.embed_tokens for each token
    f_{2i+1}  = KDA or MLA of layer i after its input_layernorm              sublayers count from 1, layers from 0
    f_{2i+2}  = MLP or experts of layer i after its post_attention_layernorm
    norm(h)   = w h / sqrt(mean h^2 + eps)
    h_1 ... h_{L+1} = what sublayers and head read: by default the plain residual, h_{l+1} = h_l + f_l(h_l)
    logits    = lm_head norm(h_{L+1}; model.norm)

KDA, MLA and the experts are those of the references beside this file, whose names `kda_params`, `mla_params` and
`moe_params` make of the public ones:

    model.layers.{i}.input_layernorm.weight, post_attention_layernorm.weight                          [D]
    model.layers.{i}.self_attn.{q,k,v,o,b,f_a,f_b,g_a,g_b}_proj.weight, o_norm.weight, dt_bias         KDA
    model.layers.{i}.self_attn.{q,k,v}_conv1d.weight [P, 1, W], A_log [1, 1, H, 1] or [H]              KDA
    model.layers.{i}.self_attn.{q_proj,kv_a_proj_with_mqa,kv_a_layernorm,kv_b_proj,o_proj}.weight      MLA
    model.layers.{i}.mlp.{gate,up,down}_proj.weight                                                    dense
    model.layers.{i}.block_sparse_moe.gate.weight, gate.e_score_correction_bias                        experts
    model.layers.{i}.block_sparse_moe.experts.{e}.{w1,w3,w2}.weight                                    gate, up, down
    model.layers.{i}.block_sparse_moe.shared_experts.{gate,up,down}_proj.weight                        shared

A dense MLP may also be called block_sparse_moe.{gate,up,down}_proj, as transformers saves it.

Anything that mixes over depth takes the place of the residual: a callable of v_0 and the list of sublayers that returns
[h_1, ..., h_{L+1}], which is what `inputs` of every mechanism's reference does. Block attention residuals in 9 blocks:

    from tests.reference import block_attnres
    depth = lambda x, sublayers: block_attnres.inputs(x, sublayers, mixers, num_blocks=9, eps=1e-5)
    logits(tokens, weights, attention=..., heads=..., active=..., depth=depth)

with `mixers` the parameters of that reference (mixers.{l}.query, mixers.{l}.key_weight, out.query, out.key_weight).
"""

from collections.abc import Callable, Sequence

import torch

from tests.reference import kda, mla, moe, residual

Params = dict[str, torch.Tensor]
Sublayer = Callable[[torch.Tensor], torch.Tensor]
Depth = Callable[[torch.Tensor, list[Sublayer]], list[torch.Tensor]]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Every token of x [B, T, D] alone."""
    tokens = [weight * token / torch.sqrt((token * token).mean() + eps) for token in x.reshape(-1, x.shape[-1])]
    return torch.stack(tokens).reshape(x.shape) if tokens else x


def kda_params(weights: Params, place: str) -> Params:
    """Of self_attn at this place, under the names of the reference of KDA."""
    params = {
        f"{name}.weight": weights[f"{place}.{name}.weight"]
        for name in (*(f"{part}_proj" for part in ("q", "k", "v", "o", "b", "f_a", "f_b", "g_a", "g_b")), "o_norm")
    }
    for part in "qkv":
        params[f"{part}_conv"] = weights[f"{place}.{part}_conv1d.weight"][:, 0]
    params["A_log"] = weights[f"{place}.A_log"].reshape(-1)
    params["dt_bias"] = weights[f"{place}.dt_bias"]
    return params


def mla_params(weights: Params, place: str) -> Params:
    """Of self_attn at this place, under the names of the reference of MLA."""
    public = {
        "q_proj": "q_proj",
        "kv_a": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "kv_b": "kv_b_proj",
        "o_proj": "o_proj",
    }
    return {name: weights[f"{place}.{theirs}.weight"] for name, theirs in public.items()}


def moe_params(weights: Params, place: str) -> Params:
    """Of block_sparse_moe at this place, under the names of the reference of experts."""
    params = {"router": weights[f"{place}.gate.weight"]}
    if f"{place}.gate.e_score_correction_bias" in weights:
        params["balance_bias"] = weights[f"{place}.gate.e_score_correction_bias"]
    E = params["router"].shape[0]
    for name, public in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        params[name] = torch.stack([weights[f"{place}.experts.{e}.{public}.weight"] for e in range(E)])
        if f"{place}.shared_experts.{name}.weight" in weights:
            params[f"shared.{name}.weight"] = weights[f"{place}.shared_experts.{name}.weight"]
    return params


def mlp(x: torch.Tensor, weights: Params, layer: str, *, active: int, scale: float) -> torch.Tensor:
    """The dense MLP or the experts of a layer, whichever the checkpoint has, of x [B, T, D] that is normalised."""
    if f"{layer}.block_sparse_moe.gate.weight" in weights:
        return moe.sublayer(x, moe_params(weights, f"{layer}.block_sparse_moe"), active=active, scale=scale)
    place = next(p for p in (f"{layer}.mlp", f"{layer}.block_sparse_moe") if f"{p}.gate_proj.weight" in weights)
    parts = [weights[f"{place}.{name}.weight"] for name in moe.NAMES]
    tokens = [moe.swiglu(token, *parts) for token in x.reshape(-1, x.shape[-1])]
    return torch.stack(tokens).reshape(x.shape) if tokens else x


def sublayers(
    weights: Params,
    *,
    attention: Sequence[str],
    heads: int,
    kda_heads: int | None = None,
    active: int,
    scale: float = 2.446,
    eps: float = 1e-5,
    kv_norm_eps: float = 1e-6,
    documents: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
) -> list[Sublayer]:
    """[f_1, ..., f_L] of [B, T, D]. `heads` are those of MLA, and of KDA where kda_heads is not given."""
    rows = {"documents": documents, "valid": valid}

    def attend(i: int, h: torch.Tensor) -> torch.Tensor:
        layer = f"model.layers.{i}"
        x = norm(h, weights[f"{layer}.input_layernorm.weight"], eps)
        if attention[i] == "kda":
            return kda.sublayer(x, kda_params(weights, f"{layer}.self_attn"), heads=kda_heads or heads, eps=eps, **rows)
        if attention[i] == "mla":
            return mla.sublayer(x, mla_params(weights, f"{layer}.self_attn"), heads=heads, eps=kv_norm_eps, **rows)
        raise ValueError(f"unknown attention {attention[i]!r}")

    def feed(i: int, h: torch.Tensor) -> torch.Tensor:
        layer = f"model.layers.{i}"
        x = norm(h, weights[f"{layer}.post_attention_layernorm.weight"], eps)
        return mlp(x, weights, layer, active=active, scale=scale)

    return [lambda h, i=i, f=f: f(i, h) for i in range(len(attention)) for f in (attend, feed)]


def logits(
    tokens: torch.Tensor,
    weights: Params,
    *,
    attention: Sequence[str],
    heads: int,
    kda_heads: int | None = None,
    active: int,
    scale: float = 2.446,
    eps: float = 1e-5,
    kv_norm_eps: float = 1e-6,
    documents: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    depth: Depth | None = None,
) -> torch.Tensor:
    """[B, T, vocabulary] of tokens [B, T]; attention has "kda" or "mla" for each layer. Nothing depends on padding."""
    f = sublayers(
        weights,
        attention=attention,
        heads=heads,
        kda_heads=kda_heads,
        active=active,
        scale=scale,
        eps=eps,
        kv_norm_eps=kv_norm_eps,
        documents=documents,
        valid=valid,
    )
    x = weights["model.embed_tokens.weight"][tokens]
    h = residual.inputs(x, f, {})[-1] if depth is None else depth(x, f)[-1]
    y = norm(h, weights["model.norm.weight"], eps)
    return torch.stack([torch.stack([weights["lm_head.weight"] @ token for token in row]) for row in y])
