"""Mixture of experts: against the formulas token by token, its balance, and what it must keep under compilers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from depthmix.models.config import DecoderConfig, MoEConfig
from depthmix.models.context import Context
from depthmix.models.counting import count_parameters
from depthmix.models.decoder import Decoder
from depthmix.models.mlp import MLP
from depthmix.models.moe import MixtureOfExperts, update_balance
from depthmix.training import TrainConfig
from depthmix.training.identity import digest_of
from tests.reference import decoder as reference_decoder

DIM, EXPERTS, ACTIVE, HIDDEN = 8, 6, 2, 5
FORMS: tuple[dict[str, Any], ...] = (
    {"scoring": "softmax", "shared": 0},
    {"scoring": "sigmoid", "shared": 1},
    {"scoring": "softmax", "shared": 2, "active": EXPERTS},
    {"scoring": "sigmoid", "shared": 0, "active": 1},
    {"scoring": "softmax", "shared": 1, "balance": "loss", "balance_rate": 0.5},
    {"scoring": "sigmoid", "shared": 1, "balance": "none"},
    {"scoring": "sigmoid", "shared": 1, "scale": 2.446},
)


def make_config(**options: Any) -> DecoderConfig:
    moe = MoEConfig(**{"experts": EXPERTS, "active": ACTIVE, "hidden": HIDDEN, **options})
    return DecoderConfig(vocab_size=20, dim=DIM, layers=2, heads=2, hidden=HIDDEN, moe=moe)


def make(dtype: torch.dtype = torch.float64, **options: Any) -> MixtureOfExperts:
    layer = MixtureOfExperts(make_config(**options))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    if layer.balance_bias is not None:
        nn.init.normal_(layer.balance_bias, std=0.2)
    return layer.to(dtype)


def context() -> Context:
    return Context((torch.empty(0), torch.empty(0)), None)


def run(layer: MixtureOfExperts, h: Tensor) -> Tensor:
    return layer(h, (), context())[0]


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    z = gate @ x
    return down @ (z / (1 + torch.exp(-z)) * (up @ x))


def one_token(layer: MixtureOfExperts, h: Tensor) -> tuple[Tensor, list[int]]:
    """h [D] by the formulas, and the experts that it goes to."""
    x = layer.norm.weight * h / torch.sqrt((h * h).mean() + layer.norm.eps)
    logits = layer.router.weight @ x
    if layer.config.scoring == "softmax":
        scores = logits.exp() / logits.exp().sum()
    else:
        scores = 1 / (1 + torch.exp(-logits))
    bias = [0.0] * EXPERTS if layer.balance_bias is None else layer.balance_bias.tolist()
    ranking = sorted(range(EXPERTS), key=lambda e: scores[e].item() + bias[e], reverse=True)
    chosen = ranking[: layer.config.active]
    total = sum(scores[e] for e in chosen)
    y = torch.zeros_like(h)
    for e in chosen:
        weight = layer.config.scale * scores[e] / total
        y = y + weight * swiglu(x, layer.gate_proj[e], layer.up_proj[e], layer.down_proj[e])
    if layer.shared is not None:
        shared = layer.shared
        y = y + swiglu(x, shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
    return y, chosen


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_token_goes_through_its_experts_as_the_formulas_say(form: dict[str, Any]) -> None:
    layer = make(**form)
    h = torch.randn(2, 7, DIM, dtype=torch.float64, requires_grad=True)
    expected = torch.stack([one_token(layer, token)[0] for token in h.flatten(0, 1)]).view(h.shape)
    out = run(layer, h)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    inputs = [h, *layer.parameters()]
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, torch.zeros_like(a) if b is None else b, rtol=0, atol=1e-11)


def test_the_router_learns_from_the_output() -> None:
    layer = make()
    run(layer, torch.randn(3, 4, DIM, dtype=torch.float64)).square().sum().backward()
    assert layer.router.weight.grad is not None
    assert layer.router.weight.grad.abs().max() > 1e-3


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_first_layers_are_dense_and_the_others_scale_their_experts(scoring: str) -> None:
    moe = {"experts": EXPERTS, "active": ACTIVE, "hidden": HIDDEN, "scoring": scoring, "scale": 2.5, "dense_layers": 1}
    config = DecoderConfig(vocab_size=20, dim=DIM, layers=3, heads=2, hidden=11, moe=moe)  # type: ignore[arg-type]
    model = Decoder(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            nn.init.normal_(layer.balance_bias, std=0.2)
    assert [type(model.sublayers[i]) for i in (1, 3, 5)] == [MLP, MixtureOfExperts, MixtureOfExperts]
    tokens = torch.randint(20, (2, 5))
    given = {"order": range(3), "theta": 1e4, "moe": {"active": ACTIVE, "scale": 2.5, "scoring": scoring}}
    expected = reference_decoder.logits(tokens, {**model.state_dict()}, **given)
    assert torch.allclose(model(tokens), expected, rtol=0, atol=1e-11)
    given["moe"] = {**given["moe"], "scale": 1.0}
    assert (model(tokens) - reference_decoder.logits(tokens, {**model.state_dict()}, **given)).abs().max() > 1e-3
    counts = count_parameters(config)
    assert counts.total - counts.active == 2 * (EXPERTS - ACTIVE) * 3 * DIM * HIDDEN, "layer 0 has no idle expert"


def test_the_shared_experts_are_not_scaled() -> None:
    layer, h = make(scale=3.0), torch.randn(2, 3, DIM, dtype=torch.float64)
    shared = layer.shared(layer.norm(h))
    plain = MixtureOfExperts(make_config()).double()
    plain.load_state_dict(layer.state_dict())
    assert torch.allclose(run(layer, h) - shared, 3 * (run(plain, h) - shared), rtol=0, atol=1e-12)


def test_the_fields_added_after_the_first_version_leave_the_digest_of_a_run_as_it_was() -> None:
    moe = {"experts": 4, "active": 2, "hidden": 8}
    plain, scaled, dense = (
        TrainConfig.from_dial(4, moe={**moe, **more}) for more in ({}, {"scale": 2.0}, {"dense_layers": 1})
    )
    fields = {**plain.to_dict(), "model": plain.model.fingerprint()}
    for name in ("scale", "dense_layers"):
        del fields["model"]["moe"][name]
    assert plain.digest == digest_of(fields)
    assert len({plain.digest, scaled.digest, dense.digest}) == 3


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_token_does_not_depend_on_the_others_of_its_batch(form: dict[str, Any]) -> None:
    layer = make(**form).eval()
    h = torch.randn(2, 9, DIM, dtype=torch.float64)
    whole = run(layer, h)
    assert torch.allclose(torch.cat([run(layer, h[:, t : t + 1]) for t in range(9)], 1), whole, rtol=0, atol=1e-12)
    assert torch.allclose(torch.cat([run(layer, h[:, :4]), run(layer, h[:, 4:])], 1), whole, rtol=0, atol=1e-12)
    assert torch.equal(run(layer, h), whole)


@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_no_token_at_all_is_fine(balance: str) -> None:
    layer = make(balance=balance)
    h = torch.randn(0, 4, DIM, dtype=torch.float64, requires_grad=True)
    out = run(layer, h)
    assert out.shape == (0, 4, DIM)
    out.sum().backward()
    assert torch.equal(layer.gate_proj.grad, torch.zeros_like(layer.gate_proj))


def test_vanished_scores_give_no_weight_and_no_nan() -> None:
    layer = make(torch.float32, scoring="sigmoid", shared=0)
    chosen, weights = layer.choose(torch.zeros(3, EXPERTS))
    assert chosen.shape == (3, ACTIVE)
    assert torch.equal(weights, torch.zeros(3, ACTIVE))


class Seen(TorchDispatchMode):
    """Which operators of depthmix ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "depthmix":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_the_experts_run_as_three_grouped_products() -> None:
    layer, h = make(), torch.randn(2, 3, DIM, dtype=torch.float64)
    with Seen() as seen:
        out = run(layer, h)
        assert seen.names == ["count_load", *["grouped_linear"] * 3]
        seen.names.clear()
        out.sum().backward()
    assert sorted(seen.names) == [*["grouped_linear"] * 3, *["grouped_outer"] * 3]


