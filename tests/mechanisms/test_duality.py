"""Time and depth: every depth mixer is a sequence mixer with the layers as its sequence. `docs/duality.md` is the page.

Each claim puts a running stack beside the formula of the sequence mixer, written here in plain torch (or torch's own
`scaled_dot_product_attention`, `GRU`, `autograd`). Double precision throughout; parameters are off their start.

Axes: ... token, n = L+1 rows and sources, D channel, R row of a memory, M stream or value column, H head.
Row r (from 0) reads the sources v_0 … v_r; the last row is the head's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import elu, logsigmoid, scaled_dot_product_attention, softplus

import depthmix as dm
from depthmix.analysis.invariants import Probe, make_probe
from depthmix.analysis.structure import block_spectra
from depthmix.mechanisms.base import rank_cap
from depthmix.mechanisms.ddl import readout_matrix
from depthmix.mechanisms.linear_attention import LinearCoeff, Written
from tests.reference import ddl as transcribed_ddl

PAGE = Path(__file__).parents[2] / "docs" / "duality.md"
TOLERANCE = 1e-12

NETWORKS = {
    "dim": st.integers(1, 9),
    "depth": st.integers(1, 8),
    "tokens": st.sampled_from([(), (3,), (2, 2)]),
    "seed": st.integers(0, 2**16),
}


def drawn(sizes: dict[str, st.SearchStrategy[Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a claim on several networks; the draws are a function of the test alone, so that a failure comes again."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        repeat = settings(max_examples=6, deadline=None, derandomize=True, database=None)
        return repeat(given(size=st.fixed_dictionaries(sizes))(test))

    return decorate


on_networks = drawn(NETWORKS)
on_even_networks = drawn(NETWORKS | {"dim": st.integers(1, 4).map(lambda half: 2 * half)})  # so that heads fit


def same(got: Tensor, want: Tensor) -> None:
    """Equal to 1e-12, relative to the largest entry where that exceeds 1."""
    got, want = got.detach(), want.detach()
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE * max(1.0, float(want.abs().max())))


def network(name: str, size: dict[str, Any], **options: Any) -> tuple[Probe, dm.Trace]:
    probe = make_probe(name, options, **size)
    return probe, dm.trace(probe.stack, probe.x, probe.sublayers)


def beside(probe: Probe, name: str, **options: Any) -> dm.DepthStack:
    """Another stack for the same sublayers."""
    return dm.DepthStack(name, dim=probe.stack.dim, depth=probe.stack.depth, **options).double()


def states(probe: Probe) -> list[tuple[Tensor, ...]]:
    """What the stack holds before each site while it runs."""
    with torch.no_grad():
        return probe.states()


def fill(stack: dm.DepthStack, **values: Tensor | float) -> None:
    """Set parameters at every site that owns them, those of the embedding too."""
    with torch.no_grad():
        for mixer in stack.all_mixers():
            for name, parameter in mixer.named_parameters():
                if (value := values.get(name.removeprefix("embedding_"))) is not None:
                    parameter.copy_(torch.as_tensor(value, dtype=torch.float64))


def norm(v: Tensor, eps: float = 1e-6) -> Tensor:
    return v / (v.square().mean(-1, keepdim=True) + eps).sqrt()


def phi(u: Tensor) -> Tensor:
    return elu(u) + 1


def along(tensors: Sequence[Tensor]) -> Tensor:
    """Depth as the sequence axis: a list or a tensor [n, ..., D] -> [..., n, D]."""
    return torch.stack(list(tensors), -2)


def grouped(traced: dm.Trace) -> Tensor:
    """M [..., G, n, n], with the axis of heads or channels also where there is only one."""
    return traced.M.unsqueeze(-3) if traced.kind == "scalar" else traced.M


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.float64).tril()


# The residual and linear attention.


@on_networks
def test_the_residual_is_linear_attention_over_depth_with_unit_keys_and_queries(size):
    probe, residual = network("residual", size)
    stack = beside(probe, "linear_attention", rank=1)
    fill(stack, key_proj=0.0, key_bias=1.0, query=1.0)
    attention = dm.trace(stack, probe.x, probe.sublayers)
    same(attention.inputs, residual.inputs)
    same(attention.M, residual.M)
    memory = states(Probe(stack, probe.x, probe.sublayers))
    for (held,), (stream,) in zip(memory[1:], states(probe)[1:], strict=True):
        same(held.squeeze(-2), stream)


@on_networks
def test_the_residual_is_attention_with_a_matrix_of_ones(size):
    _, residual = network("residual", size)
    n = size["depth"] + 1
    key = query = torch.ones(n, 1, dtype=torch.float64)
    ones = (query @ key.mT).tril()
    same(along(residual.inputs), ones @ along(residual.sources))
    same(residual.M, ones.expand_as(residual.M))


@pytest.mark.parametrize("rank", [2, 5])
@on_networks
def test_linear_attention_of_any_rank_is_the_residual_where_queries_and_keys_have_product_one(rank, size):
    probe, residual = network("residual", size)
    stack = beside(probe, "linear_attention", rank=rank)
    key = torch.randn(rank, generator=torch.Generator().manual_seed(size["seed"]), dtype=torch.float64)
    fill(stack, key_proj=0.0, key_bias=key, query=key / key.square().sum())
    same(dm.trace(stack, probe.x, probe.sublayers).inputs, residual.inputs)


# Test-time training: a write is a step of gradient descent.


def writes(traced: dm.Trace) -> list[Written]:
    """How each source v_0 … v_L entered the memory of linear attention."""
    sites = traced.coefficients[:-1]
    return [sites[0].embedding, *(c.written for c in sites)]


def delta_writes(stack: dm.DepthStack, traced: dm.Trace) -> list[tuple[Tensor, Tensor]]:
    """k [..., R] and β [..., 1] of every write, from the parameters: what erases and what writes must be one key."""
    sites = [(stack[0], "embedding_"), *((mixer, "") for mixer in stack)]
    feature = phi if stack.config.feature_map == "elu1" else lambda u: u
    found = []
    for (mixer, prefix), v, written in zip(sites, traced.sources, writes(traced), strict=True):
        own = {name.removeprefix(prefix): p for name, p in mixer.state_dict().items() if name.startswith(prefix)}
        u = norm(v)
        key = feature(u @ own["key_proj"].T + own["key_bias"])
        key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        beta = 2 * torch.sigmoid(u @ own["beta_weight"][:, None] + own["beta_bias"])
        same(written.gain, beta * key)
        found.append((key, beta))
    return found


def gates(stack: dm.DepthStack, traced: dm.Trace) -> list[Tensor]:
    """g [..., 1] of every write of the gated delta rule, from the parameters; 1 for the embedding."""
    logits = [norm(v) @ m.gate_weight[:, None] + m.gate_bias for m, v in zip(stack, traced.sources[1:], strict=True)]
    return [torch.ones_like(logits[0]), *(torch.sigmoid(z) for z in logits)]


def recall(memory: Tensor, key: Tensor) -> Tensor:
    """Sᵀk of S [..., R, D]."""
    return (memory * key.unsqueeze(-1)).sum(-2)


def linear_loss(memory: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return -(recall(memory, key) * value).sum()


def squared_loss(memory: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (recall(memory, key) - value).square().sum() / 2


def trained(memory: Tensor, loss: Callable[[Tensor], Tensor], step: Tensor | float = 1.0) -> Tensor:
    """One step of gradient descent."""
    memory = memory.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(memory), memory)
    return memory.detach() - step * gradient


@pytest.mark.parametrize("options", [{"rank": 1}, {"rank": 3}, {"rank": 2, "feature_map": "elu1", "normalize": True}])
@on_networks
def test_plain_linear_attention_is_a_gradient_step_on_the_linear_loss(options, size):
    probe, traced = network("linear_attention", size, **options)
    held = states(probe)
    memory = traced.sources.new_zeros(*size["tokens"], options["rank"], size["dim"])
    total = memory[..., :1]  # z of the normalised form: a memory of the value 1
    for i, (written, v) in enumerate(zip(writes(traced), traced.sources, strict=True)):
        memory = trained(memory, lambda S, k=written.gain, v=v: linear_loss(S, k, v))
        total = trained(total, lambda z, k=written.gain: linear_loss(z, k, torch.ones(1)))
        if i:  # before sublayer 1 the stack holds the embedding itself
            same(held[i][0], memory)
            if options.get("normalize"):
                same(held[i][1], total.squeeze(-1))


@pytest.mark.parametrize("options", [{"rank": 1}, {"rank": 3}, {"rank": 2, "feature_map": "elu1"}])
@on_networks
def test_gated_linear_attention_is_a_gradient_step_on_the_linear_loss_with_decay(options, size):
    probe, traced = network("linear_attention", size, rule="gated", **options)
    held = states(probe)
    embedding, *later = writes(traced)
    memory = embedding.gain.unsqueeze(-1) * probe.x.unsqueeze(-2)
    for (state, *_), written, v in zip(held[1:], later, traced.sources[1:], strict=True):
        forgotten = 1 - written.transition.unsqueeze(-1)

        def loss(S: Tensor, k: Tensor = written.gain, v: Tensor = v, forgotten: Tensor = forgotten) -> Tensor:
            return linear_loss(S, k, v) + (forgotten * S.square()).sum() / 2

        memory = trained(memory, loss)
        same(state, memory)


@pytest.mark.parametrize("options", [{"rank": 1}, {"rank": 3}, {"rank": 2, "feature_map": "elu1"}])
@on_networks
def test_the_delta_rule_is_a_gradient_step_on_the_squared_loss(options, size):
    probe, traced = network("linear_attention", size, rule="delta", **options)
    held = states(probe)
    memory = traced.sources.new_zeros(*size["tokens"], options["rank"], size["dim"])
    for i, ((key, beta), v) in enumerate(zip(delta_writes(probe.stack, traced), traced.sources, strict=True)):
        memory = trained(memory, lambda S, k=key, v=v: squared_loss(S, k, v), beta.unsqueeze(-1))
        if i:
            same(held[i][0], memory)


@pytest.mark.parametrize("options", [{"rank": 1}, {"rank": 3}, {"rank": 2, "feature_map": "elu1"}])
@on_networks
def test_the_gated_delta_rule_is_a_gradient_step_on_the_squared_loss_after_a_decay(options, size):
    probe, traced = network("linear_attention", size, rule="gated_delta", **options)
    held = states(probe)
    memory = traced.sources.new_zeros(*size["tokens"], options["rank"], size["dim"])
    steps = zip(delta_writes(probe.stack, traced), gates(probe.stack, traced), traced.sources, strict=True)
    for i, ((key, beta), gate, v) in enumerate(steps):
        left = gate.unsqueeze(-1) * memory
        memory = trained(left, lambda S, k=key, v=v: squared_loss(S, k, v), beta.unsqueeze(-1))
        if i:
            same(held[i][0], memory)


@pytest.mark.parametrize("value_width", [1, 3])
@on_networks
def test_ddl_is_a_gradient_step_on_the_squared_loss_with_the_channels_as_memory(value_width, size):
    probe, traced = network("ddl", size, value_width=value_width)
    held = states(probe)
    for (before,), (after,), c in zip(held, held[1:], traced.coefficients, strict=False):
        step = c.beta.unsqueeze(-1)
        memory = trained(before.mT, lambda S, c=c: squared_loss(S, c.key, c.target), step)
        same(after, memory.mT)


# Linear attention and its relatives: one formula over time and over depth.


def decay_matrix(decay: Tensor) -> Tensor:
    """∏_{j=i+1}^{r} decay_j in row r and column i, from decays [..., n, 1]: cumulative products, 1-semiseparable."""
    total = decay.log().cumsum(-2)
    return (total - total.mT).tril().exp().tril()


def parallel_form(stack: dm.DepthStack, traced: dm.Trace) -> Tensor:
    """The masked matrix of linear attention, with a gate, by the delta rule or both; row 0 is left to the caller."""
    config = stack.config
    feature = phi if config.feature_map == "elu1" else lambda u: u
    reads = [feature(m.query.detach()) for m in stack.all_mixers()[1:]]
    query = torch.stack([torch.zeros_like(reads[0]), *reads])  # [n, R]
    embedding, *later = writes(traced)
    if config.erases:
        K, beta = (along(found) for found in zip(*delta_writes(stack, traced), strict=True))
        unit = torch.eye(K.shape[-2], dtype=K.dtype)
        solve = torch.linalg.inv(unit + beta * (K @ K.mT).tril(-1))
        weights = (query @ K.mT).tril() @ solve * beta.mT
        return weights * decay_matrix(along(gates(stack, traced))) if config.rule == "gated_delta" else weights
    K = along([embedding.gain, *(w.gain for w in later)])
    if config.rule == "gated":
        decay = [w.transition for w in later]
        total = along([torch.ones_like(decay[0]), *decay]).cumprod(-2)
        query, K = query * total, K / total
    weights = (query @ K.mT).tril()
    return weights / weights.sum(-1, keepdim=True) if config.normalize else weights


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "plain"},
        {"rule": "plain", "feature_map": "elu1", "normalize": True},
        {"rule": "gated"},
        {"rule": "gated", "feature_map": "elu1", "normalize": True},
        {"rule": "delta"},
        {"rule": "delta", "rank": 1, "feature_map": "elu1"},
        {"rule": "gated_delta"},
        {"rule": "gated_delta", "rank": 1, "feature_map": "elu1"},
    ],
)
@on_networks
def test_linear_attention_over_depth_has_the_parallel_form_it_has_over_time(options, size):
    probe, traced = network("linear_attention", size, **{"rank": 3, **options})
    want = parallel_form(probe.stack, traced)[..., 1:, :]
    same(traced.M[..., 1:, :], want)
    same(along(traced.inputs[1:]), want @ along(traced.sources))


@pytest.mark.parametrize("decay", [0.5, 0.9])
@on_networks
def test_gated_linear_attention_with_one_constant_decay_is_retention_over_depth(decay, size):
    probe = make_probe("linear_attention", {"rule": "gated", "rank": 3}, **size)
    fill(probe.stack, gate_proj=0.0, gate_bias=math.log(decay / (1 - decay)))
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    n = size["depth"] + 1
    age = torch.arange(n).unsqueeze(-1) - torch.arange(n)
    mask = torch.where(age >= 0, decay ** age.double(), 0.0)
    query = torch.stack([m.query.detach() for m in probe.stack.all_mixers()[1:]])
    keys = along([w.gain for w in writes(traced)])
    same(traced.M[..., 1:, :], query @ keys.mT * mask[1:])


@pytest.mark.parametrize("feature_map", ["identity", "elu1"])
@on_networks
def test_the_gated_delta_rule_over_depth_is_gated_deltanet_over_time(feature_map, size):
    """The paper's recurrence S_t = S_{t−1} g_t (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ, o_t = S_t q_t, token by token."""
    probe, traced = network("linear_attention", size, rule="gated_delta", rank=3, feature_map=feature_map)
    feature = phi if feature_map == "elu1" else lambda u: u
    queries = [feature(m.query.detach()) for m in probe.stack.all_mixers()[1:]]
    unit = torch.eye(3, dtype=torch.float64)
    S = torch.zeros(*size["tokens"], size["dim"], 3, dtype=torch.float64)  # values × keys, as there
    steps = zip(delta_writes(probe.stack, traced), gates(probe.stack, traced), traced.sources, strict=True)
    for t, ((k, beta), g, v) in enumerate(steps):
        beta, g = beta.unsqueeze(-1), g.unsqueeze(-1)
        S = S @ (g * (unit - beta * k[..., :, None] * k[..., None, :])) + beta * v[..., :, None] * k[..., None, :]
        if t:  # row 1 reads the embedding itself
            same(traced.inputs[t], S @ queries[t - 1])


