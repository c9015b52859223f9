"""A decoder in plain loops, dense or with experts, with the values mixed over depth.

Axes: B batch, T tokens, D width, Q query heads, K key-value heads, g = Q/K, d channels a head, N executions of layers.
`order` names the layer that each execution runs. Parameters by name, with l the layer and n the execution:
embed.weight, sublayers.{2l}.{norm,q_proj,k_proj,v_proj,o_proj,q_norm,k_norm}.weight,
sublayers.{2l+1}.{norm,gate_proj,up_proj,down_proj}.weight, norm.weight, head.weight (absent: that of the embedding),
kv_mixers.{n}.{own,first} for value_residual. A layer with experts has sublayers.{2l+1}.{router,shared.gate_proj,
shared.up_proj,shared.down_proj}.weight and {gate_proj,up_proj,down_proj} [E, ...], and balance_bias [E] among `params`.

    norm(x; w) = w x / sqrt(mean(x^2) + eps)
    q, k       = rope(norm(W_q x; w_q)), rope(norm(W_k x; w_k))      per head;  key_norm="after": norm(rope(W_k x); w_k)
    rope       : channels i and i + d/2 turn by the angle  position theta^(-2i/d)
    u          = the values W_v x, mixed over depth
    o_i[t]     = sum_{s <= t} softmax_s(<q_i[t], k_h[s]> / sqrt(d)) u_h[s],   h = floor(i/g)
    x          = x + W_o o(norm(x));  x = x + W_down(silu(W_gate y) W_up y),  y = norm(x)
    experts    : p = sigmoid(W_r y) or softmax(W_r y);  C = the `active` experts of largest p + bias;
                 x = x + (scale / sum_{e in C} p_e) sum_{e in C} p_e expert_e(y) + shared(y)
"""

import math

import torch

from tests.reference import depth_attention, value_residual


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One vector x."""
    return weight * x / torch.sqrt((x * x).mean() + eps)


def rope(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """One head [d] of one token."""
    d = x.shape[0]
    low, high = [], []
    for i in range(d // 2):
        angle = position * theta ** (-2 * i / d)
        low.append(x[i] * math.cos(angle) - x[i + d // 2] * math.sin(angle))
        high.append(x[i + d // 2] * math.cos(angle) + x[i] * math.sin(angle))
    return torch.stack(low + high)


def project(
    x: list[torch.Tensor], params: dict[str, torch.Tensor], place: str, theta: float, key_norm: str, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [Q, T, d], k [K, T, d] and the raw v [K, T, d] of one sequence x, a list of T normed tokens [D]."""
    q_weight, k_weight = params[f"{place}.q_norm.weight"], params[f"{place}.k_norm.weight"]
    d = q_weight.shape[0]
    q, k, v = [], [], []
    for t, token in enumerate(x):
        q_all, k_all, v_all = (params[f"{place}.{name}.weight"] @ token for name in ("q_proj", "k_proj", "v_proj"))
        q.append(torch.stack([rope(norm(head, q_weight, eps), t, theta) for head in q_all.split(d)]))
        if key_norm == "before":
            k.append(torch.stack([rope(norm(head, k_weight, eps), t, theta) for head in k_all.split(d)]))
        elif key_norm == "after":
            k.append(torch.stack([norm(rope(head, t, theta), k_weight, eps) for head in k_all.split(d)]))
        else:
            raise ValueError(f"unknown key_norm {key_norm!r}")
        v.append(torch.stack(list(v_all.split(d))))
    return torch.stack(q, 1), torch.stack(k, 1), torch.stack(v, 1)


def attend(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor) -> list[torch.Tensor]:
    """Causal attention of one sequence: T tokens [Q d]."""
    Q, T, d = q.shape
    g = Q // k.shape[0]
    out = []
    for t in range(T):
        heads = []
        for i in range(Q):
            h = i // g
            logits = torch.stack([torch.dot(q[i, t], k[h, s]) / math.sqrt(d) for s in range(t + 1)])
            p = torch.softmax(logits, dim=0)
            heads.append(sum(p[s] * u[h, s] for s in range(t + 1)))
        out.append(torch.cat(heads))
    return out


