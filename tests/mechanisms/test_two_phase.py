"""Two-phase reads: exact, really taken, small in memory, and robust."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import depthmix as dm
from depthmix import ops
from depthmix.analysis.invariants import Probe, make_probe
from depthmix.bench.memory import kept_bytes
from depthmix.ops.attend import native, torch_form

BACKENDS = [
    pytest.param("native", marks=pytest.mark.skipif(native.library() is None, reason=native.why_not() or "no kernel")),
    "torch",
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@contextmanager
def counted(*modules: Any) -> Iterator[list[tuple[str, int, int]]]:
    """Every forward call of these backends: its module, number of sources, number of queries."""
    calls: list[tuple[str, int, int]] = []
    originals = [module.forward for module in modules]

    def spy(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(sources: Any, folded: Tensor, *rest: Any, **options: Any) -> Any:
            calls.append((module.__name__.rsplit(".", 1)[1], len(sources), folded.shape[0]))
            return original(sources, folded, *rest, **options)

        return forward

    try:
        for module, original in zip(modules, originals, strict=True):
            module.forward = spy(module, original)
        yield calls
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.forward = original


def rows_and_gradients(probe: Probe, backend: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What every site reads in the model's own loop, and all gradients of a loss over all of it."""
    x = probe.x.clone().requires_grad_()
    rows = []
    with ops.using(backend):
        state = probe.stack.begin(x)
        for mixer, f in zip(probe.stack, probe.sublayers, strict=True):
            h, carry = mixer.read(state)
            rows.append(h)
            state = mixer.write(state, carry, f(h))
        rows.append(probe.stack.end(state))
        loss = sum((ops.wide(row).sin() * (i + 1)).sum() for i, row in enumerate(rows))
        assert isinstance(loss, Tensor)
        grads = torch.autograd.grad(loss, [x, *probe.stack.parameters()])
    return rows, list(grads)


def compare(probe: Probe, backend: Any, tolerance: float) -> None:
    rows, grads = rows_and_gradients(probe, backend)
    plain_rows, plain_grads = rows_and_gradients(probe, "reference")
    with ops.using("reference"):
        traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    for row, plain, direct in zip(rows, plain_rows, traced.inputs, strict=True):
        for other in (plain, direct):
            assert (row - other).abs().max() <= tolerance * other.abs().max().clamp(min=1)
    for a, b in zip(grads, plain_grads, strict=True):
        assert (a - b).abs().max() <= 10 * tolerance * b.abs().max().clamp(min=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("depth", [1, 2, 7, 12])
def test_two_phases_equal_the_direct_read_for_every_block_size(depth: int, backend: str) -> None:
    for size in range(1, depth + 1):
        compare(make_probe("block_attnres", {"block_sublayers": size}, depth=depth), backend, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 9, 16, 23])
def test_two_phases_equal_the_direct_read_over_all_outputs(depth: int, backend: str) -> None:
    compare(make_probe("attnres", {}, depth=depth), backend, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"scale": 0.3}, {"key_norm": False}, {"eps": 1e-2}], ids=str)
@pytest.mark.parametrize("name", ["attnres", "block_attnres"])
def test_two_phases_take_every_option_that_they_cover(name: str, options: dict[str, Any], backend: str) -> None:
    compare(make_probe(name, options, depth=10), backend, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["attnres", "block_attnres"])
def test_two_phases_agree_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    options = {"num_blocks": 4} if name == "block_attnres" else {}
    compare(make_probe(name, options, depth=12, dim=16, dtype=dtype), "auto", TOLERANCE[dtype])


@settings(max_examples=25, deadline=None)
@given(
    depth=st.integers(1, 14),
    size=st.integers(1, 14),
    dim=st.sampled_from([1, 3, 15, 17]),
    tokens=st.sampled_from([(), (1,), (0,), (2, 3)]),
    seed=st.integers(0, 10**6),
)
def test_two_phases_at_any_size(depth: int, size: int, dim: int, tokens: tuple[int, ...], seed: int) -> None:
    options = {"block_sublayers": min(size, depth)}
    probe = make_probe("block_attnres", options, depth=depth, dim=dim, tokens=tokens, seed=seed)
    if probe.x.numel():
        compare(probe, "auto", 1e-12)
    else:
        assert probe.run().shape == probe.x.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_is_read_ahead_in_one_batch(backend: str) -> None:
    """12 sublayers in blocks of 4: finished sources are passed over once a block, and each site adds its partial."""
    probe = make_probe("block_attnres", {"block_sublayers": 4}, depth=12)
    with ops.using(backend), counted(native, torch_form) as calls:  # type: ignore[arg-type]
        probe.run()
    module = "native" if backend == "native" else "torch_form"
    first_block = [(module, 2, 1)] * 3
    block = [(module, 2, 4), *[(module, 1, 1)] * 3]
    third = [(module, 3, 4), *[(module, 1, 1)] * 3]
    assert calls == [*first_block, *block, *third, (module, 4, 1)]


