"""Which parameters take weight decay and which may go to Muon, one by one.

Queries, key and norm weights, scales, biases and learned coefficients are left alone; projections that make gates, keys
or queries out of the stream decay; Muon takes the projections of input queries.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import depthmix as dm
from depthmix.mechanisms.registry import DEPTH
from tests.cases import EVERY_CASE

ALONE, DECAYS, MUON = (0.0, False), (0.3, False), (0.3, True)  # weight decay, and whether Muon may take it
FAMILY = {"query": ALONE, "key_weight": ALONE, "logits": ALONE, "query_proj": MUON}
TABLE: dict[str, dict[str, tuple[float, bool]]] = {
    "attnres": FAMILY,
    "block_attnres": FAMILY,
    "ddl": {"beta_weight": DECAYS, "beta_bias": ALONE, "value_weight": DECAYS, "value_bias": ALONE, "readout": ALONE},
    "delta_attnres": FAMILY,
    "denseformer": {"weights": ALONE},
    "highway": {"weight": DECAYS, "bias": ALONE},
    "hyper_connections": {
        "alpha_m": ALONE,
        "alpha_r": ALONE,
        "beta": ALONE,
        "norm_weight": ALONE,
        "w_m": DECAYS,
        "w_r": DECAYS,
        "w_b": DECAYS,
        "s_a": ALONE,
        "s_b": ALONE,
        "readout": ALONE,
    },
    "linear_attention": {
        "query": ALONE,
        "key_proj": DECAYS,
        "embedding_key_proj": DECAYS,
        "key_bias": ALONE,
        "embedding_key_bias": ALONE,
        "gate_proj": DECAYS,
        "gate_weight": DECAYS,
        "gate_bias": ALONE,
        "beta_weight": DECAYS,
        "embedding_beta_weight": DECAYS,
        "beta_bias": ALONE,
        "embedding_beta_bias": ALONE,
    },
    "mhc": {"projection": DECAYS, "bias": ALONE, "scale": ALONE},
    "mhc_lite": {"projection": DECAYS, "bias": ALONE, "scale": ALONE},
    "mrla": {
        "gamma": ALONE,
        "decay": ALONE,
        "q_weight": ALONE,
        "k_weight": ALONE,
        "embedding_q_weight": ALONE,
        "embedding_k_weight": ALONE,
    },
    "residual": {},
    "scaled_residual": {"scale": ALONE},
}


@EVERY_CASE
def test_every_parameter_is_in_the_group_of_its_row(name: str, options: dict[str, Any]) -> None:
    whole = dm.DepthStack(name, dim=8, depth=5, **options)
    for stack in (whole, whole.slice(0, 2), whole.slice(3, 5)):
        groups = dm.param_groups(stack, weight_decay=0.3)
        placed = {
            full_name: (parameter, (group["weight_decay"], group["muon"]))
            for group in groups
            for full_name, parameter in zip(group["names"], group["params"], strict=True)
        }
        assert sum(len(group["params"]) for group in groups) == len(placed)
        assert placed.keys() == dict(stack.named_parameters()).keys()
        for full_name, parameter in stack.named_parameters():
            assert placed[full_name][0] is parameter
            assert placed[full_name][1] == TABLE[name][full_name.rsplit(".", 1)[1]], full_name
        assert len({(group["weight_decay"], group["muon"]) for group in groups}) == len(groups)


@pytest.mark.parametrize("name", DEPTH)
def test_every_row_is_a_parameter_of_some_variant(name: str) -> None:
    stacks = [dm.DepthStack(name, dim=8, depth=5, **options) for options in dm.mechanism(name).variants]
    assert {key.rsplit(".", 1)[1] for stack in stacks for key, _ in stack.named_parameters()} == TABLE[name].keys()


def test_decay_is_a_tenth_where_nothing_else_is_said_and_moves_what_decays_only() -> None:
    stack = dm.DepthStack("hyper_connections", dim=8, depth=3)
    groups = dm.param_groups(stack)
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.1]
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.fill_(1)
            parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(groups, lr=0.5).step()
    moved = {name.rsplit(".", 1)[1] for name, p in stack.named_parameters() if not (p == 1).all()}
    assert moved == {"w_m", "w_r", "w_b"}
    assert all((p == 0.95).all() for name, p in stack.named_parameters() if name.rsplit(".", 1)[1] in moved)
