"""Deep Delta Learning: unit keys, a write that overwrites, and the released code's forms as options."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from depthmix import ops
from depthmix.mechanisms.ddl import DeltaCoeff
from tests.cases import label

DOUBLE = torch.float64
RELEASED: dict[str, Any] = {
    "key_norm": "l2_squared",
    "key_eps": 1e-5,
    "target_input": "read",
    "target_bias": True,
    "target_bound": 4.0,
}
NORMS = ["l2", "l2_squared", "rms"]
every_norm = pytest.mark.parametrize("norm", NORMS)


def of_norm(length: float, tokens: int, dim: int, seed: int = 0, dtype: torch.dtype = DOUBLE) -> Tensor:
    """Random vectors [tokens, dim] of this norm."""
    direction = torch.randn(tokens, dim, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    return (length * direction / direction.norm(dim=-1, keepdim=True)).to(dtype)


def one_write(length: float, **options: Any) -> tuple[Tensor, DeltaCoeff, Tensor]:
    """(X before, coefficients, X after) of one write of an output of this norm, at a fresh site whose β is 1."""
    stack = dm.DepthStack("ddl", dim=64, depth=1, value_width=3, **options).to(DOUBLE)
    mixer = stack[0]
    before = torch.randn(5, 3, 64, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    c, v = mixer.value((before,), mixer.coeff((before,)), of_norm(length, 5, 64))
    (after,) = mixer.update((before,), c, v)
    assert torch.equal(c.beta, torch.ones_like(c.beta))
    return before, c, after


def answers(rows: Tensor, key: Tensor) -> Tensor:
    """⟨X[j], k⟩ as [tokens, V]."""
    return (rows * key.unsqueeze(-2)).sum(-1)


# Unit keys.


@pytest.mark.parametrize("length", [1e-3, 1.0, 1e3])
def test_a_key_is_of_unit_length_whatever_the_outputs_norm(length: float) -> None:
    _, c, _ = one_write(length)
    assert c.key is not None
    assert (c.key.square().sum(-1) - 1).abs().max() <= 1e-6


def test_keys_of_a_fresh_network_are_of_unit_length() -> None:
    torch.manual_seed(0)
    config = dm.DecoderConfig(vocab_size=64, dim=64, layers=4, heads=4, head_dim=16, hidden=128, mixer={"name": "ddl"})
    traced = dm.trace(dm.Decoder(config), torch.arange(32)[None])
    lengths = [c.key.square().sum(-1) for c in traced.coefficients if c.key is not None]
    assert len(lengths) == 8
    assert all((length - 1).abs().max() <= 1e-5 for length in lengths)


@pytest.mark.parametrize("length", [1e-3, 1.0, 1e3])
def test_a_beta_of_one_overwrites(length: float) -> None:
    """The state answers its newest key with the target: to rounding without eps, and else to what eps takes of |k|²."""
    before, c, after = one_write(length, key_eps=1e-16)
    assert c.key is not None
    assert c.target is not None
    assert (answers(after, c.key) - c.target).abs().max() <= 1e-12
    before, c, after = one_write(length)
    assert c.key is not None
    assert c.target is not None
    left = (1 - c.key.square().sum(-1, keepdim=True)) * (answers(before, c.key) - c.target)
    assert (answers(after, c.key) - c.target - left).abs().max() <= 1e-12
    assert left.abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("norm", "length_of_key"),
    [
        ("l2", lambda n, eps, dim: n / (n + eps)),
        ("l2_squared", lambda n, eps, dim: n / math.sqrt(n**2 + eps**2)),
        ("rms", lambda n, eps, dim: n / math.sqrt(n**2 + dim * eps)),
    ],
)
@pytest.mark.parametrize("size", [1e-4, 0.03, 2.0])
def test_the_length_of_a_key_is_that_of_its_formula(norm: Any, length_of_key: Any, size: float) -> None:
    y = of_norm(size, 4, 48)
    key = ops.unit_key(y, 1e-3, norm)
    assert torch.allclose(key, y / size * length_of_key(size, 1e-3, 48), rtol=1e-13, atol=0)


def test_rms_keys_with_an_eps_of_1e_5_are_those_of_version_0_1_0() -> None:
    y = of_norm(0.03, 4, 64)
    old = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() / math.sqrt(64)
    assert torch.allclose(ops.unit_key(y, 1e-5, "rms"), old, rtol=1e-14, atol=0)
    assert 0.5 < float(old.square().sum(-1).max()) < 0.9  # far from unit


# Outputs of any size.


@every_norm
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-18, 1e-10, 1e-3, 1e18, 1e30])
def test_keys_and_gradients_hold_at_any_size(norm: Any, size: float) -> None:
    """float32 against float64, fused and plain, with one ordinary token beside."""
    y = torch.cat([of_norm(size, 1, 16), of_norm(1.0, 1, 16, seed=1)])
    rows, g = of_norm(3.0, 6, 16, seed=2).view(2, 3, 16), of_norm(1.0, 6, 16, seed=3).view(2, 3, 16)
    beta, target = torch.tensor([[0.7], [1.3]], dtype=DOUBLE), of_norm(1.0, 2, 3, seed=4)

    def run(dtype: torch.dtype, backend: Any) -> tuple[Tensor, Tensor]:
        inputs = [t.float().to(dtype) for t in (rows, y, beta, target)]
        inputs[1].requires_grad_()
        with ops.using(backend):
            after = ops.normed_delta(*inputs, eps=1e-10, norm=norm)
            (grad,) = torch.autograd.grad(after, inputs[1], g.float().to(dtype))
        return after.detach().double(), grad.double()

    after, grad = run(DOUBLE, "reference")
    for dtype, backend in [(DOUBLE, "auto"), (torch.float32, "auto"), (torch.float32, "reference")]:
        near, near_grad = run(dtype, backend)
        tolerance = 1e-11 if dtype == DOUBLE else 2e-5
        assert torch.allclose(near, after, rtol=0, atol=tolerance)
        scale = grad.abs().amax(-1, keepdim=True)
        assert ((near_grad - grad).abs() <= tolerance * scale + 1e-37).all()


@every_norm
def test_an_output_of_zero_writes_nothing_and_has_the_derivative_that_it_tends_to(norm: Any) -> None:
    eps, dim = 1e-3, 16
    rows, g = of_norm(3.0, 3, dim), of_norm(1.0, 3, dim, seed=1)
    beta, target = torch.full((1,), 0.7, dtype=DOUBLE), of_norm(1.0, 1, 3, seed=2)[0]
    y = torch.zeros(dim, dtype=DOUBLE, requires_grad=True)
    after = ops.normed_delta(rows, y, beta, target, eps=eps, norm=norm)
    assert torch.equal(after, rows)
    (grad,) = torch.autograd.grad(after, y, g, create_graph=True)
    length = math.sqrt(dim * eps) if norm == "rms" else eps
    assert torch.allclose(grad, 0.7 * target @ g / length)
    assert torch.isfinite(torch.autograd.grad(grad.sum(), y)[0]).all()


@every_norm
@pytest.mark.parametrize("eps", [1e-10, 1e-2])
def test_gradients_and_second_derivatives_are_those_of_the_formula(norm: Any, eps: float) -> None:
    y = torch.cat([of_norm(0.05, 1, 5), of_norm(1.0, 1, 5, seed=1)]).requires_grad_()
    rows = of_norm(2.0, 6, 5, seed=2).view(2, 3, 5).requires_grad_()
    beta = torch.tensor([[0.7], [1.3]], dtype=DOUBLE, requires_grad=True)
    target = of_norm(1.0, 2, 3, seed=3).requires_grad_()

    def write(*inputs: Tensor) -> Tensor:
        return ops.normed_delta(*inputs, eps=eps, norm=norm)

    assert torch.autograd.gradcheck(write, (rows, y, beta, target))
    assert torch.autograd.gradgradcheck(write, (rows, y, beta, target), atol=1e-4)


# The released code's target.


@pytest.mark.parametrize(
    "options",
    [{"target_input": "read"}, {"target_bias": True}, {"target_bound": 4.0}, RELEASED],
    ids=lambda options: label("ddl", options),
)
def test_each_option_of_the_target_is_its_formula(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    stack = dm.DepthStack("ddl", dim=16, depth=1, value_width=2, **options).to(DOUBLE)
    mixer = stack[0]
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter))
    x = 3 * torch.randn(5, 16, dtype=DOUBLE)
    c = mixer.coeff(mixer.begin(x))
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    projected = (x if "target_input" in options else normed) @ mixer.value_weight.T
    if "target_bias" in options:
        projected = projected + mixer.value_bias
    target = 4 * torch.sigmoid(projected) if "target_bound" in options else projected
    assert torch.allclose(c.target, target, rtol=1e-13, atol=1e-13)
    beta = 2 * torch.sigmoid(normed @ mixer.beta_weight + mixer.beta_bias)
    assert torch.allclose(c.beta[..., 0], beta, rtol=1e-13, atol=1e-13)


def released_write(x: Tensor, y: Tensor, linears: dict[str, torch.nn.Linear]) -> Tensor:
    """The released code's update of x [..., D, V], as its own operations: an RMS norm with eps²/D, then 1/√D."""
    width = y.shape[-1]
    key = torch.nn.functional.rms_norm(y, [width], eps=1e-5**2 / width)
    read = x.mean(-1)
    normed = torch.nn.functional.rms_norm(read, [width], eps=1e-6)
    beta = 2 * torch.sigmoid(linears["beta"](normed))
    target = 4 * torch.sigmoid(linears["v"](read))
    recalled = (key.unsqueeze(-1) * x).sum(-2) / math.sqrt(width)
    return x + key.unsqueeze(-1) * (beta * (target - recalled) / math.sqrt(width)).unsqueeze(-2)


