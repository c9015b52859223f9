"""Streams, norms and the delta rule in their lean forms: exact, really taken, and small in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import depthmix as dm
from depthmix import ops
from depthmix.analysis.invariants import Probe, make_probe
from depthmix.bench import Size, kept_bytes_per_token

LEADS = [(), (1,), (5,), (2, 3), (0,), (2, 0)]
Operation = Callable[..., Tensor]
normed_delta = partial(ops.normed_delta, eps=1e-5)
# Shapes by letter: ... the leading shape, m streams, d channels, h heads of 3 channels, r rows; then the operation.
OPERATIONS: dict[str, tuple[list[str], Operation]] = {
    "normed_linear": (["...d", "rd", "r"], lambda x, w, b: ops.normed_linear(x, w, b, eps=1e-6)),
    "normed_linear of streams": (["...md", "rd"], lambda x, w: ops.normed_linear(x, w, eps=1e-3)),
    "head_products": (["...hd", "hd"], lambda x, w: ops.head_products(x.flatten(-2), w.flatten(), len(w.T), eps=1e-6)),
    "read_streams": (["...md", "...m"], ops.read_streams),
    "read_streams, static": (["...md", "m"], ops.read_streams),
    "write_streams": (["...md", "...mm", "...m", "...d"], ops.write_streams),
    "write_streams, static": (["...md", "mm", "m", "...d"], ops.write_streams),
    "write_streams, diagonal": (["...md", "...m", "...m", "...d"], ops.write_streams),
    "write_streams, identity": (["...md", "...m", "...d"], lambda s, g, y: ops.write_streams(s, None, g, y)),
    "weighted_sum": (
        ["...d", "d", "...d", "...1", "...d"],
        lambda a, v, b, w, c: ops.weighted_sum([a, b, c], [v, w, None]),
    ),
    "normed_delta": (["...md", "...d", "...1", "...m"], partial(ops.normed_delta, eps=1e-5)),
    "normed_delta, squared": (
        ["...md", "...d", "...1", "...m"],
        partial(ops.normed_delta, eps=1e-5, norm="l2_squared"),
    ),
    "normed_delta, rms": (["...md", "...d", "...1", "...m"], partial(ops.normed_delta, eps=1e-5, norm="rms")),
    "sinkhorn": (["...mm"], lambda x: ops.sinkhorn(x, 7)),
    "sinkhorn, one iteration": (["...mm"], lambda x: ops.sinkhorn(x, 1)),
    "sinkhorn with eps": (["...mm"], lambda x: ops.sinkhorn(x, 4, 1e-6)),
}
NODES = {
    "ReadStreams",
    "WriteStreams",
    "NormedLinear",
    "HeadProducts",
    "WeightedSum",
    "NormedDelta",
    "Sinkhorn",
    "Attend",
}
every_operation = pytest.mark.parametrize("name", OPERATIONS)


def sample(name: str, lead: tuple[int, ...], m: int, d: int, seed: int = 0, dtype: Any = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"m": m, "d": d, "h": 3, "r": 4, "1": 1}
    shapes = [
        (*(lead if letters.startswith("...") else ()), *(sizes[k] for k in letters.removeprefix("...")))
        for letters in OPERATIONS[name][0]
    ]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def run(name: str, inputs: list[Tensor], backend: Any = "auto") -> tuple[Tensor, list[Tensor]]:
    """The result, and the gradients of all inputs under a loss that weighs each entry differently."""
    with ops.using(backend):
        out = OPERATIONS[name][1](*inputs)
        loss = (ops.wide(out) * torch.linspace(-1, 1.5, out.numel(), dtype=torch.float64).view(out.shape)).sum()
        return out, list(torch.autograd.grad(loss, inputs))


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1)) if a.numel() else 0.0


def nodes(*outputs: Tensor) -> set[str]:
    """Which of the lean forms a graph holds."""
    seen, queue = set(), [out.grad_fn for out in outputs]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [below for below, _ in node.next_functions]
    return {node.name().removesuffix("Backward") for node in seen} & NODES


@every_operation
@settings(max_examples=25, deadline=None)
@given(lead=st.sampled_from(LEADS), m=st.integers(1, 5), d=st.sampled_from([1, 2, 7, 16]), seed=st.integers(0, 10**6))
def test_the_lean_form_is_the_plain_one_with_all_its_gradients(
    name: str, lead: tuple[int, ...], m: int, d: int, seed: int
) -> None:
    inputs = sample(name, lead, m, d, seed)
    (out, grads), (plain, plain_grads) = run(name, inputs), run(name, inputs, "reference")
    assert nodes(out)
    assert not nodes(plain)
    assert gap(out, plain) <= 1e-12
    for a, b in zip(grads, plain_grads, strict=True):
        assert gap(a, b) <= 1e-11


@every_operation
def test_coefficients_are_spread_over_a_source_axis_in_front(name: str) -> None:
    """A trace replays the linear maps so: streams and outputs gain an axis, coefficients do not."""
    inputs = sample(name, (2, 3), 4, 5)
    long = [t.detach().expand(6, *t.shape).clone().requires_grad_() if k.endswith("d") and k.startswith("...") else t
            for k, t in zip(OPERATIONS[name][0], inputs, strict=True)]  # fmt: skip
    (out, grads), (plain, plain_grads) = run(name, long), run(name, long, "reference")
    assert gap(out, plain) <= 1e-12
    for a, b in zip(grads, plain_grads, strict=True):
        assert gap(a, b) <= 1e-11


@every_operation
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_other_dtypes_are_rounded_once(name: str, dtype: torch.dtype, bound: float) -> None:
    """Bounds are one rounding of the result: sums run in float32, whatever the stream is in."""
    inputs = sample(name, (3, 5), 4, 64, dtype=dtype)
    if "sinkhorn" not in name:  # coefficients come in float32
        held = [k.startswith("...") and k.endswith("d") for k in OPERATIONS[name][0]]
        inputs = [t if h else t.detach().float().requires_grad_() for t, h in zip(inputs, held, strict=True)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    (out, grads), (truth, true_grads) = run(name, inputs), run(name, exact, "reference")
    in_stream = out.dtype == dtype
    assert gap(out, truth) <= (bound if in_stream else 2e-5)
    for t, a, b in zip(inputs, grads, true_grads, strict=True):
        assert a.dtype == t.dtype
        assert gap(a, b) <= 2 * max(bound, 1e-5)


@every_operation
def test_nothing_of_the_streams_width_is_kept_but_what_was_given(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = sample(name, (7,), 4, 64, dtype=dtype)
        given = {t.data_ptr() for t in inputs}
        own: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, own=own: own.append(t) or t, lambda t: t):
            OPERATIONS[name][1](*inputs)
        numbers = sum(t.numel() for t in own if t.data_ptr() not in given)
        assert numbers <= 7 * 4 * (4 + 1), [t.shape for t in own]


@every_operation
def test_second_derivatives_are_there(name: str) -> None:
    inputs = sample(name, (2,), 2, 3)
    assert torch.autograd.gradcheck(OPERATIONS[name][1], inputs)
    assert torch.autograd.gradgradcheck(OPERATIONS[name][1], inputs)


@every_operation
def test_compilers_and_transforms_take_the_plain_form(name: str) -> None:
    inputs = sample(name, (4,), 3, 6)
    out, grads = run(name, inputs)
    compiled = torch.compile(OPERATIONS[name][1], fullgraph=True, backend="aot_eager")(*inputs)
    assert gap(compiled, out) <= 1e-12
    weights = torch.linspace(-1, 1.5, out.numel(), dtype=torch.float64).view(out.shape)
    loss = lambda *t: (OPERATIONS[name][1](*t) * weights).sum()  # noqa: E731
    for a, b in zip(torch.func.grad(loss, tuple(range(len(inputs))))(*inputs), grads, strict=True):
        assert gap(a, b) <= 1e-11


def test_a_mixed_input_may_be_changed_in_place_by_a_sublayer() -> None:
    streams, weights = sample("read_streams", (3,), 2, 5)
    h = ops.read_streams(streams, weights)
    want = torch.autograd.grad(ops.read_streams(streams, weights).square().sum(), streams)[0]
    got = torch.autograd.grad(h.mul_(3).square().sum(), streams)[0]
    assert torch.allclose(got, 9 * want)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e15, 1e30])
def test_norms_of_large_and_small_vectors_do_not_overflow(size: float) -> None:
    for name in ("normed_linear", "head_products", "normed_delta", "normed_delta, squared", "normed_delta, rms"):
        inputs = sample(name, (5,), 4, 16, dtype=torch.float32)
        which = 1 if name.startswith("normed_delta") else 0
        inputs[which] = (inputs[which].detach() * size).requires_grad_()
        exact = [t.detach().double().requires_grad_() for t in inputs]
        (out, grads), (truth, _) = run(name, inputs), run(name, exact, "reference")
        assert gap(out, truth) <= 1e-5
        assert all(torch.isfinite(g).all() for g in grads)


def test_one_vector_that_overflows_does_not_disturb_its_neighbours() -> None:
    x, weight, bias = sample("normed_linear", (5,), 4, 16, dtype=torch.float32)
    huge = x.detach().clone()
    huge[2] *= 1e30
    clean, mixed = ops.normed_linear(x, weight, bias, eps=1e-6), ops.normed_linear(huge, weight, bias, eps=1e-6)
    assert torch.allclose(mixed, clean, rtol=1e-5, atol=1e-5)


# Mechanisms.

LEAN = {
    "highway": {"NormedLinear", "WeightedSum"},
    "hyper_connections": {"NormedLinear", "ReadStreams", "WriteStreams"},
    "mhc": {"NormedLinear", "ReadStreams", "WriteStreams", "Sinkhorn"},
    "mhc_lite": {"NormedLinear", "ReadStreams", "WriteStreams"},
    "mrla": {"HeadProducts", "WeightedSum"},
    "linear_attention": {"NormedLinear", "ReadStreams", "WriteStreams"},
    "ddl": {"NormedLinear", "ReadStreams", "NormedDelta"},
    "delta_attnres": {"Attend"},
}
VARIANTS = [pytest.param(n, dict(o), id=f"{n}-{o}") for n in LEAN for o in dm.mechanism(n).variants]


def rows_and_gradients(probe: Probe, backend: Any) -> tuple[list[Tensor], list[Tensor]]:
    x = probe.x.clone().requires_grad_()
    rows = []
    with ops.using(backend):
        state = probe.stack.begin(x)
        for mixer, f in zip(probe.stack, probe.sublayers, strict=True):
            h, carry = mixer.read(state)
            rows.append(h)
            state = mixer.write(state, carry, f(h))
        rows.append(probe.stack.end(state))
        loss = torch.stack([(row.sin() * (i + 1)).sum() for i, row in enumerate(rows)]).sum()
        return rows, list(torch.autograd.grad(loss, [x, *probe.stack.parameters()]))


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_every_row_and_gradient_is_that_of_the_plain_form(name: str, options: dict[str, Any]) -> None:
    probe = make_probe(name, options, dim=8, depth=6)
    rows, grads = rows_and_gradients(probe, "auto")
    plain_rows, plain_grads = rows_and_gradients(probe, "reference")
    with ops.using("reference"):
        traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    for row, plain, direct in zip(rows, plain_rows, traced.inputs, strict=True):
        assert gap(row, plain) <= 1e-12
        assert gap(row, direct) <= 1e-12
    for a, b in zip(grads, plain_grads, strict=True):
        assert gap(a, b) <= 1e-11


@pytest.mark.parametrize("name", LEAN)
def test_a_model_takes_the_lean_forms(name: str) -> None:
    probe = make_probe(name, {})
    x = probe.x.clone().requires_grad_()
    assert nodes(probe.stack(x, probe.sublayers)) == LEAN[name]
    with ops.using("reference"):
        assert not nodes(probe.stack(x, probe.sublayers))


# Vectors a sublayer and numbers a sublayer beyond the plain residual, which keeps what the sublayer itself reads.
KEPT = {
    "highway": ({}, 1, 8),  # the output
    "mrla": ({}, 2, 24),  # o and the output
    "ddl": ({}, 2, 24),  # X and the output
    "delta_attnres": ({}, 1, 60),  # the output; two numbers for each of 12 sources on average
    "linear_attention": ({}, 4 + 1, 24),  # S and the output
    "hyper_connections": ({}, 4 + 1, 120),  # the streams and the output
    "mhc": ({}, 4 + 1, 120),
    "mhc_lite": ({}, 4 + 1, 160),
    "mhc, two streams": ({"streams": 2}, 2 + 1, 120),
    "ddl, three columns": ({"value_width": 3}, 3 + 1, 24),
    "ddl, released": ({"key_norm": "l2_squared", "target_input": "read", "target_bound": 4.0}, 2, 24),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_graph_keeps_the_state_the_output_and_a_few_numbers(case: str) -> None:
    options, vectors, numbers = KEPT[case]
    size = Size(dim=64, depth=24, hidden=32, tokens=256)
    name = case.split(",")[0]
    extra = kept_bytes_per_token(name, options, size) - kept_bytes_per_token("residual", {}, size)
    ends = 2 * vectors * size.dim  # the state that begin made, and the one that the head reads
    assert 0 < extra <= 4 * (size.depth * (vectors * size.dim + numbers) + ends)


def test_delta_attnres_carries_the_sum_and_makes_it_again_where_it_was_dropped() -> None:
    probe = make_probe("delta_attnres", {}, depth=6)
    with torch.no_grad():
        for mixer, state in zip(probe.stack.all_mixers(), probe.states(), strict=True):
            count = mixer.expects.essential
            assert len(state) == count + (mixer.site.index > 1)
            assert gap(mixer.read(state)[0], mixer.read(state[:count])[0]) <= 1e-12
            for below in state[count:]:
                assert gap(below, torch.stack(state[: count - 1]).sum(0)) <= 1e-12
