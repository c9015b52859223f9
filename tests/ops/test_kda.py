"""Kimi Delta Attention: both forms are the recurrence, with all gradients; documents, padding, states and precision.

Axes: B batch, H head, T token, K channel of a key, V channel of a value, P = H·K = H·V.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from depthmix import ops
from depthmix.ops.kda import saved_bytes
from depthmix.ops.kda.blocks import inverse
from depthmix.ops.kda.operator import forward_op
from depthmix.ops.kda.pairs import pair_gradients, pair_products, safe_block
from tests.reference import kda as reference

NAMES = ("q", "k", "v", "g", "beta", "state")


def sample(
    B: int = 2, H: int = 2, T: int = 70, K: int = 8, V: int = 8, strength: float = 1.0, dtype: Any = torch.float64
) -> list[Tensor]:
    """Inputs and a state as at the start of training: rates 1 to 16, steps 0.001 to 0.1; decays times `strength`."""
    rate = 1 + 15 * torch.rand(H, 1, 1, dtype=torch.float64)
    step = torch.exp(torch.rand(B, H, T, K, dtype=torch.float64) * math.log(100) + math.log(1e-3))
    q, k = (ops.unit_vectors(torch.randn(B, H, T, K, dtype=torch.float64)) for _ in range(2))
    v, state = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, H, T, V), (B, H, K, V)))
    beta = torch.sigmoid(torch.randn(B, H, T, dtype=torch.float64))
    return [x.to(dtype).requires_grad_() for x in (q, k, v, -strength * rate * step, beta, state)]


def kda(*inputs: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return ops.kda(*inputs[:5], state=inputs[5], documents=documents)


def chunked(*inputs: Tensor, documents: Tensor | None = None, size: int = 64) -> tuple[Tensor, Tensor]:
    o, last, *_ = forward_op(*inputs, documents, size)
    return o, last


def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that weighs each entry of o and of the state differently."""
    return sum((x.double() * weights(x)).sum() for x in outputs)  # type: ignore[return-value]


def weights(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1.5, x.numel(), dtype=torch.float64).sin().view(x.shape)


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b.double()).detach().abs().max()) if a.numel() else 0.0