@on_networks
def test_the_gated_delta_rule_with_open_gates_is_the_delta_rule(size):
    probe = make_probe("linear_attention", {"rule": "gated_delta", "rank": 3}, **size)
    fill(probe.stack, gate_weight=0.0, gate_bias=50.0)  # 1 − σ(50) is below the rounding of 1
    delta = beside(probe, "linear_attention", rule="delta", rank=3)
    parameters = {name: p for name, p in probe.stack.named_parameters() if "gate" not in name}
    delta.load_converted(parameters)
    same(dm.trace(delta, probe.x, probe.sublayers).inputs, dm.trace(probe.stack, probe.x, probe.sublayers).inputs)


# A decay of one number: RetNet's is constant, Mamba's is computed.


def decayed_over_time(decay: Tensor, keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
    """o_t = q_tᵀ S_t of S_t = a_t S_{t−1} + k_t v_tᵀ, from a [..., n, 1], k and q [..., n, R] and v [..., n, D]."""
    S = values.new_zeros(*values.shape[:-2], keys.shape[-1], values.shape[-1])
    out = []
    for t in range(values.shape[-2]):
        S = decay[..., t, :, None] * S + keys[..., t, :, None] * values[..., t, None, :]
        out.append(recall(S, queries[..., t, :]))
    return along(out)


@on_networks
def test_gated_linear_attention_with_one_gate_for_all_rows_is_mamba_2_over_depth(size):
    """S_t = a_t S_{t−1} + k_t v_tᵀ with a_t from the input; M = (Q Kᵀ) ∘ L with L of cumulative products of a."""
    probe = make_probe("linear_attention", {"rule": "gated", "rank": 3}, **size)
    with torch.no_grad():
        for mixer in probe.stack:
            mixer.gate_proj.copy_(mixer.gate_proj[:1].expand_as(mixer.gate_proj))
            mixer.gate_bias.copy_(mixer.gate_bias[:1].expand_as(mixer.gate_bias))
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    embedding, *later = writes(traced)
    keys = along([w.gain for w in (embedding, *later)])
    decay = along([torch.ones_like(embedding.gain[..., :1]), *(w.transition[..., :1] for w in later)])
    reads = [m.query.detach() for m in probe.stack.all_mixers()[1:]]
    queries = torch.stack([torch.zeros_like(reads[0]), *reads])
    got = decayed_over_time(decay, keys, queries.expand_as(keys), along(traced.sources))
    same(along(traced.inputs)[..., 1:, :], got[..., 1:, :])
    L = decay_matrix(decay)
    assert (dm.semiseparable_rank(L, 1e-9) == 1).all()
    same(traced.M[..., 1:, :], ((queries @ keys.mT) * L)[..., 1:, :])


@pytest.mark.parametrize("gate", ["scalar", "channel"])
@on_networks
def test_highway_is_mambas_selective_state_space_with_a_state_of_one_number(gate, size):
    """Mamba's theorem 1: A = −1, B = C = 1, Δ = softplus(logit), zero-order hold; over time, channel by channel."""
    _, traced = network("highway", size, gate=gate)
    A, B = -1.0, 1.0
    logits = highway_logits(traced).expand_as(traced.sources[1:])
    step = softplus(logits)  # Δ_t
    carried, entering = (step * A).exp(), torch.expm1(step * A) / A * B
    state = traced.sources[0]
    for t, value in enumerate(traced.sources[1:]):
        state = carried[t] * state + entering[t] * value
        same(traced.inputs[t + 1], state)


@on_networks
def test_highway_has_the_cumulative_products_of_a_scalar_decay(size):
    """M = (C Bᵀ) ∘ L, as in Mamba-2, with C = 1, B = g and a = 1 − g; a constant gate is RetNet's decay."""
    probe, traced = network("highway", size)
    gate = torch.sigmoid(along(highway_logits(traced)))  # [..., L, 1]
    one = torch.ones_like(gate[..., :1, :])
    a, B = torch.cat([one, 1 - gate], -2), torch.cat([one, gate], -2)
    same(traced.M, decay_matrix(a) * B.mT)
    same(along(traced.inputs), decayed_over_time(a, B, torch.ones_like(B), along(traced.sources)))
    fill(probe.stack, weight=0.0, bias=math.log(0.25))  # g = 1/5 everywhere
    retained = dm.trace(probe.stack, probe.x, probe.sublayers)
    keys = torch.full((size["depth"] + 1, 1), 0.2, dtype=torch.float64)
    keys[0], decay = 1, torch.full_like(keys, 0.8)
    want = decayed_over_time(decay, keys, torch.ones_like(keys), along(retained.sources))
    same(along(retained.inputs), want)


# A decomposable kernel collapses into a recurrence; the exponential does not.


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@on_networks
def test_a_decomposable_kernel_collapses_into_linear_attention_of_rank_d(eps, size):
    probe, kernel = network("attnres", size, mixing="linear", eps=eps)
    stack = beside(probe, "linear_attention", rank=size["dim"], feature_map="elu1", normalize=True, eps=eps)
    fill(stack, key_proj=torch.eye(size["dim"]), key_bias=0.0)
    queries = dict(probe.stack.named_parameters())  # all it owns
    stack.load_converted({**stack.state_dict(), **queries})
    recurrent = dm.trace(stack, probe.x, probe.sublayers)
    same(recurrent.inputs, kernel.inputs)
    same(recurrent.M, kernel.M)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("key_norm", [True, False])
@on_even_networks
def test_linear_mixing_runs_as_a_recurrence_that_keeps_no_source(heads, key_norm, size):
    probe, kernel = network("attnres", size, mixing="linear", heads=heads, key_norm=key_norm)
    memory: Tensor | float = 0.0  # [..., H, D/H, D/H]
    total: Tensor | float = 0.0  # [..., H, D/H]
    source = probe.x
    for row, mixer in enumerate(probe.stack.all_mixers()):
        key = phi(norm(source) if key_norm else source).unflatten(-1, (heads, -1))
        memory = memory + key.unsqueeze(-1) * source.unflatten(-1, (heads, -1)).unsqueeze(-2)
        total = total + key
        if row == 0:
            h = source
        else:
            query = phi(mixer.query.detach()).view(heads, -1)
            h = (recall(memory, query) / (total * query).sum(-1, keepdim=True)).flatten(-2)
        same(h, kernel.inputs[row])
        source = probe.sublayers[row](h) if row < size["depth"] else source


DEEP = {"dim": 2, "depth": 11, "tokens": (6,)}


@pytest.mark.parametrize("seed", range(4))
def test_at_width_two_linear_mixing_has_rank_two_and_softmax_has_full_rank(seed):
    _, softmax = network("attnres", {**DEEP, "seed": seed})
    _, linear = network("attnres", {**DEEP, "seed": seed}, mixing="linear")
    assert (linear.rank() == 2).all()
    assert (softmax.rank() == rank_cap(DEEP["depth"])).all()
    assert rank_cap(DEEP["depth"]) == 6


@pytest.mark.parametrize("seed", range(4))
def test_no_state_of_two_rows_comes_near_softmax_attention_of_width_two(seed):
    """A state of two rows gives blocks of rank 2 at most: the third singular value is how far off it must stay."""

    def third(traced: dm.Trace) -> Tensor:
        return torch.stack([s[..., 2] / s[..., 0] for s in block_spectra(traced.M) if s.shape[-1] > 2]).amax(0)

    size = {**DEEP, "seed": seed}
    assert third(network("attnres", size)[1]).min() > 0.05
    for name, options in (
        ("attnres", {"mixing": "linear"}),
        ("linear_attention", {"rank": 2}),
        ("hyper_connections", {"streams": 2}),
    ):
        assert third(network(name, size, **options)[1]).max() < 1e-14


@on_networks
def test_softmax_collapses_into_a_running_mean_while_its_queries_are_zero(size):
    probe = make_probe("attnres", {}, **size)
    fill(probe.stack, query=0.0)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    mean = 0.0
    for row, source in enumerate(traced.sources):
        mean = mean + (source - mean) / (row + 1)
        same(traced.inputs[row], mean)
    assert (traced.rank() == 1).all()


def monomials(u: Tensor, degree: int) -> Tensor:
    """ψ of u [..., 2] with ψ(q)·ψ(k) = Σ_{t ≤ degree} ⟨q, k⟩ᵗ / t!."""
    powers = [(a, t - a) for t in range(degree + 1) for a in range(t + 1)]
    sizes = [math.sqrt(math.factorial(a) * math.factorial(b)) for a, b in powers]
    return torch.stack([u[..., 0] ** a * u[..., 1] ** b / s for (a, b), s in zip(powers, sizes, strict=True)], -1)


@pytest.mark.parametrize("seed", range(4))
def test_an_exponential_cut_at_degree_p_collapses_and_approaches_softmax(seed):
    probe, softmax = network("attnres", {"dim": 2, "depth": 15, "tokens": (6,), "seed": seed})
    sources = along(softmax.sources)
    errors, rows = [], []
    for degree in (2, 6, 12, 30):  # even: such a polynomial is positive everywhere
        query, key = monomials(folded_queries(probe.stack), degree), monomials(norm(sources), degree)
        weights = (query @ key.mT).tril()
        M = weights / weights.sum(-1, keepdim=True)
        # The same from sums that do not know their reader.
        memory, total = (key.unsqueeze(-1) * sources.unsqueeze(-2)).cumsum(-3), key.cumsum(-2)
        same(recall(memory, query) / (total * query).sum(-1, keepdim=True), M @ sources)
        errors.append(float((M - softmax.M).abs().max()))
        rows.append(key.shape[-1])
        assert rows[-1] == math.comb(2 + degree, degree)
        if degree == 2:
            assert int(dm.semiseparable_rank(M, 1e-9).max()) <= 6 < int(softmax.rank().min())
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.01
    assert errors[-1] < TOLERANCE
    assert rows[0] == 6 < len(softmax.sources) < rows[-1] == 496


# MRLA: attention beside the residual.


def mrla_terms(traced: dm.Trace) -> tuple[Tensor, Tensor, Tensor]:
    """Keys a_0 … a_L and running decays [..., n, D], and γ of rows 2 … L+1 [L, D]."""
    sites = traced.coefficients
    keys = along([sites[0].embedding, *(c.gate for c in sites[:-1])])
    decay = torch.stack([torch.ones_like(sites[0].decay), *(c.decay for c in sites[:-1])])
    return keys, decay.detach(), torch.stack([c.gamma for c in sites[1:]]).detach()


@pytest.mark.parametrize("head_dim", [None, 1])
@on_networks
def test_mrla_light_is_gated_linear_attention_over_depth(head_dim, size):
    probe, traced = network("mrla", size, head_dim=head_dim)
    keys, decay, gamma = mrla_terms(traced)
    values = along(traced.sources)
    recurrent, o = [], torch.zeros_like(probe.x)
    for s in range(size["depth"] + 1):
        o = decay[s] * o + keys[..., s, :] * values[..., s, :]
        recurrent.append(o)
    # The query is 1 and the decay is split over query and key, channel by channel.
    total = decay.cumprod(0)
    query, key = total.T, (keys / total).mT  # [D, n], [..., D, n]
    attention = (query.unsqueeze(-1) * key.unsqueeze(-2)).tril()  # [..., D, n, n]
    parallel = (attention @ values.mT.unsqueeze(-1)).squeeze(-1).mT
    same(parallel, along(recurrent))
    for row, (x, o) in enumerate(states(probe)[1:], 1):
        same(o, recurrent[row])
        same(traced.inputs[row], x + gamma[row - 1] * recurrent[row])
    same(
        grouped(traced)[..., 1:, :], (1 + gamma.T.unsqueeze(-1) * attention[..., 1:, :]) * causal(size["depth"] + 1)[1:]
    )


@on_networks
def test_mrla_light_runs_on_the_linear_maps_of_gated_linear_attention(size):
    """Each channel is a gated linear attention of rank 1 and width 1: channels move among the tokens."""
    probe, traced = network("mrla", size)
    keys, decay, _ = mrla_terms(traced)
    gla = dm.DepthStack("linear_attention", dim=1, depth=size["depth"], rank=1, rule="gated").double()
    column = traced.sources[..., None]  # [n, ..., D, 1]
    memory = gla[0].start(column[0], Written(None, keys[..., 0, :, None]))
    for i, (mixer, (_, o)) in enumerate(zip(gla, states(probe)[1:], strict=True), 1):
        transition = decay[i, :, None, None].expand(*probe.x.shape, 1, 1)
        memory = mixer.update(memory, LinearCoeff(None, None, Written(transition, keys[..., i, :, None])), column[i])
        unit_query = LinearCoeff(torch.ones(1, dtype=torch.float64), None, None)
        same(mixer.combine(memory, unit_query).squeeze(-1), o)


@on_even_networks
def test_mrla_base_is_multi_head_self_attention_over_depth(size):
    probe, traced = network("mrla", size, form="base", head_dim=size["dim"] // 2)
    values = along(traced.sources)
    sites = probe.stack.all_mixers()
    query = torch.stack([m.q_weight.detach() for m in sites[1:]]) * norm(values)[..., 1:, :]
    key = torch.stack([sites[0].embedding_k_weight.detach(), *(m.k_weight.detach() for m in sites[:-1])]) * norm(values)
    mask = causal(size["depth"] + 1)[1:].bool()  # the first row reads the embedding and asks nothing
    attention = over_time(query, key, values, heads=2, attn_mask=mask)  # torch's own scale, 1/√d_h
    gamma = torch.stack([m.gamma.detach() for m in sites[1:]])
    same(along(traced.inputs[1:]), values.cumsum(-2)[..., 1:, :] + gamma * attention)


# Deep Delta Learning is DeltaNet.


@pytest.mark.parametrize("value_width", [1, 3])
@on_networks
def test_ddl_reads_out_as_deltanet_over_depth(value_width, size):
    """k_lᵀ X_l by the running state, by products of operators, and by one triangular solve."""
    probe, traced = network("ddl", size, value_width=value_width)
    held = [X for (X,) in states(probe)]  # [..., M, D]
    sites = traced.coefficients[:-1]
    K, beta = along([c.key for c in sites]), along([c.beta for c in sites])  # [..., L, D], [..., L, 1]
    values = along([c.target for c in sites])  # [..., L, M]
    start = held[0].mT  # X_0 [..., D, M]
    running = along([recall(X.mT, c.key) for X, c in zip(held, sites, strict=False)])  # [..., L, M]

    unit = torch.eye(size["dim"], dtype=torch.float64)
    erase = [unit - b * k[..., :, None] * k[..., None, :] for k, b in ((c.key, c.beta[..., None]) for c in sites)]
    rows = []
    for row in range(size["depth"]):
        total, T = torch.zeros_like(values[..., 0, :]), unit.expand(*size["tokens"], -1, -1)
        for i in reversed(range(row)):  # T is T_{i→l}, the product of what was erased after write i
            gain = (K[..., row, :] * (T @ K[..., i, :, None]).squeeze(-1)).sum(-1, keepdim=True)
            total = total + gain * beta[..., i, :] * values[..., i, :]
            T = T @ erase[i]
        rows.append(total + recall(T @ start, K[..., row, :]))
    same(along(rows), running)

    overlap = (K @ K.mT).tril(-1)
    solve = torch.eye(size["depth"], dtype=torch.float64) + overlap * beta.mT
    right = K @ start + overlap @ (beta * values)
    recalled = torch.linalg.solve_triangular(solve, right, upper=False, unitriangular=True)
    same(recalled, running)
    same((start + K.mT @ (beta * (values - recalled))).mT, held[-1])  # all writes at once: the state of the head's row

    embedding = torch.linalg.solve_triangular(solve, K @ start, upper=False, unitriangular=True)
    same(embedding + readout_matrix(sites)[..., 1:] @ (beta * values), running)


@pytest.mark.parametrize("value_width", [1, 3])
@on_networks
def test_ddl_readout_matrix_is_that_of_the_transcription(value_width, size):
    probe, traced = network("ddl", size, value_width=value_width)
    params = dict(probe.stack.state_dict())
    want = transcribed_ddl.readout_matrix(probe.x, probe.sublayers, params, value_width=value_width)
    same(readout_matrix(traced.coefficients[:-1]), want)


@pytest.mark.parametrize("value_width", [1, 3])
@on_networks
def test_ddl_runs_on_the_linear_maps_of_the_delta_rule_on_its_transposed_state(value_width, size):
    probe, traced = network("ddl", size, value_width=value_width)
    options = {"rank": size["dim"], "rule": "delta"}
    deltanet = dm.DepthStack("linear_attention", dim=value_width, depth=size["depth"], **options).double()
    held = [X for (X,) in states(probe)]
    memory: tuple[Tensor, ...] = (held[0].mT,)
    for mixer, c, X in zip(deltanet, traced.coefficients, held[1:], strict=False):
        erased = c.beta[..., None] * c.key[..., :, None] * c.key[..., None, :]
        written = Written(torch.eye(size["dim"], dtype=torch.float64) - erased, c.beta * c.key)
        memory = mixer.update(memory, LinearCoeff(None, None, written), c.target)
        same(memory[0].mT, X)


@pytest.mark.parametrize("dim", [2, 3, 8])
def test_ddl_readout_matrix_has_a_rank_of_at_most_the_width(dim):
    _, traced = network("ddl", {"dim": dim, "depth": 12, "tokens": (4,)})
    recalled = readout_matrix(traced.coefficients[:-1])[..., 1:, 1:-1]  # rows l ≥ 2, writes 1 … L−1
    assert (dm.semiseparable_rank(recalled, 1e-9) == min(dim, 6)).all()


# Highway networks: stick-breaking, moving average, gated recurrence.


def highway_logits(traced: dm.Trace) -> Tensor:
    """[L, ..., G] of the gates, from the recorded gates and carries."""
    return torch.stack([gate.log() - carry.log() for carry, gate in traced.coefficients[:-1]])


def by_row(traced: dm.Trace) -> Tensor:
    """M as [row, i, ..., G]."""
    return grouped(traced).movedim((-2, -1), (0, 1))


@pytest.mark.parametrize("gate", ["scalar", "channel"])
@on_networks
def test_highway_is_stick_breaking(gate, size):
    """The newest source takes its gate's share of a stick of length 1, the next its share of the rest, and so on."""
    _, traced = network("highway", size, gate=gate)
    gates = [g for _, g in traced.coefficients[:-1]]
    M = by_row(traced)
    for row in range(size["depth"] + 1):
        stick = torch.ones_like(gates[0])
        for i in range(row, 0, -1):
            same(M[row, i].expand_as(stick), stick * gates[i - 1])
            stick = stick * (1 - gates[i - 1])
        same(M[row, 0].expand_as(stick), stick)  # the embedding takes what is left
    same(traced.row_sums(), torch.ones_like(traced.row_sums()))


@pytest.mark.parametrize("gate", ["scalar", "channel"])
@on_networks
def test_highway_has_a_closed_form_in_cumulative_log_sigmoids(gate, size):
    _, traced = network("highway", size, gate=gate)
    logits = highway_logits(traced)
    none = torch.zeros_like(logits[:1])
    gates = torch.cat([none, logsigmoid(logits)])  # log g_0 … log g_L, g_0 = 1
    carried = torch.cat([none, logsigmoid(-logits)]).cumsum(0)
    M = (gates + carried.unsqueeze(1) - carried).exp()  # [row, i, ..., G]
    n = len(gates)
    M = M * causal(n).view(n, n, *[1] * (M.dim() - 2))
    same(M, by_row(traced))


@pytest.mark.parametrize("rate", [0.1, 0.7])
@on_networks
def test_highway_with_constant_gates_is_an_exponential_moving_average(rate, size):
    probe = make_probe("highway", {}, **size)
    fill(probe.stack, weight=0.0, bias=math.log(rate / (1 - rate)))
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    average = traced.sources[0]
    for h, source in zip(traced.inputs[1:], traced.sources[1:], strict=True):
        average = average + rate * (source - average)
        same(h, average)
    n = size["depth"] + 1
    age = torch.arange(n).unsqueeze(-1) - torch.arange(n)
    want = torch.where(age >= 0, rate * (1 - rate) ** age.double(), 0.0)
    want[:, 0] /= rate
    same(traced.M, want.expand_as(traced.M))


@pytest.mark.parametrize("gate", ["scalar", "channel"])
@on_networks
def test_highway_is_a_gru_over_depth_that_takes_its_gates_as_input(gate, size):
    probe = make_probe("highway", {"gate": gate}, **size)
    # A GRU's candidate is a tanh: keep the sources where its inverse is accurate.
    sublayers = [lambda h, f=f: 0.9 * torch.tanh(f(h)) for f in probe.sublayers]
    traced = dm.trace(probe.stack, probe.x, sublayers)
    dim = size["dim"]
    gru = torch.nn.GRU(2 * dim, dim, bias=False, dtype=torch.float64)
    unit, none = torch.eye(dim), torch.zeros(dim, dim)
    with torch.no_grad():
        gru.weight_hh_l0.zero_()
        gru.weight_ih_l0.copy_(torch.cat([torch.cat(pair, 1) for pair in ((none, none), (-unit, none), (none, unit))]))
        logits = highway_logits(traced).expand_as(traced.sources[1:])
        sequence = torch.cat([logits, traced.sources[1:].atanh()], -1)  # depth in the place of time
        out, _ = gru(sequence.reshape(size["depth"], -1, 2 * dim), probe.x.reshape(1, -1, dim))
    same(out.view_as(traced.inputs[1:]), traced.inputs[1:])


# Softmax attention.


def split(x: Tensor, heads: int) -> Tensor:
    """[..., n, D] -> [..., H, n, D/H]."""
    return x.unflatten(-1, (heads, -1)).movedim(-2, -3)


def over_time(query: Tensor, key: Tensor, value: Tensor, heads: int = 1, **options: Any) -> Tensor:
    """torch's attention on [..., n, D]; the axis n, elsewhere tokens in time, is depth."""
    query = query.expand(*key.shape[:-2], *query.shape[-2:])  # a learned query asks for every token
    q, k, v = (split(x, heads) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, **options).movedim(-3, -2).flatten(-2)


def folded_queries(stack: dm.DepthStack) -> Tensor:
    """γ ⊙ w of every row [n, D]; the first row has one source, so that any query serves."""
    rows = [m.query.detach().flatten() * m.key_weight.detach() for m in stack.all_mixers()[1:]]
    return torch.stack([torch.zeros_like(rows[0]), *rows])


@pytest.mark.parametrize(("heads", "scale"), [(1, 1.0), (2, 1.0), (2, 0.3)])
@on_even_networks
def test_the_row_of_the_head_is_softmax_attention_with_depth_as_the_sequence(heads, scale, size):
    probe, traced = network("attnres", size, heads=heads, scale=scale)
    out = probe.stack.out
    sources = along(traced.sources)
    keys = norm(sources) * out.key_weight.detach()
    h = over_time(out.query.detach().flatten()[None], keys, sources, heads, scale=scale)
    same(h.squeeze(-2), traced.inputs[-1])


@pytest.mark.parametrize("heads", [1, 2])
@on_even_networks
def test_full_attnres_over_fixed_sources_is_causal_attention(heads, size):
    probe = make_probe("attnres", {"heads": heads}, **size)
    generator = torch.Generator().manual_seed(size["seed"] + 1)
    outputs = torch.randn(size["depth"], *probe.x.shape, generator=generator, dtype=torch.float64)
    traced = dm.trace(probe.stack, probe.x, [lambda _, v=v: v for v in outputs])
    sources = along([probe.x, *outputs])
    queries = folded_queries(probe.stack)
    same(along(traced.inputs), over_time(queries, norm(sources), sources, heads, scale=1.0, is_causal=True))
    n = size["depth"] + 1
    one_hot = torch.eye(n, dtype=torch.float64).repeat(1, heads).expand(*size["tokens"], n, heads * n)
    M = split(over_time(queries, norm(sources), one_hot, heads, scale=1.0, is_causal=True), heads)
    same(grouped(traced), M)


@pytest.mark.parametrize("heads", [1, 2])
@on_even_networks
def test_full_attnres_of_a_live_network_is_causal_attention_over_the_sources_it_made(heads, size):
    """As in time: generation goes row by row with the sources as its cache, and one masked product checks it all."""
    probe, traced = network("attnres", size, heads=heads)
    sources = along(traced.sources)
    h = over_time(folded_queries(probe.stack), norm(sources), sources, heads, scale=1.0, is_causal=True)
    same(along(traced.inputs), h)


@pytest.mark.parametrize("heads", [1, 2])
@on_even_networks
def test_attnres_with_queries_from_the_input_is_self_attention_over_depth(heads, size):
    probe, traced = network("attnres", size, heads=heads, query="input")
    sources = along(traced.sources)
    keys = norm(sources)
    rows = [m.query_proj.detach().T * m.key_weight.detach() for m in probe.stack.all_mixers()[1:]]
    projections = torch.stack([torch.zeros_like(rows[0]), *rows])  # [n, D, D]
    queries = (keys.unsqueeze(-2) @ projections).squeeze(-2)  # row r asks with its newest source, v_r
    same(along(traced.inputs), over_time(queries, keys, sources, heads, scale=1.0, is_causal=True))


@pytest.mark.parametrize("window", [1, 3])
@on_networks
def test_attnres_with_a_window_is_sliding_window_attention_with_a_sink(window, size):
    probe, traced = network("attnres", size, window=window)
    sources = along(traced.sources)
    n = size["depth"] + 1
    age = torch.arange(n).unsqueeze(-1) - torch.arange(n)
    visible = (age >= 0) & ((age < window) | (torch.arange(n) == 0))
    h = over_time(folded_queries(probe.stack), norm(sources), sources, scale=1.0, attn_mask=visible)
    same(along(traced.inputs), h)


# Streams: a state-space model.


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hyper_connections", {"streams": 4, "dynamic": False}),
        ("hyper_connections", {"streams": 3, "readout": "learned"}),
        ("hyper_connections", {"streams": 2, "transition": "identity", "readout": "sum"}),
        ("mhc", {"streams": 3}),
        ("mhc_lite", {"streams": 3}),
    ],
)
@on_networks
def test_hyper_connections_are_a_state_space_model_over_depth(name, options, size):
    """M is the semiseparable matrix C_l A_{l−1} … A_{i+1} B_i of H_l = A_l H_{l−1} + B_l v_l, h = C H."""
    _, traced = network(name, size, **options)
    m, n = options["streams"], size["depth"] + 1
    unit = torch.eye(m, dtype=torch.float64)
    sites = traced.coefficients
    C = [unit[0] if c.read is None else c.read for c in sites]
    A = [unit, *(unit if c.transition is None else c.transition for c in sites[:-1])]
    B = [unit.sum(0), *(c.gain for c in sites[:-1])]  # the embedding enters every stream
    M = traced.M.new_zeros(traced.M.shape)
    for i in range(n):
        carried = B[i].unsqueeze(-1)
        for row in range(i, n):
            carried = A[row] @ carried if row > i else carried
            M[..., row, i] = (C[row] * carried.squeeze(-1)).sum(-1)
    same(traced.M, M)
    same(along(traced.inputs), M @ along(traced.sources))