@pytest.mark.parametrize("length", [1e-5, 1e-3, 1.0])
def test_the_options_together_are_the_released_codes_write(length: float) -> None:
    torch.manual_seed(0)
    stack = dm.DepthStack("ddl", dim=16, depth=1, value_width=4, **RELEASED).to(DOUBLE)
    mixer = stack[0]
    linears = {"beta": torch.nn.Linear(16, 1), "v": torch.nn.Linear(16, 4)}
    for name, weight, bias in [
        ("beta", mixer.beta_weight, mixer.beta_bias),
        ("v", mixer.value_weight, mixer.value_bias),
    ]:
        linears[name].to(DOUBLE)
        with torch.no_grad():
            weight.copy_(linears[name].weight.view_as(weight))
            bias.copy_(linears[name].bias)
    rows, y = torch.randn(3, 4, 16, dtype=DOUBLE), of_norm(length, 3, 16)
    with torch.no_grad():
        _, carry = mixer.read((rows,))
        (after,) = mixer.write((rows,), carry, y)
        assert torch.allclose(after, released_write(rows.mT, y, linears).mT, rtol=1e-12, atol=1e-12)


# Parameters and errors.


@pytest.mark.parametrize("options", [{}, {"value_width": 3}, RELEASED, {"value_width": 3, **RELEASED}])
def test_the_counted_parameters_are_those_that_exist(options: dict[str, Any]) -> None:
    stack = dm.DepthStack("ddl", dim=16, depth=5, **options)
    facts = dm.mechanism("ddl").facts(stack.config, dim=16, depth=5)
    assert facts.parameters == sum(p.numel() for p in stack.parameters())


def test_a_targets_bias_starts_at_zero_and_takes_no_weight_decay() -> None:
    stack = dm.DepthStack("ddl", dim=16, depth=2, target_bias=True)
    assert torch.equal(stack[0].value_bias, torch.zeros(1))
    assert "value_bias" not in type(stack[0]).takes_decay
    assert stack.out.value_bias is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key_norm": "l1"}, "key_norm='l1'.*'l2', 'l2_squared', 'rms'"),
        ({"key_eps": 0.0}, "key_eps=0.0.*above 0"),
        ({"target_input": "raw"}, "target_input='raw'.*'normed', 'read'"),
        ({"target_bound": -4.0}, "target_bound=-4.0.*above 0"),
        ({"target_bias": 1}, "target_bias=1.*True or False"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dm.DepthStack("ddl", dim=16, depth=2, **options)
