"""The protocol under everything that PyTorch does to a module."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import depthmix as dm
from depthmix.analysis.invariants import make_probe
from depthmix.mechanisms.record import KEY
from tests.cases import DEFAULTS, EVERY_CASE, EVERY_MECHANISM

COMPILED = [  # options that lead to other code than the defaults
    ("attnres", {"query": "input", "heads": 2, "query_from": "read", "score": "torch.linalg:vecdot"}),
    ("attnres", {"mixing": "linear"}),
    ("attnres", {"window": 2}),
    ("block_attnres", {"mixing": "static", "block_sublayers": 4}),
    ("hyper_connections", {"dynamic": False, "transition": "identity", "readout": "learned"}),
    ("linear_attention", {"rule": "delta"}),
    ("linear_attention", {"rule": "gated", "feature_map": "elu1", "normalize": True}),
    ("mhc", {"readout": "learned"}),
    ("mrla", {"form": "base"}),
]


class Network(nn.Module):
    """A user's own model: the loop of the README around a stack."""

    def __init__(self, name: str, options: dict[str, Any], dim: int = 8, depth: int = 6) -> None:
        super().__init__()
        self.depth = dm.DepthStack(name, dim=dim, depth=depth, **options)
        self.sublayers = nn.ModuleList(nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, dim)) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        state = self.depth.begin(x)
        for mixer, sublayer in zip(self.depth, self.sublayers, strict=True):
            h, carry = mixer.read(state)
            state = mixer.write(state, carry, sublayer(h))
        return self.depth.end(state)


def network(name: str, options: dict[str, Any], depth: int = 6) -> Network:
    model = Network(name, options, depth=depth).double()
    with torch.no_grad():
        for parameter in model.depth.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    out = model(x)
    return out, list(torch.autograd.grad(out.square().sum(), list(model.parameters())))


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1)


@pytest.mark.parametrize(("name", "options"), [*DEFAULTS, *COMPILED])
def test_compiles_to_one_graph(name: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model, x = network(name, options, depth=5), torch.randn(2, 3, 8, dtype=torch.float64)
    out, grads = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), x)
    plain, plain_grads = gradients(model, x)
    assert_close(out, plain)
    for a, b in zip(grads, plain_grads, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("residual", {}, 1),
        ("scaled_residual", {}, 1),
        ("highway", {}, 1),
        ("hyper_connections", {}, 2),
        ("mhc", {}, 2),
        ("mhc_lite", {}, 2),
        ("mrla", {}, 2),
        ("ddl", {}, 1),
        ("linear_attention", {}, 2),
    ],
)
def test_a_step_compiles_once_for_all_layers_whose_state_is_alike(
    name: str, options: dict[str, Any], most: int
) -> None:
    """No layer's own number is compiled in; the first site alone may differ. The default limit is 8 graphs."""
    torch._dynamo.reset()
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    model, x = network(name, options, depth=12), torch.randn(2, 8, dtype=torch.float64)
    step = torch.compile(lambda mixer, state: mixer.step(state, torch.tanh), fullgraph=True, backend=count)
    state = model.depth.begin(x)
    with torch.no_grad():
        for mixer in model.depth:
            state = step(mixer, state)
    assert graphs <= most


def test_the_residual_is_the_plain_loop_bit_for_bit() -> None:
    model, x = Network("residual", {}), torch.randn(2, 3, 8)
    plain = x
    for sublayer in model.sublayers:
        plain = plain + sublayer(plain)
    assert torch.equal(model(x), plain)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["block_attnres", "mrla"])
def test_compiles_to_native_code(name: str) -> None:
    torch._dynamo.reset()
    model, x = network(name, {}, depth=3), torch.randn(2, 3, 8, dtype=torch.float64)
    out, grads = gradients(torch.compile(model, fullgraph=True), x)
    plain, plain_grads = gradients(model, x)
    assert_close(out, plain, 1e-10)
    for a, b in zip(grads, plain_grads, strict=True):
        assert_close(a, b, 1e-10)