# Balance.


def test_the_bias_moves_the_choice_and_not_the_weights() -> None:
    layer = make(scoring="sigmoid")
    scores = torch.rand(50, EXPERTS, dtype=torch.float64)
    layer.balance_bias.zero_()
    plain, _ = layer.choose(scores)
    assert (plain == 3).any(-1).float().mean() < 0.9
    layer.balance_bias[3] = 10.0
    chosen, weights = layer.choose(scores)
    assert (chosen == 3).any(-1).all()
    own = scores.gather(-1, chosen)
    assert torch.allclose(weights, own / own.sum(-1, keepdim=True), rtol=0, atol=1e-15)


def test_training_counts_who_was_chosen_and_nothing_else_does() -> None:
    layer, h = make(), torch.randn(2, 5, DIM, dtype=torch.float64)
    expected = torch.zeros(EXPERTS, dtype=torch.int64)
    for token in h.flatten(0, 1):
        expected[one_token(layer, token)[1]] += 1
    run(layer, h)
    assert torch.equal(layer.load, expected)
    run(layer, h)
    assert torch.equal(layer.load, 2 * expected)
    layer.eval()
    run(layer, h)
    layer.train()
    with torch.no_grad():
        run(layer, h)
    assert torch.equal(layer.load, 2 * expected)