def swiglu(z: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    a = gate @ z
    return down @ (a * torch.sigmoid(a) * (up @ z))


def mlp(z: torch.Tensor, params: dict[str, torch.Tensor], place: str) -> torch.Tensor:
    return swiglu(z, *(params[f"{place}.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")))


def experts(
    z: torch.Tensor, params: dict[str, torch.Tensor], place: str, *, active: int, scale: float, scoring: str
) -> torch.Tensor:
    """What the experts of a layer make of one normed token z [D]."""
    logits = params[f"{place}.router.weight"] @ z
    if scoring == "sigmoid":
        p = [1 / (1 + torch.exp(-logit)) for logit in logits]
    else:
        p = [torch.exp(logit) / torch.exp(logits).sum() for logit in logits]
    ranking = [p[e].item() for e in range(len(p))]
    if f"{place}.balance_bias" in params:
        ranking = [p[e].item() + params[f"{place}.balance_bias"][e].item() for e in range(len(p))]
    best = sorted(range(len(p)), key=ranking.__getitem__)[-active:]
    total = sum(p[e] for e in best)
    y = torch.zeros_like(z)
    for e in best:
        weights = (params[f"{place}.{name}"][e] for name in ("gate_proj", "up_proj", "down_proj"))
        y = y + scale * p[e] / total * swiglu(z, *weights)
    return y + mlp(z, params, f"{place}.shared") if f"{place}.shared.up_proj.weight" in params else y


def run(
    tokens: torch.Tensor,
    params: dict[str, torch.Tensor],
    *,
    order: list[int],
    theta: float = 1e6,
    eps: float = 1e-6,
    key_norm: str = "before",
    kv_mixer: str | None = None,
    kv_options: dict | None = None,
    moe: dict | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Logits [B, T, vocabulary] of tokens [B, T]; and of each execution q, k, raw v and mixed u, [B, heads, T, d]."""
    options = dict(kv_options or {})
    rule = options.pop("rule", "softmax")
    B, T = tokens.shape
    N = len(order)
    x = [[params["embed.weight"][tokens[b, t]] for t in range(T)] for b in range(B)]
    queries: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    mixed: list[torch.Tensor] = []
    for n, layer in enumerate(order):
        place = f"sublayers.{2 * layer}"
        y = [[norm(x_t, params[f"{place}.norm.weight"], eps) for x_t in row] for row in x]
        q, k, v = (
            torch.stack(list(each))
            for each in zip(*[project(row, params, place, theta, key_norm, eps) for row in y], strict=True)
        )
        if kv_mixer is None:
            u = v
        elif kv_mixer == "depth_attention":
            S = depth_attention.sources(n, N, order=order, **options)
            u = depth_attention.mix(q, k, v, [keys[j] for j in S], [mixed[j] for j in S], rule)
        elif kv_mixer == "value_residual":
            given = {"own": 0.5, "first": 0.5, "learned": True, **options}
            u = v if n == 0 else value_residual.mix(v, values[0], *value_residual.weights(n, v, params, **given))
        else:
            raise ValueError(f"unknown kv_mixer {kv_mixer!r}")
        for kept, new in zip((queries, keys, values, mixed), (q, k, v, u), strict=True):
            kept.append(new)
        for b in range(B):
            o = attend(q[b], k[b], u[b])
            x[b] = [x_t + params[f"{place}.o_proj.weight"] @ o_t for x_t, o_t in zip(x[b], o, strict=True)]

        place = f"sublayers.{2 * layer + 1}"
        for b in range(B):
            for t in range(T):
                z = norm(x[b][t], params[f"{place}.norm.weight"], eps)
                y = experts(z, params, place, **moe) if f"{place}.router.weight" in params else mlp(z, params, place)
                x[b][t] = x[b][t] + y

    head = params.get("head.weight", params["embed.weight"])
    logits = torch.stack([torch.stack([head @ norm(x_t, params["norm.weight"], eps) for x_t in row]) for row in x])
    return logits, queries, keys, values, mixed


def logits(tokens: torch.Tensor, params: dict[str, torch.Tensor], **options) -> torch.Tensor:
    """What `run` gives first."""
    return run(tokens, params, **options)[0]
