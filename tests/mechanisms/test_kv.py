"""Values mixed over depth: the mechanisms inside attention, against plain loops.

Axes: N executions of attention, B batch, T token, Q query head, K key-value head, d channel of a head.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import depthmix as dm
from depthmix.mechanisms import Site, kv_mechanism
from depthmix.models import count_parameters, preset
from depthmix.models.attention import rotate
from depthmix.models.context import rotation
from tests.cases import label
from tests.reference import depth_attention as reference_depth_attention
from tests.reference import value_residual as reference_value_residual

KV = [(name, dict(o)) for name in dm.list_mechanisms(kind="kv") for o in kv_mechanism(name).variants]
EVERY_KV = pytest.mark.parametrize(("name", "options"), [pytest.param(*case, id=label(*case)) for case in KV])
EACH_KV = pytest.mark.parametrize("name", dm.list_mechanisms(kind="kv"))
LOOPED = (0, 1, 2, 1, 2, 1, 2, 3)
PLAIN = (0, 1, 2, 3, 4, 5)
ORDERS = pytest.mark.parametrize("order", [PLAIN, LOOPED, (0,)], ids=["plain", "looped", "one layer"])


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    assert a.shape == b.shape
    if b.numel():
        error = (a - b).abs().max()
        assert error <= tolerance * b.abs().max().clamp(min=1), f"differs by {error:.1e}"


def make_mixers(name: str, options: dict[str, Any], d: int, order: tuple[int, ...]) -> dm.KVStack:
    """In double precision, with parameters that no start has."""
    mixers = dm.KVStack(name, head_dim=d, order=order, **options).double()
    for p in mixers.parameters():
        torch.nn.init.normal_(p)
    return mixers


def make_heads(shape: tuple[int, ...], n: int, **to: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Queries [B, g K, T, d], keys and values [B, K, T, d] of n layers; shape is (B, K, g, T, d)."""
    B, K, g, T, d = shape
    draw = torch.Generator().manual_seed(7)
    made = ([torch.randn(B, h, T, d, generator=draw, dtype=torch.float64) for _ in range(n)] for h in (g * K, K, K))
    q, k, v = ([x.to(**to).requires_grad_() for x in part] for part in made)
    return q, k, v