def test_a_step_of_the_balance_goes_towards_the_mean() -> None:
    layer = make(balance_rate=0.25)
    layer.balance_bias.zero_()
    layer.load.copy_(torch.tensor([0, 4, 2, 3, 1, 2]))
    layer.update_balance()
    assert layer.balance_bias.tolist() == [0.25, -0.25, 0.0, -0.25, 0.25, 0.0]
    assert not layer.load.any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_repeated_steps_make_a_skewed_router_even(scoring: str) -> None:
    layer = make(scoring=scoring, balance_rate=2e-3)
    nn.init.zeros_(layer.balance_bias)
    h = torch.randn(4, 100, DIM, dtype=torch.float64) + 1.0  # a mean that favours some experts
    mean = h.shape[0] * h.shape[1] * ACTIVE / EXPERTS
    worst = []
    for _ in range(400):
        layer.load.zero_()
        run(layer, h)
        worst.append((layer.load / mean - 1).abs().max().item())
        update_balance(layer)
    assert worst[0] > 0.8
    assert max(worst[-10:]) < 0.15


def test_balance_of_a_decoder_reaches_all_its_layers() -> None:
    model = Decoder(make_config())
    model.loss(torch.randint(0, 20, (2, 8))).backward()
    layers = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
    assert len(layers) == 2
    assert all(layer.load.sum() == 2 * 8 * ACTIVE for layer in layers)
    update_balance(model)
    assert all(layer.balance_bias.abs().max() == torch.tensor(1e-3) for layer in layers)
    assert not any(layer.load.any() for layer in layers)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_loss_is_the_share_of_the_choices_times_the_mean_score(scoring: str) -> None:
    layer = make(scoring=scoring, balance="loss", balance_rate=0.3)
    h = torch.randn(2, 6, DIM, dtype=torch.float64, requires_grad=True)
    loss = layer(h, (), context())[2]
    share = torch.zeros(EXPERTS, dtype=torch.float64)
    mean: Any = 0
    for token in h.flatten(0, 1):
        share[one_token(layer, token)[1]] += 1 / (12 * ACTIVE)
        x = layer.norm.weight * token / torch.sqrt((token * token).mean() + layer.norm.eps)
        logits = layer.router.weight @ x
        scores = logits.exp() if scoring == "softmax" else 1 / (1 + torch.exp(-logits))
        mean = mean + scores / scores.sum() / 12
    expected = 0.3 * EXPERTS * (share * mean).sum()
    assert torch.allclose(loss, expected, rtol=0, atol=1e-13)
    inputs = (h, layer.router.weight)
    for a, b in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-13)
        assert a.abs().max() > 1e-5


def test_the_loss_is_its_rate_where_all_experts_are_alike() -> None:
    layer = make(balance="loss", balance_rate=0.3)
    nn.init.zeros_(layer.router.weight)
    loss = layer(torch.randn(2, 6, DIM, dtype=torch.float64), (), context())[2]
    assert loss.item() == pytest.approx(0.3, abs=1e-14)


def test_the_loss_is_there_in_training_alone_and_the_decoder_adds_it() -> None:
    model = Decoder(make_config(balance="loss", balance_rate=0.3)).double()
    tokens = torch.randint(0, 20, (2, 8))
    both = model.loss(tokens)
    state, kv = model.begin(tokens)
    losses = model.execute(0, model.config.depth, state, kv, model.context(tokens, torch.float64))[2]
    assert len(losses) == 2
    alone = model.eval().loss(tokens)
    assert torch.allclose(both, alone + sum(losses), rtol=0, atol=1e-14)
    assert sum(losses) > 0.5
    with torch.no_grad():
        assert torch.allclose(model.train().loss(tokens), alone, rtol=0, atol=1e-14)


# Precision, checkpoints, compilers.