# The table of the page.


@pytest.mark.parametrize(
    ("name", "options", "rank", "rows"),
    [
        ("residual", {}, 1, 1),
        ("highway", {}, 1, 1),
        ("highway", {"gate": "channel"}, 1, 1),
        ("linear_attention", {"rank": 3}, 3, 3),
        ("linear_attention", {"rank": 3, "rule": "gated"}, 3, 3),
        ("linear_attention", {"rank": 3, "rule": "delta"}, 3, 3),
        ("linear_attention", {"rank": 3, "rule": "gated_delta"}, 3, 3),
        ("linear_attention", {"rank": 3, "feature_map": "elu1", "normalize": True}, 3, 3),
        ("mrla", {}, 2, 2),
        ("mrla", {"form": "base"}, 6, 24),
        ("hyper_connections", {"streams": 3}, 3, 3),
        ("mhc", {"streams": 3}, 3, 3),
        ("mhc_lite", {"streams": 3}, 3, 3),
        ("attnres", {}, 6, 12),
        ("attnres", {"query": "input"}, 6, 12),
        ("attnres", {"window": 3}, 4, 4),
        ("attnres", {"mixing": "linear", "heads": 4}, 2, 12),
    ],
)
def test_a_recurrence_has_as_many_rows_of_state_as_its_rank_and_softmax_holds_every_source(name, options, rank, rows):
    depth = 11
    probe, traced = network(name, {"dim": 8, "depth": depth, "tokens": (4,)}, **options)
    assert (traced.rank() == rank).all()
    spec = probe.stack.spec(depth)
    held = [shape for shape in spec.shapes[: spec.essential] if shape[-1] == 8]  # z of linear attention is no row
    assert sum(math.prod(shape[:-1]) for shape in held) == rows
    assert rank <= rank_cap(depth) == 6


def test_the_page_names_tests_that_exist_and_leaves_none_out():
    here = {name for name in globals() if name.startswith("test_")}
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert named == here - {"test_the_page_names_tests_that_exist_and_leaves_none_out"}