def mix_all(mixers: Any, q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
    kv, out = mixers[0].begin(), []
    for i, mixer in enumerate(mixers):
        u, kv = mixer.mix(q[i], k[i], v[i], kv)
        out.append(u)
    return out


def named(mixers: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters as a decoder's state dict names them."""
    return {f"kv_mixers.{key}": p for key, p in mixers.named_parameters()}


def expected(name: str, options: dict[str, Any], mixers: Any, what: str, *heads: list[Tensor]) -> Any:
    reference = importlib.import_module(f"tests.reference.{name}")
    params = {"params": named(mixers)} if name == "value_residual" else {}
    given = {**options, "order": list(mixers[0].order), **params}
    return getattr(reference, what)(*heads, **given)


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(8)
    loss = sum((u * torch.randn(u.shape, generator=draw, dtype=u.dtype)).sum() for u in outputs)
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


@st.composite
def orders(draw: Any) -> tuple[int, ...]:
    layers = draw(st.integers(1, 4))
    first = draw(st.integers(0, layers - 1))
    last = draw(st.integers(first + 1, layers))
    loop = range(first, last)
    return (*range(first), *[*loop] * draw(st.integers(1, 3)), *range(last, layers))


RULE = {"rule": st.sampled_from(["softmax", "uniform"])}
WEIGHT = st.sampled_from([-1.5, 0.0, 0.25, 2.0])
FAMILIES: dict[str, Callable[[int], Any]] = {  # sets of options that go together, for n executions
    "strided": lambda n: st.fixed_dictionaries(
        {"grid": st.sampled_from(["absolute", "relative"]), "window": st.integers(0, n), **RULE},
        optional={"stride": st.integers(1, n + 1)},
    ),
    "listed": lambda n: st.fixed_dictionaries(
        {"sources": st.sets(st.integers(0, n - 1), min_size=1).map(list), "window": st.integers(0, 2), **RULE}
    ),
    "softmax of the default sources": lambda n: st.just({}),
    "same_layer": lambda n: st.fixed_dictionaries({"loop": st.just("same_layer")}, optional=RULE),
    "both": lambda n: st.fixed_dictionaries(
        {"loop": st.just("both"), "window": st.integers(0, 2), **RULE}, optional={"stride": st.integers(1, n + 1)}
    ),
    "value_residual": lambda n: st.fixed_dictionaries({"own": WEIGHT, "first": WEIGHT, "learned": st.booleans()}),
}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def draw_case(data: st.DataObject, family: str) -> tuple[str, dict[str, Any], tuple[int, ...]]:
    order = data.draw(orders(), "order")
    options = data.draw(FAMILIES[family](len(order)), "options")
    return "value_residual" if family == "value_residual" else "depth_attention", options, order


shapes = st.tuples(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from([3, 1, 0]), st.sampled_from([2, 3, 4])
)


@EVERY_FAMILY
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), shape=shapes)
def test_values_and_their_gradients_are_what_the_paper_says(
    family: str, data: st.DataObject, shape: tuple[int, ...]
) -> None:
    name, options, order = draw_case(data, family)
    q, k, v = make_heads(shape, len(order))
    mixers = make_mixers(name, options, shape[-1], order)
    leaves = [*q, *k, *v, *mixers.parameters()]
    ours, theirs = mix_all(mixers, q, k, v), expected(name, options, mixers, "mixed", q, k, v)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, 1e-12)
    for a, b in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
        close(a, b, 1e-11)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "value_residual"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_layer_reads_the_sources_that_the_page_names_and_keeps_no_other(family: str, data: st.DataObject) -> None:
    name, options, order = draw_case(data, family)
    n, rules = len(order), {key: o for key, o in options.items() if key != "rule"}
    reads = [reference_depth_attention.sources(i, n, order=list(order), **rules) for i in range(n)]
    config = kv_mechanism(name).Config(**options)
    assert [config.reads(i, order) for i in range(n)] == reads
    q, k, v = make_heads((1, 1, 1, 1, 2), n)
    kv, seen = (), []
    for i, mixer in enumerate(make_mixers(name, options, 2, order)):
        alive = [j for j in range(i) if any(j in reads[later] for later in range(i, n))]
        assert len(kv) == 2 * len(alive)
        for place, j in enumerate(alive):
            assert kv[2 * place] is k[j]
            assert kv[2 * place + 1] is seen[j]
        u, kv = mixer.mix(q[i], k[i], v[i], kv)
        seen.append(u)
    assert kv == ()


@EVERY_KV
@ORDERS
def test_gradients_reach_the_sources_of_a_single_mix(
    name: str, options: dict[str, Any], order: tuple[int, ...]
) -> None:
    """The state as leaves of its own, as a checkpointed segment or a pipeline stage has it."""
    n = len(order)
    q, k, v = make_heads((2, 2, 2, 3, 4), n)
    mixers = make_mixers(name, options, 4, order)
    kv: tuple[Tensor, ...] = ()
    for i, mixer in enumerate(mixers):
        kv = tuple(x.detach().requires_grad_() for x in kv)
        u, new = mixer.mix(q[i], k[i], v[i], kv)
        if name == "value_residual":
            starts = mixer.config.own, mixer.config.first, mixer.config.learned
            wanted = v[i]
            if i:
                wanted = reference_value_residual.mix(
                    v[i], kv[0], *reference_value_residual.weights(i, v[i], named(mixers), *starts)
                )
        else:
            places = [2 * mixer.config.alive(i, order).index(j) for j in mixer.config.reads(i, order)]
            sources = [kv[p] for p in places], [kv[p + 1] for p in places]
            wanted = reference_depth_attention.mix(q[i], k[i], v[i], *sources, mixer.config.rule)
        close(u, wanted, 1e-12)
        leaves = [q[i], k[i], v[i], *kv]
        for a, b in zip(gradients([u], leaves), gradients([wanted], leaves), strict=True):
            close(a, b, 1e-11)
        kv = new


