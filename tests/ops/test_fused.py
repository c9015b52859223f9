"""Single reads go to fla-core's fused kernel where it is installed and the tensors are on a GPU.

Without a GPU a stand-in takes the place of fla-core's module, and tensors of the CPU count as being on a GPU; what is
tested is which reads go there, with which arguments, and what comes back. The last test runs the kernel itself.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

import depthmix as dm
from depthmix import ops
from depthmix.analysis.invariants import make_probe, verify
from depthmix.ops import ReadOptions
from depthmix.ops.attend import dispatch, fused, native, torch_form
from tests import fla_stand_in
from tests.mechanisms.test_two_phase import counted, rows_and_gradients

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def fresh() -> Iterator[None]:
    """The lookup and the warning are remembered: forget them before and after."""
    caches = (fused.load, dispatch.warn_of_missing_kernel)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, fresh: None) -> list[dict[str, Any]]:
    """In the place of fla-core's module; every call of its kernel with the arguments."""
    found: list[dict[str, Any]] = []

    def recorded(query: Tensor, residuals: Any, rms_weight: Tensor, **options: Any) -> Any:
        found.append({"query": query, "sources": residuals, "weight": rms_weight, **options})
        return fla_stand_in.fused_attnres(query, residuals, rms_weight, **options)

    module = ModuleType(fused.MODULE)
    module.fused_attnres = recorded  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fused.MODULE, module)
    return found


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(fused, "on_gpu", lambda tensors: True)


@pytest.fixture
def calls(stand_in: list[dict[str, Any]], pretended_gpu: None) -> list[dict[str, Any]]:
    return stand_in


@pytest.fixture
def no_fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing called fla is loaded or found; afterwards all is as it was."""

    def taken_out() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "fla"}

    loaded = taken_out()
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not (Path(folder) / "fla").is_dir()])
    yield
    taken_out()
    sys.modules.update(loaded)


def sample(count: int = 3, dim: int = 8, lead: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32) -> Any:
    sources = [torch.randn(*lead, dim).to(dtype).requires_grad_() for _ in range(count)]
    return sources, torch.randn(1, dim).requires_grad_()


def value_and_gradients(sources: list[Tensor], query: Tensor, **options: Any) -> list[Tensor]:
    h = ops.read_one(sources, query, ReadOptions(**options))
    return [h, *torch.autograd.grad(ops.wide(h).sin().sum(), [query, *sources])]


def assert_same(found: list[Tensor], plain: list[Tensor], dtype: torch.dtype) -> None:
    for a, b in zip(found, plain, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= TOLERANCE[dtype] * b.abs().max().clamp(min=1)


# What goes there


@pytest.mark.parametrize("choice", ["auto", "fused"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [{}, {"eps": 0.1}, {"scale": -0.7}], ids=str)
@pytest.mark.parametrize(("count", "lead"), [(1, (2, 3)), (3, ()), (9, (5,))])
def test_a_single_read_goes_to_the_kernel_and_equals_the_reference(
    count: int, lead: tuple[int, ...], options: dict[str, float], dtype: torch.dtype, choice: Any, calls: Any
) -> None:
    sources, query = sample(count, 8, lead, dtype)
    with ops.using(choice):
        found = value_and_gradients(sources, query, **options)
    (call,) = calls
    assert torch.equal(call["query"], query[0])
    assert torch.equal(call["weight"], torch.ones(8))
    assert all(a is b for a, b in zip(call["sources"], sources, strict=True))
    assert (call["rms_eps"], call["scale"]) == (options.get("eps", 1e-6), options.get("scale", 1.0))
    with ops.using("reference"):
        assert_same(found, value_and_gradients(sources, query, **options), dtype)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["attnres", "block_attnres"])
def test_a_stack_sends_all_its_reads_there(name: str, calls: Any) -> None:
    """Of 12 sublayers: all but the first, which reads the embedding alone, and the output."""
    options = {"block_sublayers": 4} if name == "block_attnres" else {}
    probe = make_probe(name, options, depth=12, dtype=torch.float32)
    out = probe.run()
    with ops.using("reference"):
        plain = probe.run()
    assert_same([out], [plain], torch.float32)
    assert [len(call["sources"]) for call in calls] == [probe.stack.spec(i).essential for i in range(1, 13)]


@pytest.mark.parametrize(("name", "reads"), [("attnres", 12), ("block_attnres", 12), ("delta_attnres", 11)])
def test_all_reads_of_a_training_step_reach_the_kernel(name: str, reads: int, calls: Any) -> None:
    """The output of delta_attnres is a plain sum. Nothing is read ahead, so nothing derived travels but its sum."""
    probe = make_probe(name, {}, depth=12, dtype=torch.float32)
    with counted(native, torch_form) as others:
        rows, grads = rows_and_gradients(probe, "auto")
    assert len(calls) == reads
    assert others == []
    plain_rows, plain_grads = rows_and_gradients(probe, "reference")
    assert_same([*rows, *grads], [*plain_rows, *plain_grads], torch.float32)
    if name != "delta_attnres":
        assert [len(state) for state in probe.states()] == [probe.stack.spec(i).essential for i in range(13)]


@pytest.mark.parametrize("choice", ["auto", "fused"])
def test_what_was_read_ahead_elsewhere_is_left_aside(choice: Any, calls: Any) -> None:
    probe = make_probe("block_attnres", {"block_sublayers": 4}, depth=12, dtype=torch.float32)
    with ops.using("torch"):
        state = probe.states()[6]
    assert len(state) > probe.stack.spec(6).essential
    with ops.using(choice):
        h, carry = probe.stack[6].read(state)
    assert len(calls) == 1
    assert carry == ()
    with ops.using("reference"):
        assert_same([h], [probe.stack[6].read(state)[0]], torch.float32)


@pytest.mark.parametrize(("name", "reads"), [("attnres", 12), ("block_attnres", 12), ("delta_attnres", 11)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_all_reads_on_a_cuda_device_reach_the_kernel(
    name: str, reads: int, dtype: torch.dtype, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without storage, which say that they are on a GPU; without one autograd does not take them."""
    monkeypatch.setattr(fused, "PLAIN", (*fused.PLAIN, FakeTensor))
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their memory begins nowhere, and torch warns of the question
        stack = dm.DepthStack(name, dim=8, depth=12)
        out = stack(torch.randn(2, 3, 8, dtype=dtype), [torch.tanh] * 12)
    assert (out.device.type, out.dtype, out.shape) == ("cuda", dtype, (2, 3, 8))
    assert len(stand_in) == reads


