"""Norms of sources of any size: values and gradients of every form against the textbook formula in float64.

The square of 1e20 overflows in float32, and the square of its inverse underflows: neither may be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from depthmix import ops
from depthmix.analysis.invariants import make_probe
from depthmix.ops import ReadOptions
from depthmix.ops.attend import compiled, native

NORMS = [1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e18, 1e19, 1e20, 1e25, 1e30]
MIXED = [(1e-30, 1.0, 1e30), (1e20, 1e-20, 1e10), (1e30, 1e28, 1e25)]
SIZES = [*[(norm,) * 3 for norm in NORMS], *MIXED]
TOLERANCE = 1e-4  # of the largest number in a tensor
EPS = 1e-6
TOKENS, DIM = 5, 45  # one step of the kernel's widest loop, one narrower, and a rest

needs_kernel = pytest.mark.skipif(native.library() is None, reason=native.why_not() or "no kernel")
slow = [pytest.mark.inductor, pytest.mark.full]
FORMS: list[Any] = [
    "reference",
    "torch",
    "plain operations",
    pytest.param("native", marks=needs_kernel),
    pytest.param("operators", marks=needs_kernel),
    pytest.param("inductor", marks=slow),
    pytest.param("inductor with operators", marks=[*slow, needs_kernel]),
]


def attend_by(form: str) -> Callable[..., Any]:
    """`ops.read_many` computed by one form."""
    if form == "plain operations":
        return compiled.attend
    if form in ("reference", "torch", "native"):

        def call(*args: Any) -> Any:
            with ops.using(form):  # type: ignore[arg-type]
                return ops.read_many(*args)

        return call
    torch._dynamo.reset()
    read_many = torch.compile(ops.read_many, backend="aot_eager" if form == "operators" else "inductor")

    def call_compiled(*args: Any) -> Any:
        with ops.using("torch" if form == "inductor" else "native"):
            return read_many(*args)

    return call_compiled


def textbook_norm(v: Tensor, eps: float = EPS) -> Tensor:
    return v / (v.square().mean(-1, keepdim=True) + eps).sqrt()


def textbook(
    sources: Sequence[Tensor], queries: Tensor, prior: tuple[Tensor, Tensor] | None, options: ReadOptions
) -> tuple[list[Tensor], list[Tensor]]:
    values, h, lse = list(sources), [], []
    for query in queries:
        logits = [((textbook_norm(v) if options.normalize else v) * query).sum(-1) for v in sources]
        if prior is not None:
            values, logits = [*sources, prior[0]], [*logits, prior[1]]
        weights = torch.softmax(torch.stack(logits), 0)
        h.append(sum(w[..., None] * v for w, v in zip(weights, values, strict=True)))
        lse.append(torch.logsumexp(torch.stack(logits), 0))
    return h, lse


def sample(norms: Sequence[float], queries: int, with_prior: bool) -> list[Tensor]:
    """Queries, the sources, and a prior with its log-sum-exp: leaves in float32."""
    found = [torch.randn(queries, DIM) / DIM**0.5]
    found += [norm * torch.nn.functional.normalize(torch.randn(TOKENS, DIM), dim=-1) for norm in norms]
    found += [norms[-1] * torch.randn(TOKENS, DIM) / DIM**0.5, torch.randn(TOKENS)] if with_prior else []
    return found


def values_and_gradients(call: Callable[..., Any], leaves: list[Tensor], with_prior: bool, options: ReadOptions) -> Any:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    queries, *sources = leaves
    prior = (sources[-2], sources[-1]) if with_prior else None
    h, lse = call(sources[:-2] if with_prior else sources, queries, prior, options)
    outputs = [*h, *lse]
    torch.manual_seed(1)
    directions = [torch.randn(out.shape).to(out.dtype) for out in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, directions)]


def gap(found: Tensor, truth: Tensor) -> float:
    """The largest difference, relative to the largest entry; infinite where something is not finite."""
    if not found.isfinite().all():
        return float("inf")
    return float((found.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-38))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("queries", "with_prior"), [(1, False), (1, True), (2, False), (3, False)])
def test_reads_and_their_gradients_are_right_for_sources_of_any_norm(
    queries: int, with_prior: bool, normalize: bool, form: str
) -> None:
    call, options = attend_by(form), ReadOptions(normalize, EPS)
    for norms in SIZES:
        leaves = sample(norms, queries, with_prior)
        found = values_and_gradients(call, leaves, with_prior, options)
        truth = values_and_gradients(textbook, [t.double() for t in leaves], with_prior, options)
        for i, (a, b) in enumerate(zip(found, truth, strict=True)):
            assert a.dtype == torch.float32
            assert gap(a, b) <= TOLERANCE, (norms, i)


@pytest.mark.parametrize("form", FORMS[:4])
def test_reads_in_float64_are_right_beyond_its_squares_too(form: str) -> None:
    """All sources times a power of two: so are the mixture and the query's gradient; their own stay."""
    query, *sources = [leaf.double() for leaf in sample((1.0, 2.0, 3.0), 1, False)]

    def scaled_results(size: float) -> list[Tensor]:
        leaves = [leaf.detach().requires_grad_() for leaf in (query, *(size * v for v in sources))]
        (h,), _ = attend_by(form)(leaves[1:], leaves[0], None, ReadOptions(eps=1e-30))
        of_query, *rest = torch.autograd.grad((h * torch.arange(DIM)).sum(), leaves)
        return [h / size, of_query / size, *rest]

    truth = scaled_results(1.0)
    for size in (2.0**300, 2.0**520, 2.0**1000):
        for a, b in zip(scaled_results(size), truth, strict=True):
            assert gap(a, b) <= 1e-13, size


