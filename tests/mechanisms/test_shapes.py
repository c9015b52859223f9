"""Odd but right input: any leading shape, depth, width, layout and dtype, for every mechanism with every option."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

import depthmix as dm
from depthmix.analysis.invariants import TOLERANCE, Probe, distance, make_probe, verify
from tests.cases import EVERY_CASE

LEADS = [(), (1,), (0,), (5,), (2, 3), (2, 0, 3), (1, 2, 1, 2)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
few = settings(max_examples=4, deadline=None, derandomize=True, database=None)
fewer = settings(few, max_examples=2)  # a backward pass each


def width_unit(options: dict[str, Any]) -> int:
    """What the width has to be a multiple of; a query of one channel cancels where a linear kernel is normalised."""
    return int(options.get("heads") or options.get("head_dim") or 1) * (2 if options.get("mixing") == "linear" else 1)


def least_depth(name: str, options: dict[str, Any]) -> int:
    """Blocks of AttnRes have to fit the depth; all else takes any."""
    fits = name != "block_attnres"
    return 1 if fits else max(1, options.get("num_blocks") or 1, options.get("block_sublayers") or 1)


@st.composite
def sizes(draw: st.DrawFn, name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "dim": width_unit(options) * draw(st.sampled_from([1, 2, 3, 5, 7, 8])),
        "depth": draw(st.integers(least_depth(name, options), 9)),
        "tokens": draw(st.sampled_from(LEADS)),
        "seed": draw(st.integers(0, 99)),
    }


def small(name: str, options: dict[str, Any], **kwargs: Any) -> Probe:
    return make_probe(name, options, dim=8, depth=5, **kwargs)


def outputs_for(probe: Probe, dtype: torch.dtype) -> list[Tensor]:
    """What sublayers returned, whatever they read; the values can be told in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(probe.stack), *probe.x.shape)
    return list(torch.randn(shape, generator=generator).bfloat16().to(dtype).unbind(0))


def run(stack: dm.DepthStack, x: Tensor, outputs: Sequence[Tensor]) -> tuple[list[dm.State], list[Tensor]]:
    """The user's loop, with what sublayers return given: the state before each site and what each site read."""
    states, reads = [stack.begin(x)], []
    for mixer, y in zip(stack, outputs, strict=True):
        h, carry = mixer.read(states[-1])
        reads.append(h)
        states.append(mixer.write(states[-1], carry, y))
    return states, [*reads, stack.end(states[-1])]


def constant(outputs: Sequence[Tensor]) -> list[Callable[[Tensor], Tensor]]:
    return [lambda h, y=y: y for y in outputs]  # type: ignore[misc]


def tensors_of(coefficients: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(coefficients) if isinstance(leaf, Tensor)]


# ---------------------------------------------------------------------------------------------------------------------
# Shapes


@EVERY_CASE
@few
@given(data=st.data())
def test_any_leading_shape_depth_and_width_gives_what_each_token_gives_alone(
    name: str, options: dict[str, Any], data: st.DataObject
) -> None:
    size = data.draw(sizes(name, options))
    probe = make_probe(name, options, **size)
    with torch.no_grad():
        states = probe.states()
        out = probe.stack.end(states[-1])
        together, tokens = out.reshape(-1, size["dim"]), probe.x.reshape(-1, size["dim"])
        alone = {i: probe.stack(tokens[i], probe.sublayers) for i in {0, len(tokens) - 1} if len(tokens)}
    assert out.shape == probe.x.shape
    for index, state in enumerate(states):
        assert type(state) is tuple
        assert [t.shape for t in state] == [(*size["tokens"], *shape) for shape in probe.stack.spec(index).shapes]
    for i, token in alone.items():
        assert distance(together[i], token) <= 1e-12