def test_autocast_leaves_the_router_in_float32_and_the_experts_in_its_own_dtype() -> None:
    layer = make(torch.float32)
    x = torch.randn(40, DIM)
    outputs: list[torch.dtype] = []

    class Dtypes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.depthmix.grouped_linear.default:
                outputs.append(out.dtype)
            return out

    with torch.autocast("cpu", dtype=torch.bfloat16), Dtypes():
        scores = layer.scores(x)
        out = run(layer, x)
    assert torch.equal(scores, layer.scores(x))
    assert scores.dtype == torch.float32
    assert outputs == [torch.bfloat16] * 3
    assert out.dtype == torch.float32
    assert torch.allclose(out, run(layer, x), atol=0.1)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_a_bfloat16_model_routes_in_float32_and_keeps_its_bias_there() -> None:
    layer = make(torch.float32)
    bias = layer.balance_bias.clone()
    layer.to(torch.bfloat16)
    assert layer.gate_proj.dtype == torch.bfloat16
    assert layer.balance_bias.dtype == torch.float32
    assert torch.equal(layer.balance_bias, bias)
    h = torch.randn(2, 3, DIM, dtype=torch.bfloat16)
    assert layer.scores(h.flatten(0, 1)).dtype == torch.float32
    assert run(layer, h).dtype == torch.bfloat16


def test_the_bias_is_saved_and_the_load_is_not() -> None:
    layer, other = make(), make()
    assert "load" not in layer.state_dict()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.balance_bias, layer.balance_bias)
    assert "balance_bias" not in make(balance="loss").state_dict()


def test_a_layer_made_without_storage_starts_balanced() -> None:
    with torch.device("meta"):
        layer = MixtureOfExperts(make_config())
    layer.to_empty(device="cpu")
    assert layer.balance_bias.tolist() == [0.0] * EXPERTS
    assert layer.load.tolist() == [0] * EXPERTS


@pytest.mark.parametrize("balance", ["bias", "loss"])
@pytest.mark.parametrize("every", [1, 3])
def test_checkpointing_changes_neither_gradients_nor_counts(balance: str, every: int) -> None:
    model = Decoder(make_config(balance=balance, balance_rate=0.3)).double()
    tokens = torch.randint(0, 20, (2, 8))
    found = []
    for model.checkpoint_every in (None, every):
        loss = model.loss(tokens)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        loads = [m.load.clone() for m in model.modules() if isinstance(m, MixtureOfExperts) and m.load is not None]
        found.append([loss, *grads, *loads])
        update_balance(model)
        for module in model.modules():
            if isinstance(module, MixtureOfExperts) and module.balance_bias is not None:
                module.balance_bias.zero_()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_compiled_in_one_graph_it_is_the_same_whatever_the_counts(balance: str, backend: str) -> None:
    torch._dynamo.reset()
    layer = make(balance=balance)

    def total(h: Tensor) -> Tensor:
        y, _, aux = layer(h, (), context())
        return y.square().sum() + (0 if aux is None else aux)

    compiled = torch.compile(total, fullgraph=True, backend=backend)
    for stance in ("default", "fail_on_recompile", "fail_on_recompile"):  # other tokens, other counts, the same graph
        h = torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True)
        found = []
        for f in (total, compiled):
            if layer.load is not None:
                layer.load.zero_()
            with torch.compiler.set_stance(stance):
                loss = f(h)
            loads = [] if layer.load is None else [layer.load.clone()]
            found.append([loss, *torch.autograd.grad(loss, [h, *layer.parameters()]), *loads])
        for a, b in zip(*found, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-11)


def test_a_compiled_checkpoint_counts_once() -> None:
    torch._dynamo.reset()
    layer, h = make(), torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True)
    plain = torch.autograd.grad(run(layer, h).square().sum(), list(layer.parameters()))
    counted = layer.load.clone()

    def total(h: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(run, layer, h, use_reentrant=False).square().sum()

    found = torch.autograd.grad(torch.compile(total, fullgraph=True, backend="aot_eager")(h), list(layer.parameters()))
    assert torch.equal(layer.load, 2 * counted)
    for a, b in zip(plain, found, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"active": 7}, "moe.active=7; expected 1 to 6"),
        ({"experts": 1, "active": 1}, "moe.experts=1"),
        ({"shared": -1}, "moe.shared=-1"),
        ({"hidden": 0}, "moe.hidden=0"),
        ({"scoring": "tanh"}, "scoring='tanh'"),
        ({"balance": "prayer"}, "balance='prayer'"),
        ({"balance_rate": -1.0}, "moe.balance_rate=-1.0"),
        ({"scale": 0.0}, r"moe.scale=0.0; expected a number above 0"),
        ({"scale": -2.0}, r"moe.scale=-2.0"),
        ({"dense_layers": -1}, "moe.dense_layers=-1; expected"),
        ({"dense_layers": 2}, "moe.dense_layers=2; expected 0 to 1. The decoder has 2 layers"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_config(**options)


def test_a_layer_needs_experts() -> None:
    with pytest.raises(ValueError, match="moe=None"):
        MixtureOfExperts(dataclasses.replace(make_config(), moe=None))
