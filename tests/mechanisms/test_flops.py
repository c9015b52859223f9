"""FLOPs that mechanisms state: against counts by hand, and against a dispatch mode that sees every operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import depthmix as dm
from depthmix import ops
from depthmix.mechanisms import kv_mechanism
from depthmix.ops import reference
from depthmix.ops.attend import reference as attend_reference
from depthmix.ops.attend import torch_form
from tests.cases import EVERY_CASE, label
from tests.flop_mode import FlopMode, flops_per_token

# A width where terms of width D decide, and one where the numbers per source or row weigh as well. A forgotten term of
# the first kind is 10 % or more of a read, a forgotten softmax 8 % at width 8. What differs is how a root is taken.
TOLERANCE = {64: 0.02, 8: 0.06}
DEPTH = 9
# In the split form of a trace these do again what `read` carries over, and ddl makes its key.
AGAIN = ("ddl", "denseformer")
KV = [(name, dict(o)) for name in dm.list_mechanisms(kind="kv") for o in kv_mechanism(name).variants]
LOOPED = (0, 1, 2, 1, 2, 1, 2, 3)


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch form without what keeps squares from overflowing; and a mixture of n sources takes n additions."""

    def plain_parts(v: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        v = ops.wide(v)
        return v, torch.rsqrt(v.square().mean(-1, keepdim=True) + eps), v.new_ones(())

    for module in (reference, attend_reference):
        monkeypatch.setattr(module, "rms_parts", plain_parts)
    mixture = ops.weighted_mixture
    for module in (ops, torch_form):
        monkeypatch.setattr(module, "weighted_mixture", lambda *given: mixture(*given) + 0)


def count_first_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    """For mechanisms whose mixture is `ops.weighted_sum`."""
    weighted = ops.weighted_sum
    monkeypatch.setattr(ops, "weighted_sum", lambda *given: weighted(*given) + 0)


@torch.no_grad()
def by_read(stack: dm.DepthStack, tokens: int) -> None:
    """As a model runs it; sublayers cost nothing."""
    x = torch.ones(tokens, stack.dim)
    with ops.using("torch"):
        state = stack.begin(x)
        for mixer in stack:
            _, carry = mixer.read(state)
            state = mixer.write(state, carry, x)
        stack.end(state)


@torch.no_grad()
def by_parts(stack: dm.DepthStack, tokens: int) -> None:
    """coeff, combine, value, update: as a trace runs it."""
    x = torch.ones(tokens, stack.dim)
    with ops.using("torch"):
        state = stack.begin(x)
        for mixer in stack.all_mixers():
            c = mixer.coeff(state)
            mixer.combine(state, c)
            if not mixer.site.is_out:
                state = mixer.update(state, *mixer.value(state, c, x))


def deviation(run: Callable[[int], None], stated: int | None) -> float:
    assert stated is not None
    return flops_per_token(run) / stated - 1


@EVERY_CASE
@pytest.mark.parametrize("dim", TOLERANCE)
def test_stated_flops_are_those_of_every_operation(
    name: str, options: dict[str, Any], dim: int, lean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "denseformer":
        count_first_addition(monkeypatch)
    stack = dm.DepthStack(name, dim=dim, depth=DEPTH, **options)
    facts = stack.facts
    assert (facts.flops_two_phase is not None) == facts.two_phase
    if facts.two_phase:
        assert abs(deviation(lambda tokens: by_read(stack, tokens), facts.flops_two_phase)) < TOLERANCE[dim]
    monkeypatch.setattr(ops, "sharing_pays", lambda *given: False)
    assert abs(deviation(lambda tokens: by_read(stack, tokens), facts.flops)) < TOLERANCE[dim]
    if name not in AGAIN:  # weights are multiplied by the number of sources there, not what is read
        assert abs(deviation(lambda tokens: by_parts(stack, tokens), facts.flops)) < 0.05


@pytest.mark.parametrize("order", [tuple(range(7)), LOOPED], ids=["plain", "looped"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("name", "options"), [pytest.param(*case, id=label(*case)) for case in KV])
def test_stated_flops_of_values_are_those_of_every_operation(
    name: str, options: dict[str, Any], groups: int, order: tuple[int, ...], lean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "depth_attention":
        count_first_addition(monkeypatch)
    stack = dm.KVStack(name, head_dim=8, order=order, **options)

    @torch.no_grad()
    def run(tokens: int) -> None:
        q, k = torch.ones(2 * groups, tokens, 8), torch.ones(2, tokens, 8)
        state = stack.begin()
        for mixer in stack:
            _, state = mixer.mix(q, k, k, state)

    facts = stack.facts(heads=2 * groups, kv_heads=2)
    assert facts.parameters == sum(p.numel() for p in stack.parameters())
    assert flops_per_token(run) == facts.flops == facts.forward_flops


D, L = 32, 3
NORM = 2 * D + 2  # D squares, their mean, eps and the root
HAND = {  # three sublayers of width 32, by their equations
    # Sites 2, 3 and the output read 2, 3 and 4 sources; of each norm, dot product, times 1/rms and scale, softmax
    # and mixture.
    "attnres": (2 + 3 + 4) * (NORM + 2 * D + 2 + 4 + 2 * D),
    # Blocks of 2: 2, 2 and 3 sources; the second sublayer is added to a partial.
    "block_attnres": (2 + 2 + 3) * (NORM + 2 * D + 2 + 4 + 2 * D) + D,
    # Sites 2 and 3; running sum and its addition to the mixture, and the sum that the output reads.
    "delta_attnres": (2 + 3) * (NORM + 2 * D + 2 + 4 + 2 * D) + 2 * 2 * D + D,
    "residual": 3 * D,
    "scaled_residual": 3 * 2 * D,
    # norm, one row, 1/rms, bias, σ twice; (1 − g) x + g v
    "highway": 3 * (NORM + 2 * D + 4 + 3 * D),
    # Averages of 2 and 3 block outputs; every output is added to a stream.
    "denseformer": (2 + 3) * 2 * D + 3 * D,
    # Four streams, each normed and projected to 5 rows at first, then 6; each number times 1/rms, tanh, times s, added.
    # Three reads and three writes: transition, gain times output, addition.
    "hyper_connections": 4 * (NORM + 5 * (2 * D + 4)) + 2 * 4 * (NORM + 6 * (2 * D + 4)) + 3 * 4 * (2 + 8 + 2) * D,
    # The norm of 4·D numbers, 20 rows at first, then 24: times 1/rms, a z + b, sigmoids with eps or factor; Sinkhorn:
    # softmax of 16, then 39 half-steps of sum, log, subtraction, exp.
    "mhc": (8 * D + 2) * 3 + (20 + 2 * 24) * (8 * D + 3) + (4 + 2 * 8) * 2 + 3 * (64 + 39 * 52) + 3 * 4 * 12 * D,
    # 28 rows at first, then 32; the softmax of 24 permutations, times 24 matrices of 16.
    "mhc_lite": (8 * D + 2) * 3 + (28 + 2 * 32) * (8 * D + 3) + (4 + 2 * 8) * 2 + 3 * (96 + 768) + 3 * 4 * 12 * D,
    # Four gates: norm, its product, square, weight, sum, scale and σ of one head. x + v, λ o + a v, x + γ o; λ a_0.
    "mrla": 4 * (NORM + 4 * D + 2) + 3 * (D + 3 * D + 2 * D) + D,
    # Read 2·D at four sites. Two rows for β and the target, 1/rms; bias, σ, 2; the key's length and the key; recall,
    # gap times β, rewrite.
    "ddl": 4 * 2 * D + 3 * (NORM + 2 * (2 * D + 1) + 3 + (NORM + D + 1) + 2 * D + 2 + 2 * D),
    # Four keys of 4 numbers; k vᵀ of the embedding, k vᵀ and an addition for three outputs; three reads.
    "linear_attention": 4 * (NORM + 4 * (2 * D + 2)) + 4 * D + 3 * 8 * D + 3 * 8 * D,
}


@pytest.mark.parametrize("name", dm.list_mechanisms())
def test_stated_flops_are_counted_by_hand(name: str) -> None:
    options = {"block_sublayers": 2} if name == "block_attnres" else {}
    assert dm.DepthStack(name, dim=D, depth=L, **options).facts.flops == HAND[name]


@settings(max_examples=40, deadline=None)
@given(depth=st.integers(1, 30), size=st.integers(1, 30), dim=st.sampled_from([4, 96]), block=st.booleans())
def test_two_phases_count_a_norm_once_for_each_group(depth: int, size: int, dim: int, block: bool) -> None:
    """A plain loop over groups and their sites."""
    size = min(size, depth) if block else max(1, round(math.sqrt(depth)))
    name, options = ("block_attnres", {"block_sublayers": size}) if block else ("attnres", {})
    facts = dm.DepthStack(name, dim=dim, depth=depth, **options).facts
    if not facts.two_phase:
        assert facts.flops_two_phase is None
        assert facts.forward_flops == facts.flops
        return
    wide = sum(site % size != 0 for site in range(depth)) if block else 0  # sublayers that add to a partial
    small = 0
    for start in range(0, depth + 1, size):
        sites = range(start, min(start + size, depth + 1))
        finished = 1 + (start // size if block else start)
        shared = finished > 1 and len(sites) > 1
        norms = finished if shared else 0
        for site in sites:
            recent = min(1, site - start) if block else site - start
            if finished + recent > 1:
                norms += recent if shared else finished + recent
                joins = shared and recent > 0  # what phase 1 found, as one more source
                wide += 4 * (finished + recent) + 2 * joins
                small += 6 * (finished + recent) + 4 * joins
        wide, small = wide + 2 * norms, small + 2 * norms
    assert facts.flops_two_phase == facts.forward_flops == wide * dim + small


def test_the_mode_counts_what_torch_leaves_out_and_refuses_what_it_does_not_know() -> None:
    x, w = torch.ones(5, 8), torch.ones(3, 8)
    with FlopMode() as mode:
        (x * x).sum(-1)
        torch.nn.functional.linear(x, w)
        x.to(torch.float64).unsqueeze(0).clone().amax(-1)
    assert mode.flops == 2 * 40 + 2 * 5 * 3 * 8
    with FlopMode(), pytest.raises(AssertionError, match=r"aten.erf.default: say in .*flop_mode what it counts"):
        torch.erf(x)
