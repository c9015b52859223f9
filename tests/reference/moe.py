"""A mixture of experts with sigmoid scores, one token and one expert at a time.

Axes: ... leading shape (tokens), D model width, E experts, F width of an expert.

    f(x; G, U, V) = V (SiLU(G x) * U x)
    s_e = sigmoid(<R_e, x>)
    C   = the experts with the `active` largest s_e + b_e          b decides this and nothing else
    w_e = scale s_e / (sum_{i in C} s_i + 1e-20)                   for e in C
    y   = sum_{e in C} w_e f(x; G_e, U_e, V_e) + f(x; shared)      the shared expert is always read, and not scaled

x is already normalised. Parameters: router [E, D] (alone or with ".weight"); balance_bias [E] (b; absent: 0);
gate_proj and up_proj [E, F, D] and down_proj [E, D, F]; shared.{gate,up,down}_proj.weight (absent: no shared expert).
"""

import torch

Params = dict[str, torch.Tensor]
NAMES = ("gate_proj", "up_proj", "down_proj")


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """f of one token x [D]."""
    z = gate @ x
    return down @ (z / (1 + torch.exp(-z)) * (up @ x))


def route(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, *, active: int, scale: float
) -> dict[int, torch.Tensor]:
    """C of one token x [D], the largest s_e + b_e first, with the weight w_e of each."""
    E = router.shape[0]
    s = [1 / (1 + torch.exp(-torch.dot(router[e], x))) for e in range(E)]
    ranks = [s[e].item() + (0.0 if bias is None else bias[e].item()) for e in range(E)]
    chosen = sorted(range(E), key=lambda e: -ranks[e])[:active]
    total = sum(s[e] for e in chosen) + 1e-20
    return {e: scale * s[e] / total for e in chosen}


def token(x: torch.Tensor, params: Params, *, active: int, scale: float) -> torch.Tensor:
    """y of one token x [D]."""
    router = params["router"] if "router" in params else params["router.weight"]
    y = torch.zeros_like(x)
    for e, w in route(x, router, params.get("balance_bias"), active=active, scale=scale).items():
        y = y + w * swiglu(x, *(params[name][e] for name in NAMES))
    if "shared.gate_proj.weight" in params:
        y = y + swiglu(x, *(params[f"shared.{name}.weight"] for name in NAMES))
    return y


def sublayer(x: torch.Tensor, params: Params, *, active: int, scale: float = 1.0) -> torch.Tensor:
    """The output [..., D] of x [..., D]."""
    tokens = [token(each, params, active=active, scale=scale) for each in x.reshape(-1, x.shape[-1])]
    return torch.stack(tokens).reshape(x.shape) if tokens else x