NORMED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "rms_norm": (
        lambda x, w: ops.rms_norm(x, EPS) * w[0],
        lambda x, w: textbook_norm(x) * w[0],
    ),
    "key_of and scores": (
        lambda x, w: ops.scores([ops.key_of(x, w[0], True, EPS)], w[1].view(3, -1)),
        lambda x, w: (textbook_norm(x) * w[0] * w[1]).unflatten(-1, (3, -1)).sum(-1, keepdim=True),
    ),
    "normed_scores": (
        lambda x, w: ops.normed_scores([x], (w[0] * w[1]).view(3, -1), True, EPS),
        lambda x, w: (textbook_norm(x) * w[0] * w[1]).unflatten(-1, (3, -1)).sum(-1, keepdim=True),
    ),
    "normed_linear": (
        lambda x, w: ops.normed_linear(x, w, eps=EPS),
        lambda x, w: textbook_norm(x) @ w.T,
    ),
    "head_products": (
        lambda x, w: ops.head_products(x, w[0], DIM // 3, eps=EPS),
        lambda x, w: (textbook_norm(x).square() * w[0]).unflatten(-1, (3, -1)).sum(-1),
    ),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", NORMED)
def test_norms_and_their_gradients_are_right_for_vectors_of_any_norm(name: str, backend: Any) -> None:
    ours, plain = NORMED[name]
    for norms in [*[(norm,) * TOKENS for norm in NORMS], (1e-30, 1.0, 1e20, 1e25, 1e30)]:
        x = torch.tensor(norms)[:, None] * torch.nn.functional.normalize(torch.randn(TOKENS, DIM), dim=-1)
        results = []
        for dtype, call in ((torch.float32, ours), (torch.float64, plain)):
            torch.manual_seed(1)
            leaves = [x.to(dtype).requires_grad_(), torch.randn(2, DIM).to(dtype).requires_grad_()]
            with ops.using(backend):
                out = call(*leaves)
                results.append([out, *torch.autograd.grad(out, leaves, torch.randn(out.shape).to(dtype))])
        (out, of_x, of_w), (truth, truth_of_x, truth_of_w) = results
        assert gap(out, truth) <= TOLERANCE, norms
        assert gap(of_w, truth_of_w) <= TOLERANCE, norms
        for token in range(TOKENS):
            assert gap(of_x[token], truth_of_x[token]) <= TOLERANCE, norms


def resized(sublayers: Sequence[Callable[[Tensor], Tensor]], size: float) -> list[Callable[[Tensor], Tensor]]:
    """The same functions for streams that are `size` times as long."""
    return [lambda h, f=f: (size * f((h / size).double())).to(h.dtype) for f in sublayers]


def stack_results(name: str, options: Any, dtype: torch.dtype, size: float, key_size: float = 1.0) -> list[Tensor]:
    """The output of a small stack with parameters off their start, and the gradients of all that it takes."""
    probe = make_probe(name, options, depth=5, spread=0.1)
    stack = probe.stack.to(dtype)
    with torch.no_grad():
        for parameter_name, parameter in stack.named_parameters():
            parameter *= key_size if "key_proj" in parameter_name else 1
    x = (size * probe.x).to(dtype).requires_grad_()
    out = stack(x, resized(probe.sublayers, size))
    return [out, *torch.autograd.grad(out, [x, *stack.parameters()], torch.ones_like(out) / size)]


@pytest.mark.parametrize("name", dm.list_mechanisms())
def test_stacks_and_their_gradients_are_right_in_float32_for_streams_of_norm_1e25(name: str) -> None:
    for options in dm.mechanism(name).variants:
        found, truth = (stack_results(name, options, dtype, 2.0**83) for dtype in (torch.float32, torch.float64))
        for i, (a, b) in enumerate(zip(found, truth, strict=True)):
            assert gap(a, b) <= 1e-3, (options, i)


def test_keys_of_linear_attention_have_length_one_whatever_their_projection() -> None:
    options = {"rule": "delta", "feature_map": "identity", "normalize": False}
    found, truth = (
        stack_results("linear_attention", options, dtype, 1.0, key_size=2.0**70)
        for dtype in (torch.float32, torch.float64)
    )
    for a, b in zip(found, truth, strict=True):
        assert gap(a, b) <= 1e-3


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_gains_of_a_trace_are_right_for_an_embedding_of_any_size(size: float) -> None:
    probe = make_probe("ddl", {"value_width": 3}, depth=4)
    sublayers = resized(probe.sublayers, max(size, 1.0))
    x = (size * probe.x).float()
    truth = dm.trace(probe.stack, x.double(), sublayers).M
    found = dm.trace(probe.stack.float(), x, sublayers).M
    assert gap(found, truth) <= TOLERANCE
    assert (truth[..., 0] != 0).all()
