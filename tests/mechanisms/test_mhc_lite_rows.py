"""Weights of the authors' mHC-lite and ours: the same transitions, with their rows in another order."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import depthmix as dm
from depthmix.mechanisms.mhc_lite import permute_rows

DIM = 5


def authors_permutations(items: list[int]) -> list[list[int]]:
    """All orders of the items, lexicographically: the first item varies slowest."""
    if not items:
        return [[]]
    return [[first, *rest] for first in items for rest in authors_permutations([i for i in items if i != first])]


def authors_site(streams: Tensor, weights: dict[str, Tensor], biases: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """(H_pre, H_post, mixed streams) of one token's streams [m, D], from weights [m·D, rows]; scales 0.01.

    H_res = Σ_r softmax(·)_r I[π_r] (row i of I[π] is row π(i) of the identity), and a new stream t is
    Σ_s H_res[s, t] H[s]: the first axis is the one that is summed.
    """
    m = len(streams)
    flat = streams.reshape(-1)
    normed = flat / flat.norm() * math.sqrt(len(flat))
    orders = authors_permutations(list(range(m)))
    shares = torch.softmax(0.01 * normed @ weights["res"] + biases["res"], -1)
    transition = torch.zeros(m, m, dtype=streams.dtype)
    for r, order in enumerate(orders):
        for i in range(m):
            transition[i, order[i]] += shares[r]
    mixed = torch.stack([sum(transition[s, t] * streams[s] for s in range(m)) for t in range(m)])
    h_pre = torch.sigmoid(0.01 * normed @ weights["pre"] + biases["pre"])
    h_post = 2 * torch.sigmoid(0.01 * normed @ weights["post"] + biases["post"])
    return h_pre, h_post, mixed


@pytest.mark.parametrize("m", [2, 3, 4])
def test_converted_weights_of_the_authors_compute_what_theirs_do(m: int) -> None:
    torch.manual_seed(m)
    width, count = m * DIM, math.factorial(m)
    parts = {"pre": m, "post": m, "res": count}
    weights = {name: 100 * torch.randn(width, rows, dtype=torch.float64) for name, rows in parts.items()}
    biases = {name: torch.randn(rows, dtype=torch.float64) for name, rows in parts.items()}
    stack = dm.DepthStack("mhc_lite", dim=DIM, depth=2, streams=m, start="paper", norm_eps=1e-30).to(torch.float64)
    site = stack[1]
    streams, v = torch.randn(m, DIM, dtype=torch.float64), torch.randn(DIM, dtype=torch.float64)
    projection, bias = torch.cat(list(weights.values()), 1).T, torch.cat(list(biases.values()))

    def ours(projection: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            site.projection.copy_(projection)
            site.bias.copy_(bias)
            site.scale.fill_(0.01)
            h, carry = site.read((streams,))
            return h, site.write((streams,), carry, v)[0]

    h_pre, h_post, mixed = authors_site(streams, weights, biases)
    wanted = mixed + h_post[:, None] * v
    h, written = ours(permute_rows(projection, m), permute_rows(bias, m))
    assert torch.allclose(h, h_pre @ streams, rtol=0, atol=1e-12)
    assert torch.allclose(written, wanted, rtol=0, atol=1e-12)
    _, unconverted = ours(projection, bias)
    assert torch.allclose(unconverted, wanted, rtol=0, atol=1e-12) == (m == 2)


@pytest.mark.parametrize(("m", "moved"), [(2, 0), (3, 2), (4, 14), (5, 94)])
def test_the_conversion_is_its_own_inverse_and_moves_rows_of_the_transition_only(m: int, moved: int) -> None:
    count = math.factorial(m)
    rows = torch.arange(2 * m + count)
    there = permute_rows(rows, m)
    assert torch.equal(permute_rows(there, m), rows)
    assert torch.equal(there[: 2 * m + 1], rows[: 2 * m + 1])  # pre, post and the identity
    assert int((there != rows).sum()) == moved
    assert torch.equal(permute_rows(rows[2 * m :], m), there[2 * m :])


def test_rows_that_cannot_be_a_transition_are_refused() -> None:
    with pytest.raises(ValueError, match=r"7 rows with streams=4; expected at least 24 rows.*Transpose"):
        permute_rows(torch.zeros(7, 24), 4)