@EVERY_CASE
def test_checkpointing_whole_blocks_gives_the_same_gradients(name: str, options: dict[str, Any]) -> None:
    """Two sublayers a segment, the plain tuple as all that crosses; nothing is changed by running it twice."""
    model, x = network(name, options), torch.randn(2, 3, 8, dtype=torch.float64)

    def segment(lo: int, *state: Tensor) -> tuple[Tensor, ...]:
        for index in (lo, lo + 1):
            state = model.depth[index].step(state, model.sublayers[index])
        return state

    state = model.depth.begin(x)
    for lo in (0, 2, 4):
        state = checkpoint(segment, lo, *state, use_reentrant=False)
        assert type(state) is tuple
    out = model.depth.end(state)
    grads = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    plain, plain_grads = gradients(model, x)
    assert torch.equal(out, plain)
    for a, b in zip(grads, plain_grads, strict=True):
        assert_close(a, b)


@EVERY_CASE
def test_torch_func_sees_a_pure_function(name: str, options: dict[str, Any]) -> None:
    model, x = network(name, options), torch.randn(4, 8, dtype=torch.float64)
    params = dict(model.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).square().sum()

    grads = torch.func.grad(loss)(params, x)
    for a, b in zip(grads.values(), gradients(model, x)[1], strict=True):
        assert_close(a, b)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)  # a gradient a token
    for a, b in zip(each.values(), grads.values(), strict=True):
        assert_close(a.sum(0), b)


@EVERY_CASE
def test_forward_mode_agrees_with_backward_mode(name: str, options: dict[str, Any]) -> None:
    model = network(name, options)
    x, direction = torch.randn(2, 3, 8, dtype=torch.float64).unbind(0)
    _, tangent = torch.func.jvp(model, (x,), (direction,))
    out, pullback = torch.func.vjp(model, x)
    cotangent = torch.randn_like(out)
    assert_close((tangent * cotangent).sum(), (pullback(cotangent)[0] * direction).sum(), 1e-10)


@EVERY_MECHANISM
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_streams_dtype(name: str, options: dict[str, Any], stream: torch.dtype) -> None:
    model, x = Network(name, options), torch.randn(2, 3, 8).to(stream)
    with torch.autocast("cpu", torch.bfloat16):
        state = model.depth.begin(x)
        for mixer, sublayer in zip(model.depth, model.sublayers, strict=True):
            h, carry = mixer.read(state)
            assert h.dtype == stream
            y = sublayer(h)
            assert y.dtype == torch.bfloat16
            state = mixer.write(state, carry, y)
            essential = state[: model.depth.spec(mixer.site.index + 1).essential]
            assert {t.dtype for t in essential} == {stream}
        assert model.depth.end(state).dtype == stream


@EVERY_CASE
def test_a_copy_is_whole_and_on_its_own(name: str, options: dict[str, Any]) -> None:
    model, x = network(name, options), torch.randn(3, 8, dtype=torch.float64)
    twin = copy.deepcopy(model)
    before = model(x)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert torch.equal(model(x), before)


@EVERY_CASE
def test_a_state_dict_goes_round(name: str, options: dict[str, Any]) -> None:
    model, x = network(name, options), torch.randn(3, 8, dtype=torch.float64)
    other = Network(name, options).double()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