@EVERY_KV
@ORDERS
def test_the_state_is_what_its_spec_says_at_every_site(
    name: str, options: dict[str, Any], order: tuple[int, ...]
) -> None:
    q, k, v = make_heads((2, 2, 1, 3, 4), len(order))
    mixers = make_mixers(name, options, 4, order)
    kv = mixers[0].begin()
    for i, mixer in enumerate(mixers):
        spec = mixers[0].spec(Site(i, len(order), 4, "attn"))  # any mixer tells the spec of any site
        assert [tuple(x.shape[3:]) for x in kv] == list(spec.shapes)
        assert all(x.shape[:3] == (2, 2, 3) for x in kv)
        assert spec.essential == spec.sealed == len(kv)
        before = kv
        u, kv = mixer.mix(q[i], k[i], v[i], before)
        assert all(any(x is y for y in (*before, k[i], v[i], u)) for x in kv)  # sealed: handed on, never changed


def test_the_state_shrinks_as_soon_as_nobody_reads_on() -> None:
    mixers = make_mixers("depth_attention", {"stride": 4, "grid": "relative"}, 4, PLAIN)
    sizes = [len(m.spec(m.site).shapes) for m in mixers]
    assert sizes == [0, 2, 4, 4, 4, 2]  # 0 and 1 are read by 4 and 5, and by nobody after


@EVERY_KV
def test_the_first_layer_is_untouched(name: str, options: dict[str, Any]) -> None:
    q, k, v = make_heads((2, 2, 2, 3, 4), len(PLAIN))
    assert mix_all(make_mixers(name, options, 4, PLAIN), q, k, v)[0] is v[0]


def test_layers_outside_a_loop_are_untouched_where_a_layer_reads_its_own_runs() -> None:
    q, k, v = make_heads((2, 2, 2, 3, 4), len(LOOPED))
    mixed = mix_all(make_mixers("depth_attention", {"loop": "same_layer"}, 4, LOOPED), q, k, v)
    assert [i for i in range(len(LOOPED)) if mixed[i] is not v[i]] == [3, 4, 5, 6]


def test_a_looped_layer_can_read_the_grid_and_its_own_runs() -> None:
    order = (*range(4), *range(4), *range(4))
    config = kv_mechanism("depth_attention").Config(loop="both", stride=4)
    assert config.reads(9, order) == [0, 1, 4, 5, 8]  # layer 1: executions 0, 4, 8 of the grid, its own runs 1 and 5
    assert config.reads(8, order) == [0, 4]  # of the grid and its own at once, counted once
    assert config.reads(3, order) == [0]
    plain = tuple(range(12))
    unrolled = kv_mechanism("depth_attention").Config(stride=4)
    assert [config.reads(i, plain) for i in plain] == [unrolled.reads(i, plain) for i in plain]


def nanbeige_reads(layers: int, repeats: int, stride: int) -> list[list[int]]:
    """What each execution reads where every execution of a layer on the grid joins one list that outlives the loops."""
    reads, anchors = [], []
    for execution in range(layers * repeats):
        reads.append(list(anchors))
        if execution % layers % stride == 0:
            anchors.append(execution)
    return reads


@pytest.mark.parametrize(
    ("stride", "options", "same"),
    [(3, {"stride": 3}, True), (4, {"stride": 4}, False), (4, {"sources": (0, 4, 6, 10)}, True)],
)
def test_looped_strides_count_executions_and_named_sources_give_nanbeiges(
    stride: int, options: dict[str, Any], same: bool
) -> None:
    config = kv_mechanism("depth_attention").Config(**options)
    order = (*range(6), *range(6))
    assert ([config.reads(i, order) for i in range(12)] == nanbeige_reads(6, 2, stride)) == same


def candidates(grid: str, *, only_where_mixed: bool) -> int:
    config = kv_mechanism("depth_attention").Config(stride=24, grid=grid)
    counts = [len(config.reads(i, tuple(range(48)))) for i in range(48)]
    return sum(count + 1 for count in counts if count or not only_where_mixed)


def test_the_absolute_grid_has_the_papers_117_candidates() -> None:
    assert candidates("absolute", only_where_mixed=True) == 117
    assert candidates("relative", only_where_mixed=True) == 48
    assert candidates("relative", only_where_mixed=False) == 72  # with the layers that read nothing but themselves


def test_the_3b_size_pays_four_thousandths_of_a_percent() -> None:
    config = preset("depth-attention-3b")
    assert config.kv_mixer is not None
    rules, order = kv_mechanism(config.kv_mixer.name).Config(**config.kv_mixer.options), config.layer_order
    counts = [len(rules.reads(i, order)) for i in range(len(order))]
    read = sum(count + 1 for count in counts if count)
    logits = mixing = 2 * config.num_kv_heads * config.width * read  # a product and a sum for each channel
    assert logits + mixing == 4 * 512 * 117
    assert f"{logits + mixing:.2e}" == "2.40e+05"
    assert f"{(logits + mixing) / (2 * count_parameters(config).total):.3%}" == "0.004%"