@EVERY_CASE
def test_every_invariant_holds_at_the_smallest_size(name: str, options: dict[str, Any]) -> None:
    size = {"dim": width_unit(options), "depth": least_depth(name, options)}
    assert [(check.name, check.error) for check in verify(name, options, **size) if not check.holds] == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("attnres", {"heads": 8, "mixing": "linear"}),
        ("attnres", {"window": 99}),
        ("attnres", {"window": 2, "mixing": "static", "scale_by_count": True}),
        ("attnres", {"scale": -3.0, "eps": 1.0}),
        ("block_attnres", {"num_blocks": 7}),
        ("block_attnres", {"num_blocks": 1}),
        ("block_attnres", {"block_sublayers": 6}),
        ("block_attnres", {"num_blocks": 5, "heads": 8, "mixing": "linear"}),
        ("delta_attnres", {"heads": 8, "mixing": "linear"}),
        ("denseformer", {"period": 99}),
        ("denseformer", {"dilation": 99}),
        ("denseformer", {"block_sublayers": 99}),
        ("denseformer", {"block_sublayers": 3, "dilation": 2, "period": 2}),
        ("hyper_connections", {"streams": 11}),
        ("hyper_connections", {"streams": 1, "dynamic": False, "transition": "identity"}),
        ("mhc", {"streams": 9, "iterations": 100}),
        ("mhc", {"eps": 1.0, "scale_init": -1.0}),
        ("mhc_lite", {"streams": 5}),
        ("mrla", {"head_dim": 8}),
        ("mrla", {"form": "base", "head_dim": 1}),
        ("linear_attention", {"rank": 11, "rule": "delta"}),
        ("linear_attention", {"rank": 1, "rule": "gated"}),
        ("ddl", {"value_width": 9, "beta": 1.999}),
        ("highway", {"bias": 50.0}),
        ("highway", {"bias": -50.0, "gate": "channel"}),
        ("scaled_residual", {"init": -2.0, "gate": "channel"}),
    ],
    ids=str,
)
def test_every_invariant_holds_at_the_ends_of_the_options(name: str, options: dict[str, Any]) -> None:
    assert [(check.name, check.error) for check in verify(name, options) if not check.holds] == []


@EVERY_CASE
def test_a_trace_takes_no_tokens_and_no_leading_axes(name: str, options: dict[str, Any]) -> None:
    for lead in ((), (0,), (2, 0)):
        probe = small(name, options, tokens=lead)
        traced = dm.trace(probe.stack, probe.x, probe.sublayers)
        groups = () if traced.kind in ("scalar", "operator") else (probe.stack[0].groups,)
        assert traced.M.shape == (*lead, *groups, 6, 6)
        assert traced.sources.shape == traced.inputs.shape == (6, *lead, 8)
        assert traced.row_sums().shape == (*lead, *groups, 6)
        held = traced.M if traced.weights is None else traced.weights
        assert traced.sinks().shape == (*held.shape[:-2], held.shape[-1])
        assert traced.entropy().shape == traced.locality().shape == held.shape[:-1]
        assert traced.spread().shape == held.shape[len(lead) : -1]
        if traced.kind != "operator":
            assert traced.rank().shape == traced.effective_rank().shape == (*lead, *groups)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "a window of a larger tensor": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 1))[:, 1:-1, 3:-2],
}


@EVERY_CASE
def test_the_layout_in_memory_does_not_matter(name: str, options: dict[str, Any]) -> None:
    probe = small(name, options)
    with torch.no_grad():
        plain = probe.run()
        for layout in LAYOUTS.values():
            x = layout(probe.x)
            assert not x.is_contiguous()
            assert torch.equal(x, probe.x)
            odd = [lambda h, f=f, layout=layout: layout(f(h)) for f in probe.sublayers]
            assert distance(probe.stack(x, odd), plain) <= 1e-12


@EVERY_CASE
def test_an_expanded_embedding_counts_as_its_copies(name: str, options: dict[str, Any]) -> None:
    """One vector for all tokens, with strides of zero: nothing may write into it."""
    probe = small(name, options, tokens=(1,))
    one = probe.x[0].clone()
    with torch.no_grad():
        out = probe.stack(one.expand(2, 3, 8), probe.sublayers)
        assert distance(out, probe.stack(one.repeat(2, 3, 1), probe.sublayers)) <= 1e-12
    assert torch.equal(one, probe.x[0])


# ---------------------------------------------------------------------------------------------------------------------
# Values