def test_tensors_without_storage_are_not_given_to_a_kernel_that_needs_memory(stand_in: Any) -> None:
    with FakeTensorMode(), torch.device("cuda"):
        sources, query = [torch.randn(3, 8)] * 2, torch.randn(1, 8)
    assert "FakeTensor" in fused.obstacle(sources, query, ReadOptions())
    assert ops.sharing_pays(sources, query)


def test_key_weights_reach_the_kernel_within_the_query(calls: Any) -> None:
    probe = make_probe("block_attnres", {"block_sublayers": 1}, depth=3, dtype=torch.float32)
    probe.run()
    sites = probe.stack.all_mixers()[1:]
    assert len(calls) == len(sites)
    for call, site in zip(calls, sites, strict=True):
        assert (site.key_weight - 1).abs().max() > 0.01
        torch.testing.assert_close(call["query"], site.query * site.key_weight)


@pytest.mark.parametrize("name", ["attnres", "block_attnres"])
def test_every_invariant_holds_with_the_kernel(name: str, calls: Any) -> None:
    assert [check for check in verify(name, {}, dtype=torch.float32) if not check.holds] == []
    assert calls


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_the_same_under_checkpointing(reentrant: bool, calls: Any) -> None:
    sources, query = sample()
    plain = value_and_gradients(sources, query)
    h = checkpoint(lambda q, *vs: ops.read_one(vs, q), query, *sources, use_reentrant=reentrant)
    h.sin().sum().backward()
    assert_same([h, query.grad, *(v.grad for v in sources)], plain, torch.float32)
    assert len(calls) == 3  # once for comparison, then forward and again for the backward pass


def test_autocast_changes_nothing(calls: Any) -> None:
    sources, query = sample()
    plain = value_and_gradients(sources, query)
    with torch.autocast("cpu", torch.bfloat16):
        found = value_and_gradients(sources, query)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert calls[1]["query"].dtype == torch.float32


# What does not