def assert_same(ours: Any, theirs: Any, inputs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert gap(a, b) <= 1e-12
    ours, theirs = torch.autograd.grad(loss(ours), inputs), torch.autograd.grad(loss(theirs), inputs, retain_graph=True)
    for name, a, b in zip(NAMES, ours, theirs, strict=False):
        assert gap(a, b) <= 1e-11, name


class Seen(TorchDispatchMode):
    """The operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def operators(tokens: int) -> set[str]:
    inputs = sample(1, 1, tokens, 4, 4)
    with Seen() as seen:
        loss(kda(*inputs)).backward()
    return {name for name in seen.names if "depthmix" in name}


# The two forms.


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_the_chunkwise_form_is_the_recurrence_with_all_six_gradients(tokens: int) -> None:
    inputs = sample(1, 2, tokens, 8, 8)
    assert_same(chunked(*inputs), reference.recurrence(*inputs), inputs)


@pytest.mark.parametrize(("K", "V"), [(15, 15), (33, 33), (64, 64), (15, 33), (33, 1), (1, 4)])
def test_heads_may_have_any_width(K: int, V: int) -> None:
    inputs = sample(1, 2, 70, K, V)
    assert_same(kda(*inputs), reference.recurrence(*inputs), inputs)


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_few_tokens_are_the_recurrence_with_all_six_gradients(tokens: int) -> None:
    inputs = sample(2, 3, tokens, 5, 7)
    assert_same(kda(*inputs), reference.recurrence(*inputs), inputs)


def test_the_chunkwise_form_is_really_taken_beyond_16_tokens() -> None:
    assert operators(16) == set()
    assert operators(17) == {"depthmix.kda.default", "depthmix.kda_backward.default"}
    with ops.using("reference"):
        assert operators(100) == set()


@settings(max_examples=15, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 80), st.integers(1, 9), st.integers(1, 9)),
    size=st.sampled_from([1, 2, 16, 32, 64]),
    strength=st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
)
def test_any_shape_chunk_and_decay_gives_the_recurrence(shape: Any, size: int, strength: float) -> None:
    inputs = sample(*shape, strength=strength)
    with ops.using("reference"):
        theirs = kda(*inputs)
    assert_same(chunked(*inputs, size=size), theirs, inputs)


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 300), st.integers(1, 70), st.integers(1, 70)),
    strength=st.floats(0, 1e4),
    ends=st.lists(st.integers(0, 300), max_size=6),
)
def test_any_shape_decay_and_documents_give_the_recurrence(shape: Any, strength: float, ends: list[int]) -> None:
    inputs = sample(*shape, strength=strength)
    T = shape[2]
    documents = sum(((torch.arange(T) >= end).long() for end in ends), torch.zeros(T, dtype=torch.long))
    documents = documents.expand(shape[0], -1)
    with ops.using("reference"):
        theirs = kda(*inputs, documents=documents)
    assert_same(chunked(*inputs, documents=documents), theirs, inputs)


def test_inputs_of_any_strides_give_the_same() -> None:
    inputs = sample(2, 3, 70, 8, 8)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x for x in inputs]
    assert not strided[0].is_contiguous()
    assert_same(kda(*strided), kda(*inputs), inputs)


@pytest.mark.parametrize(("B", "H"), [(0, 2), (2, 0)])
def test_an_empty_batch_gives_an_empty_result(B: int, H: int) -> None:
    inputs = sample(B, H, 70, 4, 6)
    o, last = kda(*inputs)
    assert (o.shape, last.shape) == ((B, H, 70, 6), (B, H, 4, 6))
    assert [g.shape for g in torch.autograd.grad(o.sum() + last.sum(), inputs)] == [x.shape for x in inputs]


# Strong decay.


@pytest.mark.parametrize(
    ("strength", "dtype", "block"),
    [
        (1.0, torch.float32, 64),
        (4.0, torch.float32, 32),
        (30.0, torch.float32, 4),
        (1e4, torch.float32, 1),
        (30.0, torch.float64, 16),
        (math.nan, torch.float32, 1),
    ],
)
def test_the_stronger_the_decay_the_smaller_the_blocks(strength: float, dtype: torch.dtype, block: int) -> None:
    G = torch.full((3, 64, 5), -strength, dtype=dtype).cumsum(1)
    assert safe_block(G) == block


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32])
def test_every_division_of_a_chunk_gives_all_pairs(block: int, rows: int) -> None:
    x, y = torch.randn(3, rows, 32, 5, dtype=torch.float64), torch.randn(3, 32, 5, dtype=torch.float64)
    G = -torch.rand(3, 32, 5, dtype=torch.float64).cumsum(1)
    x, y = x.requires_grad_(), y.requires_grad_()
    decay = (G.unsqueeze(2) - G.unsqueeze(1)).exp2()  # [M, t, i, K]
    plain = torch.einsum("mrtk,mik,mtik->mrti", x, y, decay).tril()
    upstream = torch.randn_like(plain).tril()
    assert gap(pair_products(x.detach(), y.detach(), G, block), plain) <= 1e-12
    ours = pair_gradients(upstream, x.detach(), y.detach(), G, block)
    for a, b in zip(ours, torch.autograd.grad(plain, (x, y), upstream), strict=True):
        assert gap(a, b) <= 1e-12


@pytest.mark.parametrize("size", [1, 2, 4, 16, 64])
def test_the_inverse_by_doubling_is_the_inverse(size: int) -> None:
    lower = torch.randn(5, size, size, dtype=torch.float64).tril(-1) / size**0.5
    whole = inverse(lower) @ (torch.eye(size, dtype=torch.float64) + lower)
    assert gap(whole, torch.eye(size, dtype=torch.float64).expand(5, -1, -1)) <= 1e-10


# Largest error in float32 of o, the state and all gradients, by how strong the decay is.
@pytest.mark.parametrize(
    ("strength", "outputs", "gradients"), [(0, 5e-6, 5e-5), (1, 3e-6, 2e-5), (20, 3e-6, 2e-5), (100, 1e-5, 5e-5)]
)
def test_float32_is_accurate_however_strong_the_decay(strength: float, outputs: float, gradients: float) -> None:
    exact = sample(1, 2, 200, 32, 32, strength)
    if strength >= 20:
        assert not torch.exp(-exact[3].float().cumsum(2)[:, :, :64]).isfinite().all()  # e^{−G} would overflow
    inputs = [x.detach().float().requires_grad_() for x in exact]
    (o, last), truth = kda(*inputs), kda(*exact)
    assert max(gap(o, truth[0]), gap(last, truth[1])) <= outputs
    for a, b in zip(
        *(torch.autograd.grad(loss(out), x) for out, x in (((o, last), inputs), (truth, exact))), strict=True
    ):
        assert a.isfinite().all()
        assert gap(a, b) <= gradients


def test_one_channel_that_forgets_at_once_does_not_disturb_the_others() -> None:
    inputs = [x.detach() for x in sample(1, 2, 130, 8, 8)]
    inputs[3][..., 3] = -1e4
    with ops.using("reference"):
        theirs = kda(*inputs)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        for a, b in zip(kda(*(x.to(dtype) for x in inputs)), theirs, strict=True):
            assert gap(a, b) <= bound


# States, documents, padding.


@pytest.mark.parametrize("cuts", [(70,), (64, 64), (1, 1, 100), (20, 5, 90)], ids=str)
def test_pieces_that_hand_on_the_state_are_the_whole(cuts: tuple[int, ...]) -> None:
    inputs = sample(2, 2, 150, 8, 8)
    state, pieces, start = inputs[5], [], 0
    for length in (*cuts, 150 - sum(cuts)):
        o, state = kda(*(x[:, :, start : start + length] for x in inputs[:5]), state)
        pieces.append(o)
        start += length
    assert_same((torch.cat(pieces, 2), state), kda(*inputs), inputs)


@pytest.mark.parametrize("lengths", [[3, 61, 64, 1, 40, 31], [64, 64, 72], [150, 50]], ids=str)
def test_packed_documents_are_each_document_alone(lengths: list[int]) -> None:
    inputs = sample(2, 1, 200, 8, 8)
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    theirs = reference.documents_alone(*inputs[:5], lengths, inputs[5])
    assert_same(kda(*inputs, documents=documents), theirs, inputs)
    with ops.using("reference"):
        assert_same(kda(*inputs, documents=documents), theirs, inputs)


@pytest.mark.parametrize("tokens", [10, 100])
def test_a_document_number_that_returns_is_a_new_document(tokens: int) -> None:
    inputs = sample(1, 2, tokens, 4, 4)
    third = tokens // 3
    lengths = [third, third, tokens - 2 * third]
    documents = torch.tensor([7, 2, 7]).repeat_interleave(torch.tensor(lengths))[None]
    theirs = reference.documents_alone(*inputs[:5], lengths, inputs[5])
    assert_same(kda(*inputs, documents=documents), theirs, inputs)


def test_tokens_with_beta_and_decay_of_zero_leave_the_state_alone() -> None:
    inputs = [x.detach() for x in sample(2, 2, 100, 8, 8)]
    inputs[3][:, :, 30:], inputs[4][:, :, 30:] = 0, 0
    for a, b in zip(kda(*inputs), kda(*(x[:, :, :30] for x in inputs[:5]), inputs[5]), strict=True):
        assert gap(a[:, :, :30], b) <= 1e-14


SIDES = {
    "left": torch.tensor([[0] * 5 + [1] * 25, [0] * 2 + [1] * 28]),
    "right": torch.tensor([[1] * 25 + [0] * 5, [1] * 30]),
    "within": torch.tensor([[1] * 9 + [0] * 4 + [1] * 17, ([1] * 4 + [0]) * 6]),
    "both": torch.tensor([[0] * 3 + [1] * 20 + [0] * 7, [0] * 30]),
}


def parameters(D: int = 6, H: int = 2, d: int = 4, W: int = 4) -> reference.Params:
    P = H * d
    shapes = {f"{name}_proj.weight": (P, D) for name in "qkv"} | {f"{name}_conv": (P, W) for name in "qkv"}
    shapes |= {
        "f_a_proj.weight": (d, D),
        "f_b_proj.weight": (P, d),
        "g_a_proj.weight": (d, D),
        "g_b_proj.weight": (P, d),
        "dt_bias": (P,),
    }
    shapes |= {"b_proj.weight": (H, D), "A_log": (H,), "o_norm.weight": (d,), "o_proj.weight": (D, P)}
    return {name: torch.randn(shape, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()}


def sublayer(
    x: Tensor,
    p: reference.Params,
    heads: int,
    *,
    bound: float | None = None,
    documents: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """The sublayer of these operations."""
    if valid is not None:
        order = ops.ValidFirst.of(valid)
        documents = None if documents is None else order.sort_documents(documents)
        y = from_sorted(order.sort(x), p, heads, bound, documents, order.lengths, order.valid)
        return order.restore(y) * valid.unsqueeze(-1)
    return from_sorted(x, p, heads, bound, documents, None, torch.ones(x.shape[:2]))


def from_sorted(x: Tensor, p: Any, heads: int, bound: Any, documents: Any, lengths: Any, valid: Tensor) -> Tensor:
    def in_heads(z: Tensor) -> Tensor:
        return z.unflatten(-1, (heads, -1))

    def project(name: str, z: Tensor = x) -> Tensor:
        return z @ p[f"{name}.weight"].T

    mixed = [
        ops.causal_conv(project(f"{n}_proj"), p[f"{n}_conv"], documents=documents, lengths=lengths)[0] for n in "qkv"
    ]
    q, k, v = (in_heads(z).transpose(1, 2) for z in mixed)
    f = in_heads(project("f_b_proj", project("f_a_proj")) + p["dt_bias"])
    g = (ops.log_decay(f, p["A_log"], bound) * valid[..., None, None]).transpose(1, 2)
    beta = (torch.sigmoid(project("b_proj")) * valid.unsqueeze(-1)).transpose(1, 2)
    o, _ = ops.kda(ops.unit_vectors(q), ops.unit_vectors(k), v, g, beta, documents=documents)
    o = (
        ops.rms_norm(o, 1e-5)
        * p["o_norm.weight"]
        * torch.sigmoid(in_heads(project("g_b_proj", project("g_a_proj"))).transpose(1, 2))
    )
    return project("o_proj", o.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("side", [None, *SIDES])
def test_padding_on_any_side_is_as_if_it_were_not_there(side: str | None, bound: float | None) -> None:
    """The whole sublayer against its equations, with gradients of every parameter."""
    x, p = torch.randn(2, 30, 6, dtype=torch.float64, requires_grad=True), parameters()
    valid = None if side is None else SIDES[side].bool()
    ours = sublayer(x, p, 2, bound=bound, valid=valid)
    theirs = reference.sublayer(x, p, heads=2, bound=bound, valid=valid)
    assert gap(ours, theirs) <= 1e-12
    for a, b in zip(*(torch.autograd.grad(loss((y, y)), [x, *p.values()]) for y in (ours, theirs)), strict=True):
        assert gap(a, b) <= 1e-11


@pytest.mark.parametrize("side", [None, "left", "within"])
def test_packed_documents_with_padding_are_each_document_alone(side: str | None) -> None:
    x, p = torch.randn(2, 30, 6, dtype=torch.float64), parameters()
    documents = torch.tensor([[0] * 11 + [1] * 19, [3] * 2 + [4] * 14 + [9] * 14])
    valid = None if side is None else SIDES[side].bool()
    ours = sublayer(x, p, 2, documents=documents, valid=valid)
    assert gap(ours, reference.sublayer(x, p, heads=2, documents=documents, valid=valid)) <= 1e-12


# Autograd, compilers, precision, memory.


@pytest.mark.parametrize("tokens", [5, 70])
@pytest.mark.parametrize("name", NAMES)
def test_an_input_alone_gets_the_gradient_that_it_gets_among_all(name: str, tokens: int) -> None:
    inputs, at = sample(1, 2, tokens, 4, 6), NAMES.index(name)
    want = torch.autograd.grad(loss(kda(*inputs)), inputs)[at]
    alone = [x if i == at else x.detach() for i, x in enumerate(inputs)]
    assert torch.equal(torch.autograd.grad(loss(kda(*alone)), alone[at])[0], want)


@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_of_the_outputs_or_of_the_state_alone_has_its_gradients(which: int) -> None:
    inputs = sample(1, 2, 70, 4, 6)
    ours = kda(*inputs)[which]
    theirs = reference.recurrence(*inputs)[which]
    for a, b in zip(
        *(torch.autograd.grad((x * weights(x)).sum(), inputs, materialize_grads=True) for x in (ours, theirs)),
        strict=True,
    ):
        assert gap(a, b) <= 1e-11


def test_without_a_state_it_starts_from_zeros() -> None:
    *inputs, state = sample(1, 2, 70, 4, 6)
    assert_same(ops.kda(*inputs), kda(*inputs, torch.zeros_like(state)), inputs)


@pytest.mark.parametrize("tokens", [pytest.param(3, marks=pytest.mark.full), 70])
def test_a_compiled_call_is_the_eager_one(tokens: int) -> None:
    inputs = sample(1, 2, tokens, 4, 6)
    documents = (torch.arange(tokens) > 1).long()[None]
    compiled = torch.compile(lambda *x: kda(*x, documents=documents), fullgraph=True, backend="aot_eager")
    assert_same(compiled(*inputs), kda(*inputs, documents=documents), inputs)


def test_a_compiled_graph_does_not_grow_with_the_number_of_tokens() -> None:
    sizes = []

    def count(graph: Any, _: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return graph

    for tokens in (100, 4096):
        torch.compiler.reset()
        torch.compile(kda, fullgraph=True, backend=count, dynamic=False)(
            *(x.detach() for x in sample(1, 1, tokens, 4, 4))
        )
    assert sizes[0] == sizes[1] < 30


@pytest.mark.full
@pytest.mark.inductor
@pytest.mark.parametrize("dynamic", [False, True])
def test_code_compiled_by_inductor_is_the_eager_one(dynamic: bool) -> None:
    compiled = torch.compile(kda, fullgraph=True, dynamic=dynamic)
    for tokens in (70, 130):
        inputs = sample(1, 2, tokens, 4, 6)
        assert_same(compiled(*inputs), kda(*inputs), inputs)


def test_it_is_a_sound_operator() -> None:
    inputs = sample(1, 2, 70, 4, 6)
    torch.library.opcheck(forward_op, (*inputs, None, 32))
    documents = (torch.arange(70) > 20).long()[None]
    torch.library.opcheck(forward_op, (*inputs[:5], None, documents, 64))


def test_it_has_shapes_and_gradients_on_the_meta_device() -> None:
    inputs = [x.detach().to("meta").requires_grad_() for x in sample(1, 2, 70, 4, 6)]
    o, last = kda(*inputs)
    assert (o.shape, last.shape) == ((1, 2, 70, 6), (1, 2, 4, 6))
    assert [g.shape for g in torch.autograd.grad(o.sum() + last.sum(), inputs)] == [x.shape for x in inputs]


def test_checkpointing_gives_the_same_gradients() -> None:
    inputs = sample(1, 2, 70, 4, 6)
    theirs = torch.autograd.grad(loss(kda(*inputs)), inputs)
    ours = torch.autograd.grad(loss(checkpoint(kda, *inputs, use_reentrant=False)), inputs)
    assert all(map(torch.equal, ours, theirs))


def test_double_backward_is_refused_and_the_recurrence_supports_it() -> None:
    inputs = sample(1, 1, 20, 3, 3)
    (first,) = torch.autograd.grad(loss(kda(*inputs)), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(first.square().sum(), inputs[1])
    with ops.using("reference"):
        assert torch.autograd.gradgradcheck(
            lambda *x: kda(*x), [x[:, :, :3] if i < 5 else x for i, x in enumerate(inputs)]
        )


@pytest.mark.parametrize("tokens", [5, 100])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_narrow_inputs_are_computed_in_float32_and_rounded_once(tokens: int, dtype: torch.dtype, bound: float) -> None:
    narrow = [x.detach().to(dtype).requires_grad_() for x in sample(1, 2, tokens, 16, 16)]
    exact = [x.detach().double().requires_grad_() for x in narrow]
    (o, last), truth = kda(*narrow), kda(*exact)
    assert (o.dtype, last.dtype) == (dtype, torch.float32)
    assert gap(o, truth[0]) <= bound * float(truth[0].detach().abs().max())
    assert gap(last, truth[1]) <= 1e-5
    for a, b in zip(
        *(
            torch.autograd.grad(out[1].double().square().sum(), x[1:])
            for out, x in (((o, last), narrow), (truth, exact))
        ),
        strict=True,
    ):
        assert a.dtype == dtype
        assert gap(a, b) <= bound * float(b.abs().max().clamp(min=1))


@pytest.mark.parametrize("tokens", [5, 100])
def test_autocast_does_not_narrow_anything_inside(tokens: int) -> None:
    inputs = [x.detach() for x in sample(1, 2, tokens, 16, 16, dtype=torch.float32)]
    want = kda(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, kda(*inputs), want))


@pytest.mark.parametrize(("K", "V"), [(64, 64), (16, 32)])
def test_the_bytes_saved_for_backward_are_the_inputs_and_what_the_formula_says(K: int, V: int) -> None:
    B, H, T = 2, 3, 640
    inputs = sample(B, H, T, K, V, dtype=torch.float32)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kda(*inputs)
    given = {x.data_ptr() for x in inputs}
    assert given - set(kept) == {inputs[3].data_ptr(), inputs[5].data_ptr()}  # G is saved instead of g
    own = sum(size for pointer, size in kept.items() if pointer not in given)
    end = 4 * B * H * K * V  # the state after the last chunk
    assert own == B * H * T * saved_bytes(K, V) + end


# What precedes the recurrence.


def test_the_eps_of_unit_vectors_joins_the_sum() -> None:
    x = torch.tensor([3e-4, 4e-4], dtype=torch.float64)
    assert torch.allclose(ops.unit_vectors(x), x / math.sqrt(25e-8 + 1e-6), rtol=1e-14)
    assert ops.unit_vectors(torch.zeros(3, 5)).equal(torch.zeros(3, 5))
    assert ops.unit_vectors(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("bound", [None, -5.0])
def test_the_log_decay_has_finite_gradients_where_softplus_by_hand_overflows(bound: float | None) -> None:
    f = torch.tensor([-300.0, 0.0, 30.0, 300.0]).expand(2, 1, 4).clone().requires_grad_()
    a_log = torch.tensor([2.0], requires_grad=True)
    g = ops.log_decay(f, a_log, bound)
    assert ((g <= 0) & (g >= (bound or -math.inf))).all()
    for gradient in torch.autograd.grad(g.sum(), (f, a_log)):
        assert gradient.isfinite().all()
    for i, x in enumerate((-300.0, 0.0, 30.0, 300.0)):
        want = reference.log_decay(torch.tensor([x]), a_log[0], bound)
        assert torch.allclose(g[0, 0, i], want[0], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_convolution_in_pieces_is_the_whole(width: int) -> None:
    x, weight = torch.randn(2, 20, 3, dtype=torch.float64), torch.randn(3, width, dtype=torch.float64)
    history = torch.randn(2, width - 1, 3, dtype=torch.float64)
    want = torch.stack([reference.convolution(z, weight, past) for z, past in zip(x, history, strict=True)])
    pieces, start = [], 0
    for length in (1, 2, 9, 8):
        y, history = ops.causal_conv(x[:, start : start + length], weight, history)
        pieces.append(y)
        start += length
    assert gap(torch.cat(pieces, 1), want) <= 1e-14
    assert torch.equal(history, x[:, 20 - width + 1 :])


def test_the_history_of_a_convolution_holds_valid_inputs_of_the_last_document() -> None:
    x, weight = torch.arange(1.0, 11).view(1, 10, 1), torch.ones(1, 4)
    past = torch.tensor([[[-3.0], [-2.0], [-1.0]]])
    documents = torch.tensor([[0, 0, 0, 0, 5, 5, 5, 8, 8, 8]])
    for length, with_documents, want in (
        (10, False, [8, 9, 10]),
        (2, False, [-1, 1, 2]),
        (0, False, [-3, -2, -1]),
        (10, True, [8, 9, 10]),
        (8, True, [0, 0, 8]),
        (6, True, [0, 5, 6]),
        (2, True, [-1, 1, 2]),
    ):
        _, history = ops.causal_conv(
            x, weight, past, documents=documents if with_documents else None, lengths=torch.tensor([length])
        )
        assert history.flatten().tolist() == want, (length, with_documents)


def test_valid_tokens_come_first_in_their_order_and_return() -> None:
    valid = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    order, x = ops.ValidFirst.of(valid), torch.arange(30).view(3, 5, 2)
    assert order.lengths.tolist() == [3, 5, 0]
    assert order.sort(x)[0, :3, 0].tolist() == [2, 4, 8]
    assert torch.equal(order.restore(order.sort(x)), x)
    assert order.sort_documents(torch.tensor([[9, 1, 1, 9, 2]] * 3)).tolist() == [
        [1, 1, 2, 2, 2],
        [9, 1, 1, 9, 2],
        [9] * 5,
    ]


# Errors.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(2, 5, 3)}, r"q has shape \[2, 5, 3\]; expected \[B, H, T, K\]"),
        ({"q": torch.zeros(1, 2, 0, 3)}, r"q has shape \[1, 2, 0, 3\]; expected .* at least one token"),
        ({"k": torch.zeros(1, 2, 5, 4)}, r"k has shape \[1, 2, 5, 4\]; expected \[1, 2, 5, 3\]"),
        ({"v": torch.zeros(1, 2, 4, 6)}, r"v has shape \[1, 2, 4, 6\]; expected \[1, 2, 5, 6\]"),
        ({"v": torch.zeros(1, 2, 5)}, r"v has shape \[1, 2, 5\]; expected \[1, 2, 5, 'V'\]"),
        ({"g": torch.zeros(1, 2, 5)}, r"g has shape \[1, 2, 5\]; expected \[1, 2, 5, 3\]"),
        ({"beta": torch.zeros(1, 2, 5, 1)}, r"beta has shape \[1, 2, 5, 1\]; expected \[1, 2, 5\]"),
        ({"state": torch.zeros(1, 2, 6, 3)}, r"state has shape \[1, 2, 6, 3\]; expected .* \[1, 2, 3, 6\]"),
        ({"documents": torch.zeros(1, 4).long()}, r"documents is torch.int64 of shape \[1, 4\]; expected .* \[1, 5\]"),
        ({"documents": torch.zeros(1, 5)}, r"documents is torch.float32 .* expected integers"),
        ({"beta": torch.zeros(1, 2, 5, device="meta")}, "beta is on meta; expected cpu"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Tensor], words: str) -> None:
    shapes = {"q": (1, 2, 5, 3), "k": (1, 2, 5, 3), "v": (1, 2, 5, 6), "g": (1, 2, 5, 3), "beta": (1, 2, 5)}
    with pytest.raises(ValueError, match=words):
        ops.kda(**{name: torch.zeros(shape) for name, shape in shapes.items()} | change)


def test_integers_are_refused() -> None:
    inputs = [x.detach() for x in sample(1, 1, 5, 3, 3)]
    with pytest.raises(TypeError, match=r"k has dtype torch.int64; expected a floating-point dtype"):
        kda(inputs[0], inputs[1].long(), *inputs[2:])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.log_decay(torch.zeros(3, 4), torch.zeros(2)), r"f has shape \[3, 4\], a_log \[2\]"),
        (lambda: ops.log_decay(torch.zeros(3, 4), torch.zeros(3), 5.0), "bound=5.0; expected a number below 0"),
        (lambda: ops.causal_conv(torch.zeros(1, 5, 3), torch.zeros(4, 3)), r"x has shape \[1, 5, 3\], weight \[4, 3\]"),
        (
            lambda: ops.causal_conv(torch.zeros(1, 5, 3), torch.zeros(3, 4), torch.zeros(1, 4, 3)),
            r"history has shape \[1, 4, 3\]; expected .* \[1, 3, 3\]",
        ),
        (
            lambda: ops.causal_conv(torch.zeros(1, 5, 3), torch.zeros(3, 4), lengths=torch.ones(2).long()),
            r"lengths is torch.int64 of shape \[2\]; expected integers \[1\]",
        ),
    ],
)
def test_wrong_arguments_of_what_precedes_are_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