@EVERY_CASE
def test_zeros_give_finite_values_and_gradients(name: str, options: dict[str, Any]) -> None:
    """Norms divide by what is zero here."""
    for dtype in (torch.float32, torch.float64):
        probe = small(name, options, dtype=dtype)
        x = torch.zeros_like(probe.x, requires_grad=True)
        _, reads = run(probe.stack, x, [torch.zeros_like(x) for _ in probe.stack])
        sum(h.sum() for h in reads).backward()  # type: ignore[union-attr]
        assert x.grad is not None
        for tensor in (*reads, x.grad, *(p.grad for p in probe.stack.parameters() if p.grad is not None)):
            assert torch.isfinite(tensor).all()


@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_streams_are_mixed_as_in_double_precision(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """1e30 fits, its square does not: a norm that overflows would lose the keys."""
    probe = small(name, options, dtype=dtype)
    x, outputs = probe.x * 1e30, [y * 1e30 for y in outputs_for(probe, dtype)]
    with torch.no_grad():
        states, reads = run(probe.stack, x, outputs)
        exact = run(probe.stack.double(), x.double(), [y.double() for y in outputs])[1]
    assert all(torch.isfinite(t).all() for t in states[-1])
    for h, truth in zip(reads, exact, strict=True):
        assert distance(h.double(), truth) <= TOLERANCE[dtype]


@EVERY_CASE
def test_what_is_not_a_number_stays_with_its_token(name: str, options: dict[str, Any]) -> None:
    probe = small(name, options)
    spoilt = probe.x.clone()
    spoilt[1, 2, 0] = float("nan")
    with torch.no_grad():
        clean, out = probe.run(), probe.stack(spoilt, probe.sublayers)
    hit = torch.zeros(2, 3, dtype=torch.bool)
    hit[1, 2] = True
    assert out[hit].isnan().any()
    assert distance(out[~hit], clean[~hit]) <= 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# Dtypes


@EVERY_CASE
@pytest.mark.parametrize(
    ("held", "returned"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64)], ids=str
)
def test_the_stream_keeps_its_dtype_whatever_the_parameters_and_sublayers_are_in(
    name: str, options: dict[str, Any], held: torch.dtype, returned: torch.dtype
) -> None:
    """And nothing is computed in less than float32: the truth is the same in float64, from the same rounded numbers."""
    probe = small(name, options, dtype=torch.bfloat16)
    stack = probe.stack.to(held)
    read = {}
    with torch.no_grad():
        for stream in DTYPES:
            states, read[stream] = run(stack, probe.x.to(stream), outputs_for(probe, returned))
            kept = [state[: stack.spec(i).essential] for i, state in enumerate(states)]  # derived numbers are float32
            assert {t.dtype for state in kept for t in state} == {stream}
            assert {h.dtype for h in read[stream]} == {stream}
        exact = run(stack.double(), probe.x.double(), outputs_for(probe, torch.float64))[1]
    for stream, reads in read.items():
        # Weights of parameters alone have no more digits than float32 gives them, in a stream of float64 too.
        bound = max(TOLERANCE[stream], TOLERANCE[torch.float32])
        assert max(distance(h.double(), truth) for h, truth in zip(reads, exact, strict=True)) <= bound, stream


@EVERY_CASE
@pytest.mark.parametrize(
    ("stream", "held"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float16)],
    ids=str,
)
def test_coefficients_are_float32_at_least(
    name: str, options: dict[str, Any], stream: torch.dtype, held: torch.dtype
) -> None:
    probe = small(name, options, dtype=stream)
    traced = dm.trace(probe.stack.to(held), probe.x, constant(outputs_for(probe, stream)))
    assert {c.dtype for c in tensors_of(traced.coefficients)} <= {torch.float32}
    assert traced.M.dtype == torch.float32


@EVERY_CASE
def test_coefficients_in_double_precision_stay_in_it(name: str, options: dict[str, Any]) -> None:
    probe = small(name, options, dtype=torch.float64)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    assert {c.dtype for c in tensors_of(traced.coefficients)} <= {torch.float64}