def test_full_attnres_is_read_in_groups_of_about_the_root_of_its_depth() -> None:
    probe = make_probe("attnres", {}, depth=16)
    with counted(native, torch_form) as calls:
        probe.run()
    ahead = [(sources, queries) for _, sources, queries in calls if queries > 1]
    assert ahead == [(5, 4), (9, 4), (13, 4)]


def test_options_outside_the_two_phases_go_the_plain_way() -> None:
    for options in ({"mixing": "sigmoid"}, {"query": "input"}, {"heads": 2}, {"window": 3}):
        probe = make_probe("attnres", options)
        with counted(native, torch_form) as calls:
            probe.run()
        assert calls == []
        assert not probe.stack.facts.two_phase


def test_what_phase_one_found_travels_behind_the_state_and_is_used_up() -> None:
    probe = make_probe("block_attnres", {"block_sublayers": 4}, depth=12)
    extra = [len(state) - probe.stack.spec(i).essential for i, state in enumerate(probe.states())]
    assert extra == [0, 0, 0, 0, 0, 6, 4, 2, 0, 6, 4, 2, 0]


def test_a_user_who_reads_one_site_alone_gets_the_same() -> None:
    probe = make_probe("block_attnres", {"block_sublayers": 4}, depth=12)
    states = probe.states()
    for mixer, state in zip(probe.stack.all_mixers(), states, strict=True):
        essential = state[: mixer.expects.essential]
        assert torch.allclose(mixer.read(essential)[0], mixer.read(state)[0], rtol=1e-13, atol=1e-13)


# Memory


class Block(nn.Module):
    """A PreNorm network whose sublayers keep their normalised input and what a product needs."""

    def __init__(self, name: str, dim: int, depth: int, **options: Any) -> None:
        super().__init__()
        self.depth = dm.DepthStack(name, dim=dim, depth=depth, **options)
        self.sublayers = nn.ModuleList(nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, dim)) for _ in range(depth))

    def forward(self, x: Tensor, every: int = 0) -> Tensor:
        state = self.depth.begin(x)
        if not every:
            for mixer, sublayer in zip(self.depth, self.sublayers, strict=True):
                state = mixer.step(state, sublayer)
            return self.depth.end(state)
        for lo in range(0, len(self.depth), every):
            state = checkpoint(self.part, lo, lo + every, *state, use_reentrant=False)
        return self.depth.end(state)

    def part(self, lo: int, hi: int, *state: Tensor) -> dm.State:
        for index in range(lo, hi):
            state = self.depth[index].step(state, self.sublayers[index])
        return state[: self.depth.spec(hi).essential]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_graph_keeps_one_vector_a_sublayer_beyond_the_residual(backend: str) -> None:
    dim, depth = 64, 24
    x = torch.randn(512, dim, requires_grad=True)
    with ops.using(backend):  # type: ignore[arg-type]
        ours = kept_bytes(Block("block_attnres", dim, depth, num_blocks=8), x)
    plain = kept_bytes(Block("residual", dim, depth), x)
    assert ours - plain <= (depth + 2) * dim * 4 + 64 * depth


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_each_block_checkpointed_it_keeps_next_to_nothing_more(backend: str) -> None:
    dim, depth = 64, 24
    x = torch.randn(512, dim, requires_grad=True)
    with ops.using(backend):  # type: ignore[arg-type]
        ours = kept_bytes(Block("block_attnres", dim, depth, num_blocks=8), x, every=3)
    plain = kept_bytes(Block("residual", dim, depth), x, every=3)
    assert ours - plain <= 2 * dim * 4 + 64 * depth


# Hard numbers


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("query", [0.0, 1.0, 1e4])
def test_norms_and_logits_of_any_size_are_finite_and_right(size: float, query: float, backend: str) -> None:
    probe = make_probe("block_attnres", {"block_sublayers": 3}, depth=9, dtype=torch.float32, dim=16)
    with torch.no_grad():
        for mixer in probe.stack.all_mixers()[1:]:
            mixer.query.mul_(query)
        x = probe.x * size
        sublayers = [lambda h, f=f: (f(h / size) * size).to(h.dtype) for f in probe.sublayers]
        with ops.using(backend):  # type: ignore[arg-type]
            out = probe.stack(x, sublayers)
        exact = probe.stack.double()(x.double(), sublayers)
    assert torch.isfinite(out).all()
    if query < 1e3:  # beyond, a rounding of the logit decides between two equals
        assert ((out - exact) / size).abs().max() <= 1e-4 * (exact / size).abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sources_of_zeros_are_read_as_zeros(backend: str) -> None:
    stack = dm.DepthStack("block_attnres", dim=8, depth=9, block_sublayers=3)
    x = torch.zeros(4, 8, requires_grad=True)
    with ops.using(backend):  # type: ignore[arg-type]
        out = stack(x, [torch.zeros_like] * 9)
        out.sum().backward()
    assert torch.equal(out, torch.zeros(4, 8))
    assert torch.isfinite(x.grad).all()


def test_two_hundred_sublayers_are_no_more_than_two_hundred_reads() -> None:
    for name in ("attnres", "block_attnres"):
        probe = make_probe(name, {}, depth=200, tokens=(2,), spread=0.2)
        with torch.no_grad():
            out = probe.run()
            with ops.using("reference"):
                plain = probe.run()
        assert (out - plain).abs().max() <= 1e-11 * plain.abs().max()