@EVERY_CASE
def test_lives_on_the_meta_device_until_it_is_needed(name: str, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        stack = dm.DepthStack(name, dim=8, depth=6, **options)
        out = stack(torch.empty(2, 3, 8), [nn.Identity()] * 6)
    assert out.shape == (2, 3, 8)
    assert out.is_meta
    stack.to_empty(device="cpu")
    for tensor in (*stack.parameters(), *stack.buffers()):
        tensor.detach().fill_(float("nan"))
    torch.manual_seed(0)
    stack.reset_parameters()
    torch.manual_seed(0)
    fresh = dm.DepthStack(name, dim=8, depth=6, **options)
    loaded = dm.DepthStack(name, dim=8, depth=6, **options).to("meta").to_empty(device="cpu")
    loaded.load_state_dict(fresh.state_dict())
    for (key, a), b in zip(stack.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    x = torch.randn(2, 3, 8)
    assert torch.equal(stack(x, [torch.tanh] * 6), fresh(x, [torch.tanh] * 6))
    assert torch.equal(loaded(x, [torch.tanh] * 6), fresh(x, [torch.tanh] * 6))


@EVERY_CASE
def test_what_essential_tensors_share_is_nothing(name: str, options: dict[str, Any]) -> None:
    probe = make_probe(name, options)
    for index, state in enumerate(probe.states()):
        essential = state[: probe.stack.spec(index).essential]
        storages = [t.untyped_storage().data_ptr() for t in essential]
        assert len(set(storages)) == len(storages)


@EVERY_CASE
def test_a_slice_keeps_the_names_of_the_whole(name: str, options: dict[str, Any]) -> None:
    stack = dm.DepthStack(name, dim=8, depth=6, **options)
    whole = stack.state_dict()
    parts = [stack.slice(0, 2), stack.slice(2, 5), stack.slice(5, 6)]
    keys = [key for part in parts for key in part.state_dict() if key != KEY]
    assert sorted(keys) == sorted(whole.keys() - {KEY})
    assert all(torch.equal(part.state_dict()[KEY], whole[KEY]) for part in parts), "the record is that of the whole"
    assert [len(part) for part in parts] == [2, 3, 1]
    assert [part.out is not None for part in parts] == [False, False, True]
    for part, index in ((parts[1], 2), (parts[1].slice(3, 5), 4)):
        pairs = zip(part[index].parameters(), stack[index].parameters(), strict=True)
        assert all(a is b for a, b in pairs), "a slice shares the parameters of the whole"


def test_block_and_full_attnres_exchange_their_state_dicts() -> None:
    x = torch.randn(3, 8)
    for options in ({}, {"query": "input"}, {"mixing": "sigmoid"}, {"heads": 2}, {"key_norm": False}):
        full = dm.DepthStack("attnres", dim=8, depth=7, **options)
        nn.init.normal_(next(full[3].parameters()))
        block = dm.DepthStack("block_attnres", dim=8, depth=7, block_sublayers=3, **options)
        block.load_converted(full.state_dict())
        single = dm.DepthStack("block_attnres", dim=8, depth=7, block_sublayers=1, **options)
        single.load_converted(block.state_dict())
        sublayers = [torch.tanh] * 7
        assert torch.allclose(single(x, sublayers), full(x, sublayers), atol=1e-6)


def test_block_attnres_with_one_sublayer_per_block_is_full_attnres() -> None:
    for options in ({}, {"heads": 4}, {"mixing": "sigmoid"}, {"mixing": "static"}, {"query": "input"}):
        probe = make_probe("block_attnres", {"block_sublayers": 1, **options}, depth=9)
        full = dm.DepthStack("attnres", dim=8, depth=9, **options).double()
        full.load_converted(probe.stack.state_dict())
        assert_close(probe.run(), probe.run(full))


@pytest.mark.parametrize(
    ("depth", "asked", "size", "real"), [(24, 8, 3, 8), (24, 7, 4, 6), (7, 4, 2, 4), (9, 8, 2, 5), (5, 5, 1, 5)]
)
def test_blocks_are_counted_as_they_fall(depth: int, asked: int, size: int, real: int) -> None:
    stack = dm.DepthStack("block_attnres", dim=4, depth=depth, num_blocks=asked)
    assert f"{real} blocks of {size} sublayers" in repr(stack)
    assert (f"num_blocks={asked} was requested" in repr(stack)) is (real != asked)
    assert stack.spec(depth).essential == real + 1
    assert ("is not a whole number of layers" in repr(stack)) is (size % 2 == 1)
    assert ("full AttnRes" in repr(stack)) is (size == 1)


def test_the_embedding_is_counted_once() -> None:
    """With zero queries every row is the mean of its sources: v_0 has the weight of one source."""
    stack = dm.DepthStack("block_attnres", dim=4, depth=6, block_sublayers=2).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    traced = dm.trace(stack, x, [torch.tanh] * 6)
    assert torch.allclose(traced.M[0, :, 0], 1 / torch.tensor([1, 2, 2, 3, 3, 4, 4], dtype=torch.float64))


def test_param_groups_keep_queries_from_decay_and_from_muon() -> None:
    for name in dm.list_mechanisms():
        for options in dm.mechanism(name).variants:
            stack = dm.DepthStack(name, dim=8, depth=5, **options)
            groups = dm.param_groups(stack, weight_decay=0.3)
            placed = [p for group in groups for p in group["params"]]
            assert {id(p) for p in placed} == {id(p) for p in stack.parameters()}
            assert len(placed) == len(list(stack.parameters()))
            for group in groups:
                for full_name, p in zip(group["names"], group["params"], strict=True):
                    leaf = full_name.rsplit(".", 1)[1]
                    if leaf == "query" or leaf == "key_weight" or leaf.endswith("bias"):
                        assert group["weight_decay"] == 0
                        assert not group["muon"]
                    if group["muon"]:
                        assert min(p.shape) == 8, "Muon takes full hidden matrices only"
                        assert group["weight_decay"] == 0.3
            if placed:
                torch.optim.AdamW(groups, lr=1e-3)


def test_muon_takes_the_matrices_of_input_queries() -> None:
    stack = dm.DepthStack("attnres", dim=8, depth=3, query="input")
    muon = [name for group in dm.param_groups(stack) if group["muon"] for name in group["names"]]
    assert muon == ["mixers.1.query_proj", "mixers.2.query_proj", "out.query_proj"]


def test_a_stack_iterates_over_its_sublayers_and_not_over_the_output() -> None:
    stack = dm.DepthStack("attnres", dim=8, depth=5)
    assert len(stack) == len(list(stack)) == 5
    assert [m.site.index for m in stack] == [0, 1, 2, 3, 4]
    assert [m.site.kind for m in stack] == ["attn", "mlp", "attn", "mlp", "attn"]
    assert stack.out is not None
    assert stack.out.site.kind == "out"
    assert dm.DepthStack("residual", dim=8, depth=2, kinds=["mlp", "mlp"])[0].site.kind == "mlp"


def test_sites_and_specs_are_values() -> None:
    site = dm.Site(0, 3, 8, "attn")
    assert site == dataclasses.replace(site)
    with pytest.raises(dataclasses.FrozenInstanceError):
        site.index = 1  # type: ignore[misc]


def test_kv_mixers_split_like_depth_mixers() -> None:
    """The contract of a site inside attention, shown by the value residual of the first layer."""

    class FirstValue(dm.KVMixer):
        def coeff(self, q: Tensor, k: Tensor, kv: dm.State) -> Any:
            return 0.5 if kv else 0.0

        def combine(self, v: Tensor, kv: dm.State, c: Any) -> Tensor:
            return v + c * (kv[0] - v) if kv else v

        def update(self, k: Tensor, v: Tensor, mixed: Tensor, kv: dm.State) -> dm.State:
            return kv or (mixed,)

        def spec(self, site: dm.Site) -> dm.StateSpec:
            count = min(site.index, 1)
            return dm.StateSpec(((site.dim,),) * count, essential=count, sealed=count)

    kv, values = (), torch.randn(3, 2, 4, 5, 8)
    q = k = torch.randn(2, 4, 5, 8)
    for index in range(3):
        mixer = FirstValue(dm.Site(index, 3, 8, "attn"), dm.MixerConfig(), (0, 1, 2))
        kv = mixer.begin() if index == 0 else kv
        assert len(kv) == len(mixer.spec(mixer.site).shapes)
        mixed, kv = mixer.mix(q, k, values[index], kv)
        want = values[0] if index == 0 else (values[0] + values[index]) / 2
        assert torch.allclose(mixed, want)


def test_list_of_kinds() -> None:
    assert "attnres" in dm.list_mechanisms()
    assert dm.list_mechanisms(kind="kv") == ["depth_attention", "value_residual"]