@pytest.mark.parametrize("options", [o for name, o in KV if name == "depth_attention"], ids=str)
def test_rope_leaves_the_weights_alone(options: dict[str, Any]) -> None:
    q, k, v = make_heads((2, 2, 2, 5, 6), len(PLAIN))
    turn = rotation(torch.tensor([[0, 1, 2, 3, 4], [7, 8, 100, 101, 3000]]), 6, 1e4, torch.float64)
    mixers = make_mixers("depth_attention", options, 6, PLAIN)
    turned = mix_all(mixers, [rotate(x, turn) for x in q], [rotate(x, turn) for x in k], v)
    for a, b in zip(turned, mix_all(mixers, q, k, v), strict=True):
        close(a, b, 1e-12)


def test_mixed_values_move_when_the_queries_move() -> None:
    q, k, v = make_heads((2, 2, 2, 3, 4), len(PLAIN))
    mixers = make_mixers("depth_attention", {}, 4, PLAIN)
    before = mix_all(mixers, q, k, v)
    for i in range(1, len(PLAIN)):
        after = mix_all(mixers, [x + (j == i) for j, x in enumerate(q)], k, v)
        assert (after[i] - before[i]).abs().amax(-1).min() > 1e-3  # every token and head of this layer
        assert all(torch.equal(a, b) for a, b in zip(after[:i], before[:i], strict=True))


# Largest error against double precision of the same rounded inputs, in units of the largest value: a rounding a layer.
PRECISION = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@EVERY_KV
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_short_dtypes_stay_close_to_double_precision(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    heads = make_heads((2, 2, 2, 16, 8), len(PLAIN), dtype=dtype)
    mixers = make_mixers(name, options, 8, PLAIN).to(dtype).requires_grad_(False)
    ours = mix_all(mixers, *heads)
    exact = expected(name, options, mixers.double(), "mixed", *([x.double() for x in part] for part in heads))
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= PRECISION[dtype] * b.abs().max()


@EVERY_KV
def test_a_value_in_bf16_is_rounded_once(name: str, options: dict[str, Any]) -> None:
    q, k, v = make_heads((2, 2, 2, 16, 8), 2, dtype=torch.bfloat16)
    mixers = make_mixers(name, options, 8, (0, 0)).to(torch.bfloat16)
    u = mix_all(mixers, q, k, v)[1]
    exact = expected(name, options, mixers.double(), "mixed", *([x.double() for x in part] for part in (q, k, v)))[1]
    half_step = 2.0 ** (exact.detach().abs().log2().floor() - 8)  # bf16 keeps 8 bits
    assert ((u - exact).abs() <= half_step + 1e-6).all()


@EACH_KV
@pytest.mark.parametrize(("i", "held"), [(2, 0), (1, 5), (0, 1)])
def test_layers_out_of_order_are_refused(name: str, i: int, held: int) -> None:
    q, k, v = make_heads((1, 2, 2, 3, 4), len(PLAIN))
    mixer = make_mixers(name, {}, 4, PLAIN)[i]
    want = len(mixer.spec(mixer.site).shapes)
    with pytest.raises(ValueError, match=rf"attention {i} got a state of {held} tensors; expected {want}.*order"):
        mixer.mix(q[i], k[i], v[i], tuple(v[:held]))


@EVERY_KV
def test_compiled_mixing_equals_eager(name: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    q, k, v = make_heads((2, 2, 2, 3, 4), len(LOOPED))
    mixers = make_mixers(name, options, 4, LOOPED)
    leaves = [*q, *k, *v, *mixers.parameters()]
    eager = mix_all(mixers, q, k, v)
    compiled = torch.compile(mix_all, fullgraph=True, backend="aot_eager")(mixers, q, k, v)
    for a, b in zip(compiled, eager, strict=True):
        close(a, b, 1e-13)
    for a, b in zip(gradients(compiled, leaves), gradients(eager, leaves), strict=True):
        close(a, b, 1e-12)