# Derivatives of derivatives


def test_attend_has_second_derivatives_and_a_two_phase_read_says_that_it_has_none() -> None:
    probe = make_probe("block_attnres", {"block_sublayers": 3}, depth=9)
    x = probe.x.requires_grad_()
    (first,) = torch.autograd.grad(probe.run().square().sum(), x, create_graph=False)
    with pytest.raises(RuntimeError, match=r"second derivatives.*using\('reference'\)"):
        torch.autograd.grad(probe.run().square().sum(), x, create_graph=True)
    with ops.using("reference"):
        (again,) = torch.autograd.grad(probe.run().square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(again.sum(), x)
    assert torch.allclose(first, again)
    assert second.abs().max() > 0


# Backends


def test_a_backend_can_be_forced_and_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"'fast'.*'native'"), ops.using("fast"):  # type: ignore[arg-type]
        pass
    sources = [torch.randn(3, 4).bfloat16() for _ in range(2)]
    if native.library() is not None:
        with pytest.raises(RuntimeError, match="contiguous float32 or float64"), ops.using("native"):
            ops.attend(sources, torch.randn(4))
    with counted(native, torch_form) as calls:
        ops.attend(sources, torch.randn(4))
        ops.attend([torch.randn(4, 3).T for _ in range(2)], torch.randn(4))
    assert [call[0] for call in calls] == ["torch_form", "torch_form"]


def test_without_a_compiler_everything_works_and_says_so(tmp_path: Path) -> None:
    code = (
        "import torch, depthmix as dm; from depthmix.ops.attend import dispatch, native;"
        "assert native.library() is None; print(dispatch.describe());"
        "print(dm.ops.attend([torch.ones(2, 4)] * 3, torch.ones(4))[0].sum().round().item())"
    )
    env = {**os.environ, "CXX": str(tmp_path / "no-compiler"), "DEPTHMIX_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "no C++ compiler" in done.stdout
    assert "8.0" in done.stdout


@pytest.mark.inductor
def test_processes_that_race_for_the_kernel_all_get_it(tmp_path: Path) -> None:
    code = "from depthmix.ops.attend import native; assert native.library() is not None, native.why_not()"
    env = {**os.environ, "DEPTHMIX_CACHE": str(tmp_path)}
    racers = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(3)]
    assert [racer.wait(timeout=120) for racer in racers] == [0, 0, 0]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(("name", "options"), [("block_attnres", {"block_sublayers": 3}), ("attnres", {})])
def test_compiled_code_takes_the_native_read_as_an_operator_or_plain_operations(
    name: str, options: dict[str, Any], backend: Any
) -> None:
    torch._dynamo.reset()
    model = Block(name, 8, 6, **options).double()
    with torch.no_grad():
        for p in model.depth.parameters():
            p.add_(0.3 * torch.randn_like(p))
    leaves = [torch.randn(3, 8, dtype=torch.float64, requires_grad=True), *model.depth.parameters()]
    with counted(native, torch_form) as calls, ops.using(backend):
        out = torch.compile(model, fullgraph=True, backend="aot_eager")(leaves[0])
        found = torch.autograd.grad(out.sin().sum(), leaves)
    served = native.library() is not None and backend == "auto"
    assert {kind for kind, *_ in calls} == ({"native"} if served else set())
    plain = model(leaves[0])
    assert torch.allclose(out, plain, rtol=1e-12, atol=1e-12)
    for ours, eager in zip(found, torch.autograd.grad(plain.sin().sum(), leaves), strict=True):
        assert torch.allclose(ours, eager, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("queries", "with_prior"), [(1, False), (3, False), (1, True)])
@pytest.mark.skipif(native.library() is None, reason="needs the native backend")
def test_the_native_read_is_a_sound_operator(queries: int, with_prior: bool) -> None:
    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    prior = (leaf(5, 8), leaf(1, 5)) if with_prior else (None, None)
    arguments = ([leaf(5, 8) for _ in range(4)], leaf(queries, 8), *prior, True, 1e-6, 1.0)
    torch.library.opcheck(torch.ops.depthmix.attend.default, arguments)


def test_an_exported_program_runs_without_depthmix() -> None:
    model = Block("block_attnres", 8, 6, block_sublayers=3)
    program = torch.export.export(model, (torch.randn(3, 8),))
    assert not [node for node in program.graph.nodes if "depthmix" in str(node.target)]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_read_compiles_for_dynamic_shapes(backend: Any) -> None:
    torch._dynamo.reset()
    query, graphs = torch.randn(8, dtype=torch.float64), []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def read(x: Tensor) -> Tensor:
        return ops.attend([x, x + 1], query)[0]

    compiled = torch.compile(read, fullgraph=True, dynamic=True, backend=counting)
    with ops.using(backend):
        for tokens in (3, 7, 12):
            x = torch.randn(tokens, 8, dtype=torch.float64)
            assert torch.allclose(compiled(x), read(x), rtol=1e-12, atol=1e-12)
    assert len(graphs) == 1