def test_many_queries_priors_and_log_sum_exps_stay_on_the_ordinary_path(calls: Any) -> None:
    sources, query = sample()
    (h,), (lse,) = ops.read_many(sources, query)
    ops.read_many(sources, query, (h, lse))
    ops.read_many(sources, query.expand(4, 8))
    h, lse = ops.attend(sources, query[0])
    (grad,) = torch.autograd.grad(lse.sum(), query)
    assert calls == []
    with ops.using("reference"):
        _, plain = ops.attend(sources, query[0])
        torch.testing.assert_close(lse, plain)
        torch.testing.assert_close(grad, *torch.autograd.grad(plain.sum(), query))
    with ops.using("fused"):
        for prior in (None, (h, lse)):
            with pytest.raises(RuntimeError, match=r"one query, no prior, no log-sum-exp.*'auto'"):
                ops.read_many(sources, query, prior)
        with pytest.raises(RuntimeError, match="single reads only"):
            ops.attend(sources, query.expand(4, 8))


def misfits() -> list[Any]:
    plain = [torch.randn(4, 8) for _ in range(2)]
    turned = [torch.randn(8, 4).T for _ in range(2)]
    shifted = [torch.randn(33)[1:].view(4, 8) for _ in range(2)]
    return [
        pytest.param([v.double() for v in plain], {}, "float32.*float64", id="float64"),
        pytest.param(plain, {"normalize": False}, "normalize=False", id="no norm"),
        pytest.param(turned, {}, "contiguous", id="strides"),
        pytest.param(shifted, {}, "16 bytes", id="alignment"),
        pytest.param([torch.randn(1, 8)] * 129, {}, "128 sources; got 129", id="too many"),
        pytest.param([torch.randn(0, 8)] * 2, {}, "at least one token", id="no tokens"),
        pytest.param([v.as_subclass(Subclass) for v in plain], {}, "Subclass", id="subclass"),
    ]


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(("sources", "options", "why"), misfits())
def test_what_the_kernel_cannot_do_is_done_without_it_and_refused_when_forced(
    sources: list[Tensor], options: dict[str, Any], why: str, calls: Any
) -> None:
    query = torch.randn(1, 8).to(ops.accumulator(sources[0].dtype))
    h = ops.read_one(sources, query, ReadOptions(**options))
    with ops.using("fused"), pytest.raises(RuntimeError, match=why):
        ops.read_one(sources, query, ReadOptions(**options))
    assert calls == []
    with ops.using("reference"):
        torch.testing.assert_close(h, ops.read_one(sources, query, ReadOptions(**options)))


@pytest.mark.parametrize("choice", ["torch", "reference"])
def test_another_backend_that_is_forced_is_taken(choice: Any, calls: Any) -> None:
    with ops.using(choice):
        ops.read_one(*sample())
    assert calls == []


def test_tensors_on_a_cpu_stay_there_and_forced_the_error_says_so(stand_in: Any) -> None:
    ops.read_one(*sample())
    with ops.using("fused"), pytest.raises(RuntimeError, match="CUDA devices; the sources are on cpu"):
        ops.read_one(*sample())
    assert stand_in == []


def test_compiled_and_transformed_code_takes_the_plain_form(calls: Any) -> None:
    class Read(nn.Module):
        def forward(self, query: Tensor, *sources: Tensor) -> Tensor:
            return ops.read_one(sources, query)

    sources, query = sample()
    with ops.using("reference"):
        plain = ops.read_one(sources, query)
    torch._dynamo.reset()
    for choice in ("auto", "fused"):
        with ops.using(choice):  # type: ignore[arg-type]
            compiled = torch.compile(Read(), fullgraph=True, backend="aot_eager")(query, *sources)
            _, slope = torch.func.jvp(lambda q: ops.read_one(sources, q), (query,), (torch.ones_like(query),))
            mapped = torch.vmap(lambda *vs: ops.read_one(vs, query))(*sources)
        torch.testing.assert_close(compiled, plain)
        torch.testing.assert_close(mapped, plain)
        assert slope.shape == plain.shape
    assert calls == []


def test_second_derivatives_are_refused_where_the_kernel_would_lose_them(calls: Any) -> None:
    sources, query = sample()
    with pytest.raises(RuntimeError, match=r"second derivatives.*using\('reference'\)"):
        torch.autograd.grad(ops.read_one(sources, query).square().sum(), query, create_graph=True)
    assert calls
    with ops.using("reference"):
        (first,) = torch.autograd.grad(ops.read_one(sources, query).square().sum(), query, create_graph=True)
    assert torch.autograd.grad(first.sum(), query)[0].abs().max() > 0


# What is said


def test_what_serves_is_described_for_each_device_and_dtype(calls: Any) -> None:
    assert dispatch.describe("cuda:1").startswith("fused (fla-core")
    assert "each read separately" in dispatch.describe("cuda", torch.bfloat16)
    assert dispatch.describe("cuda", torch.float64).startswith("torch (fla-core's kernel computes in float32")
    assert dispatch.describe("cpu", torch.bfloat16).startswith("torch (")
    assert dispatch.describe("mps") == "torch (there is no kernel for mps)"


