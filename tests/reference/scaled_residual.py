"""The residual stream with each output scaled before it is added (ReZero, LayerScale).

Axes: ... leading shape (tokens), D width, L sublayers; rows l = 1 … L+1 and sources i = 0 … L.

    h_1 = v_0
    h_{l+1} = h_l + a_l ⊙ v_l,    v_l = f_l(h_l)

    M_{0→l} = 1,    M_{i→l} = a_i    for 1 ≤ i < l

a_l is one number (gate="scalar") or one per channel (gate="channel"; then M has a channel axis).
The option init is the start of a_l only: the values themselves are in params.
"""

import torch


def _scale(params: dict[str, torch.Tensor], ell: int, gate: str, D: int) -> torch.Tensor:
    """a_l as [] (scalar) or [D] (channel)."""
    a = params[f"mixers.{ell - 1}.scale"]
    if gate == "scalar":
        return a.reshape(())
    if gate == "channel":
        return a.reshape(D)
    raise ValueError(f"gate {gate!r}")


def inputs(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    gate: str = "scalar",
    init: float | None = None,
) -> list[torch.Tensor]:
    """[h_1, ..., h_{L+1}], each shaped like x."""
    h = x  # h_1 = v_0
    hs = [h]
    for ell, f in enumerate(sublayers, start=1):
        a = _scale(params, ell, gate, x.shape[-1])
        v = f(h)  # v_l = f_l(h_l)
        h = h + a * v  # h_{l+1} = h_l + a_l ⊙ v_l
        hs.append(h)
    return hs


def matrix(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    gate: str = "scalar",
    init: float | None = None,
) -> torch.Tensor:
    """M as [..., L+1, L+1] (scalar) or [..., D, L+1, L+1] (channel)."""
    L, D = len(sublayers), x.shape[-1]
    lead = x.shape[:-1] + ((D,) if gate == "channel" else ())
    zero, one = x.new_zeros(lead), x.new_ones(lead)
    rows = []
    for ell in range(1, L + 2):
        row = []
        for i in range(L + 1):
            if i >= ell:
                row.append(zero)
            elif i == 0:
                row.append(one)  # M_{0→l} = 1
            else:
                row.append(_scale(params, i, gate, D).expand(lead))  # M_{i→l} = a_i
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=-2)
