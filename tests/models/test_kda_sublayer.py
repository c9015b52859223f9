"""Kimi Delta Attention as a sublayer: its equations, its state, its start and its dtypes.

Axes: B batch, T token, D channel, H head, d channel of a head, P = H·d.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix import ops
from depthmix.models.kda import KDA, KDAState
from depthmix.models.kinds import KDAConfig
from tests.reference import kda as reference


def make(dim: int = 6, heads: int = 2, head_dim: int = 4, **options: Any) -> KDA:
    """A sublayer in float64 with every weight away from its start."""
    sublayer = KDA(dim, KDAConfig(heads=heads, head_dim=head_dim, **options), norm_eps=1e-5).double()
    with torch.no_grad():
        for parameter in sublayer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return sublayer


def expected(sublayer: KDA, h: Tensor, **given: Any) -> Tensor:
    config = sublayer.config
    x = sublayer.norm(h)
    return reference.sublayer(x, dict(sublayer.named_parameters()), heads=config.heads, bound=config.bound, **given)


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b.double()).detach().abs().max())


@pytest.mark.parametrize("options", [{}, {"bound": -5.0}, {"conv": 1}, {"conv": 3}], ids=str)
@pytest.mark.parametrize("tokens", [7, 40])
def test_the_sublayer_is_its_equations_with_gradients_of_every_parameter(tokens: int, options: dict[str, Any]) -> None:
    sublayer, h = make(**options), torch.randn(2, tokens, 6, dtype=torch.float64, requires_grad=True)
    leaves = [h, *sublayer.parameters()]
    ours, theirs = sublayer.scan(h)[0], expected(sublayer, h)
    assert gap(ours, theirs) <= 1e-12
    direction = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(y, leaves, direction) for y in (ours, theirs)), strict=True):
        assert gap(a, b) <= 1e-11


def test_documents_and_padding_are_each_sequence_alone() -> None:
    sublayer, h = make(), torch.randn(3, 40, 6, dtype=torch.float64)
    valid = torch.ones(3, 40, dtype=torch.bool)
    valid[0, :9] = valid[1, 30:] = valid[2, 12:20] = False
    documents = torch.tensor([0] * 15 + [1] * 25).expand(3, -1)
    for given in ({}, {"documents": documents}):
        order = ops.ValidFirst.of(valid)
        ours = sublayer.scan(h, order=order, **given)[0] * valid.unsqueeze(-1)
        assert gap(ours, expected(sublayer, h, valid=valid, **given)) <= 1e-12


def test_pieces_and_single_tokens_that_hand_on_the_state_are_the_whole() -> None:
    sublayer, h = make(), torch.randn(2, 90, 6, dtype=torch.float64)
    want, end = sublayer.scan(h)
    state, pieces, start = None, [], 0
    for length in (37, 33, *[1] * 20):
        y, state = sublayer.scan(h[:, start : start + length], state)
        pieces.append(y)
        start += length
    assert gap(torch.cat(pieces, 1), want) <= 1e-12
    for a, b in zip(state, end, strict=True):
        assert gap(a, b) <= 1e-12
        assert a.shape[1] != 90  # the state has no axis of tokens


def test_the_state_after_padding_is_that_of_the_valid_tokens() -> None:
    """Two pieces, padded on opposite sides, against each row without padding."""
    sublayer, h = make(), torch.randn(2, 2, 30, 6, dtype=torch.float64)
    valid = torch.ones(2, 2, 30, dtype=torch.bool)
    valid[0, 0, 25:] = valid[0, 1, :] = valid[1, 0, :2] = valid[1, 1, 10:14] = False
    state = None
    for piece, mask in zip(h, valid, strict=True):
        _, state = sublayer.scan(piece, state, order=ops.ValidFirst.of(mask))
    assert isinstance(state, KDAState)
    for row in range(2):
        joined = torch.cat([piece[row, mask[row]] for piece, mask in zip(h, valid, strict=True)])
        for a, b in zip(state, sublayer.scan(joined[None])[1], strict=True):
            assert gap(a[row : row + 1], b) <= 1e-12


def test_a_sublayer_of_the_published_model_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        sublayer = KDA(2304, KDAConfig(heads=32, head_dim=128), norm_eps=1e-5)
    assert sum(p.numel() for p in sublayer.parameters()) - sublayer.norm.weight.numel() == 39_514_272


def test_the_start_of_decays_and_convolutions() -> None:
    torch.manual_seed(1)
    sublayer = KDA(64, KDAConfig(heads=64, head_dim=16), norm_eps=1e-5)
    steps, rates = torch.nn.functional.softplus(sublayer.dt_bias.detach().double()), sublayer.A_log.detach().exp()
    assert 0.00099 <= float(steps.min()) < 0.002 < 0.05 < float(steps.max()) <= 0.1001
    assert float((steps.log10() + 2).mean().abs()) < 0.05  # log-uniform: centred at 0.01
    assert 1 <= float(rates.min()) < 2 < 15 < float(rates.max()) <= 16
    assert 0.49 < float(sublayer.q_conv.detach().abs().max()) <= 0.5
    bounded = KDA(64, KDAConfig(heads=64, head_dim=16, bound=-5.0), norm_eps=1e-5)
    assert not bounded.A_log.any()


def test_decays_stay_float32_in_a_narrow_model_and_follow_a_wide_one() -> None:
    sublayer = KDA(6, KDAConfig(heads=2, head_dim=4), norm_eps=1e-5)
    start = sublayer.dt_bias.detach().clone()
    sublayer.bfloat16()
    assert sublayer.q_conv.dtype == torch.bfloat16
    assert sublayer.A_log.dtype == torch.float32
    assert torch.equal(sublayer.dt_bias, start)  # without a round trip through bfloat16
    y, state = sublayer.scan(torch.randn(2, 30, 6).bfloat16())
    assert (y.dtype, state.memory.dtype, state.history.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert sublayer.double().A_log.dtype == torch.float64


def test_a_narrow_sublayer_is_close_to_the_wide_one() -> None:
    sublayer, h = KDA(32, KDAConfig(heads=2, head_dim=16), norm_eps=1e-5), torch.randn(2, 100, 32)
    want, _ = sublayer.scan(h)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = sublayer.scan(h)
    narrow, _ = sublayer.bfloat16().scan(h.bfloat16())
    for y in (cast, narrow):
        assert gap(y, want) <= 0.05 * float(want.detach().abs().max())


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (40, {}),
        pytest.param(3, {}, marks=pytest.mark.full),
        pytest.param(40, {"bound": -5.0}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_compiled_sublayer_is_the_eager_one_with_its_gradients(tokens: int, options: dict[str, Any]) -> None:
    sublayer, h = make(**options), torch.randn(2, tokens, 6, dtype=torch.float64, requires_grad=True)
    leaves = [h, *sublayer.parameters()]
    compiled = torch.compile(sublayer.scan, fullgraph=True, backend="aot_eager")
    ours, theirs = (scan(h)[0] for scan in (compiled, sublayer.scan))
    assert gap(ours, theirs) <= 1e-12
    direction = torch.randn_like(theirs)
    for a, b in zip(*(torch.autograd.grad(y, leaves, direction) for y in (ours, theirs)), strict=True):
        assert gap(a, b) <= 1e-12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 0, "head_dim": 4}, "kda.heads"),
        ({"heads": 2, "head_dim": 0}, "kda.head_dim"),
        ({"heads": 2, "head_dim": 4, "conv": 0}, "kda.conv"),
        ({"heads": 2, "head_dim": 4, "bound": 5.0}, r"kda.bound=5.0; expected a number below 0"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KDAConfig(**options)