def test_verify_tells_what_serves_on_its_device(capsys: pytest.CaptureFixture[str]) -> None:
    from depthmix.cli import main

    assert main(["verify", "residual"]) == 0
    assert f"block_attnres on cpu: {dispatch.describe('cpu', torch.float64)}" in capsys.readouterr().out


def test_without_fla_core_the_ordinary_path_serves_and_the_extra_is_named(pretended_gpu: None, no_fla: None) -> None:
    sources, query = sample()
    with pytest.warns(UserWarning, match=r"plain torch operations.*pip install 'depthmix\[kernels\]'"):
        found = value_and_gradients(sources, query)
    with ops.using("reference"):
        assert_same(found, value_and_gradients(sources, query), torch.float32)
    assert dispatch.describe("cuda") == "torch (fla-core is not installed: pip install 'depthmix[kernels]')"
    with pytest.raises(RuntimeError, match=r"pip install 'depthmix\[kernels\]'"), ops.using("fused"):
        pass


def test_without_fla_core_passes_are_shared_and_the_extra_is_named_once(pretended_gpu: None, no_fla: None) -> None:
    probe = make_probe("block_attnres", {"block_sublayers": 4}, depth=12, dtype=torch.float32)
    with counted(native, torch_form) as reads, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        probe.run()
        probe.run()
    (warning,) = caught
    assert "pip install 'depthmix[kernels]'" in str(warning.message)
    assert [queries for _, _, queries in reads if queries > 1] == [4, 4] * 2


@pytest.mark.parametrize(("options", "dtype"), [({}, torch.float64), ({"key_norm": False}, torch.float32)], ids=str)
def test_where_the_kernel_would_not_fit_anyway_nothing_is_advised(
    options: dict[str, Any], dtype: torch.dtype, pretended_gpu: None, no_fla: None, recwarn: pytest.WarningsRecorder
) -> None:
    make_probe("block_attnres", {"block_sublayers": 2, **options}, depth=6, dtype=dtype).run()
    assert [w for w in recwarn if "depthmix" in str(w.message)] == []


def test_a_broken_fla_core_is_looked_for_once_and_its_error_shown(
    pretended_gpu: None, no_fla: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As fla-core is where Triton is missing or finds no driver."""
    (tmp_path / "fla" / "ops").mkdir(parents=True)
    (tmp_path / "fla" / "ops" / "attnres.py").write_text("raise OSError('no libcuda.so')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sources, query = sample()
    with pytest.warns(UserWarning, match=r"no libcuda\.so"):
        assert ops.read_one(sources, query).shape == sources[0].shape
    assert "OSError: no libcuda.so" in dispatch.describe("cuda")
    with pytest.raises(RuntimeError, match=r"no libcuda\.so"), ops.using("fused"):
        pass
    assert fused.load.cache_info().misses == 1


def test_nothing_on_a_cpu_imports_fla_core() -> None:
    code = (
        "import sys, torch, depthmix as dm; from depthmix.cli import main;"
        "stack = dm.DepthStack('block_attnres', dim=8, depth=4, block_sublayers=2);"
        "stack(torch.randn(3, 8, requires_grad=True), [torch.tanh] * 4).sum().backward();"
        "dm.ops.attend([torch.ones(2, 4)] * 3, torch.ones(4)); main(['verify', 'residual', '--json']);"
        "print([name for name in sys.modules if name.split('.')[0] in ('fla', 'triton')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# The kernel itself


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fla-core's kernel needs a GPU")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("count", "dim", "lead"), [(1, 8, ()), (3, 64, (5, 7)), (9, 1000, (63,)), (29, 33, (4,))])
def test_the_kernel_itself_equals_the_reference(count: int, dim: int, lead: Any, dtype: torch.dtype) -> None:
    if fused.why_not():
        pytest.skip(fused.why_not())
    sources = [torch.randn(*lead, dim, device="cuda").to(dtype).requires_grad_() for _ in range(count)]
    query = (torch.randn(1, dim, device="cuda") / dim**0.5).requires_grad_()
    with ops.using("fused"):
        found = value_and_gradients(sources, query, scale=0.7, eps=1e-3)
    with ops.using("reference"):
        plain = value_and_gradients(sources, query, scale=0.7, eps=1e-3)
    assert_same(found, plain, dtype)