@EVERY_CASE
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_neither_coefficients_nor_states(
    name: str, options: dict[str, Any], stream: torch.dtype
) -> None:
    """Sublayers return bfloat16 under autocast; given the same outputs, all that mixers do is bit for bit the same."""
    probe = small(name, options, dtype=stream)
    outputs = outputs_for(probe, torch.bfloat16)
    with torch.no_grad():
        plain = run(probe.stack, probe.x, outputs)
        traced = dm.trace(probe.stack, probe.x, constant(outputs))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
            cast = run(probe.stack, probe.x, outputs)
            recast = dm.trace(probe.stack, probe.x, constant(outputs))
    for a, b in zip(tree_leaves(cast), tree_leaves(plain), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    pairs = zip(tensors_of(recast.coefficients), tensors_of(traced.coefficients), strict=True)
    for a, b in (*pairs, (recast.M, traced.M)):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


@EVERY_CASE
def test_autocast_changes_no_gradient(name: str, options: dict[str, Any]) -> None:
    probe = small(name, options, dtype=torch.float32)
    outputs = outputs_for(probe, torch.bfloat16)
    gradients = []
    for enabled in (False, True):
        probe.stack.zero_grad()
        x = probe.x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            _, reads = run(probe.stack, x, outputs)
        torch.stack(reads).square().mean().backward()
        gradients.append([x.grad, *(p.grad for p in probe.stack.parameters())])
    for a, b in zip(*gradients, strict=True):
        assert (a is None and b is None) or distance(b, a) <= 1e-6  # float32, sums in another order


# ---------------------------------------------------------------------------------------------------------------------
# Autograd, and what is never touched


@EVERY_CASE
@fewer
@given(data=st.data())
def test_an_embedding_that_requires_a_gradient_gets_one(
    name: str, options: dict[str, Any], data: st.DataObject
) -> None:
    probe = make_probe(name, options, **data.draw(sizes(name, options)))
    x = probe.x.clone().requires_grad_()
    out = probe.stack(x, probe.sublayers)
    assert out.requires_grad
    out.square().sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert torch.isfinite(x.grad).all()
    if x.numel():
        assert x.grad.abs().max() > 0


@EVERY_CASE
def test_inference_mode_gives_the_same_and_leaves_nothing_behind(name: str, options: dict[str, Any]) -> None:
    """A tensor that inference mode made and a module kept would break the next training step."""
    probe = small(name, options)
    with torch.inference_mode():
        inferred = probe.run()
        assert inferred.is_inference()
        traced = dm.trace(probe.stack, probe.x, probe.sublayers)
        assert torch.isfinite(traced.M).all()
    out = probe.stack(probe.x.clone().requires_grad_(), probe.sublayers)
    assert torch.equal(out.detach(), inferred)
    out.square().sum().backward()
    assert all(p.grad is not None for p in probe.stack.parameters())


@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_nothing_that_was_given_is_modified_in_place(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    probe = small(name, options, dtype=dtype)
    seen: list[tuple[str, Tensor, Tensor, int]] = []

    def watch(what: str, *tensors: Tensor) -> None:
        seen.extend((what, t, t.detach().clone(), t._version) for t in tensors)

    watch("embedding", probe.x)
    watch("parameter", *probe.stack.parameters(), *probe.stack.buffers())
    with torch.no_grad():
        state = probe.stack.begin(probe.x)
        for mixer, f in zip(probe.stack, probe.sublayers, strict=True):
            watch(f"state before site {mixer.site.index}", *state)
            h, carry = mixer.read(state)
            y = f(h)
            watch(f"h of site {mixer.site.index}", h)
            watch(f"output of sublayer {mixer.site.index}", y)
            state = mixer.write(state, carry, y)
        watch("last state", *state)
        probe.stack.end(state)
        dm.trace(probe.stack, probe.x, probe.sublayers)
    for what, tensor, before, version in seen:
        assert torch.equal(tensor, before), what
        assert tensor._version == version, what


@EVERY_CASE
def test_a_state_can_be_read_and_written_again(name: str, options: dict[str, Any]) -> None:
    """Beam search, speculative decoding and checkpointing go back to an earlier state."""
    probe = small(name, options)
    with torch.no_grad():
        states = probe.states()
        for mixer, state, after, f in zip(probe.stack, states, states[1:], probe.sublayers, strict=False):
            mixer.step(state, torch.cos)  # another branch, taken in between
            again = mixer.step(state, f)
            assert all(torch.equal(a, b) for a, b in zip(again, after, strict=True))
