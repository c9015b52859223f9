"""fla-core: `naive_recurrent_kda` and `naive_chunk_kda`, the references beside the kernels of flash-linear-attention.

Both compute in float32 whatever they are given. For float64 the name `torch` in their module is replaced by a module
whose float32 is float64; nothing else in them is changed. Its axes are [B, T, H, …], those of depthmix [B, H, T, …].
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import depthmix as dm
from depthmix.ops.kda.operator import forward_op
from tests.conformance.networks import difference, float_as_double
from tests.reference import kda as reference

PEER = "fla-core"
SHAPES = [(1, 1, 64, 4, 4), (2, 3, 128, 16, 24), (1, 2, 192, 33, 15)]  # B, H, T, K, V; T in whole chunks of 64


class WideTorch(types.ModuleType):
    """torch, whose float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def file_of(name: str) -> Path:
    return Path(str(importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/kda/{name}")))


def load_naive() -> Any:
    """One file, by its place: `fla.ops` imports every kernel and with them Triton, which a CPU does not have."""
    spec = importlib.util.spec_from_file_location("_fla_naive_kda", file_of("naive.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_gate(name: str) -> Any:
    """One function of a file that imports Triton."""
    tree = ast.parse(file_of("gate.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    space: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(tree, name, "exec"), space)
    return space[name]


naive = load_naive()


def inputs(B: int, H: int, T: int, K: int, V: int, strength: float = 1.0, dtype: Any = torch.float64) -> list[Tensor]:
    """q, k, v, g, β and a state, decays as at the start of training times `strength`."""
    torch.manual_seed(T + K)
    q, k = (dm.ops.unit_vectors(torch.randn(B, H, T, K, dtype=torch.float64)) for _ in range(2))
    v, state = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, H, T, V), (B, H, K, V)))
    rate = 1 + 15 * torch.rand(H, 1, 1, dtype=torch.float64)
    step = torch.exp(torch.rand(B, H, T, K, dtype=torch.float64) * math.log(100) + math.log(1e-3))
    beta = torch.sigmoid(torch.randn(B, H, T, dtype=torch.float64))
    return [x.to(dtype).requires_grad_() for x in (q, k, v, -strength * rate * step, beta, state)]


def theirs(name: str, leaves: list[Tensor]) -> list[Tensor]:
    *given, state = leaves
    o, last = getattr(naive, name)(*(x.transpose(1, 2) for x in given), initial_state=state, output_final_state=True)
    return [o.transpose(1, 2), last]


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naive, "torch", WideTorch("torch"))


def recurrent(leaves: list[Tensor]) -> list[Tensor]:
    with dm.ops.using("reference"):
        return list(dm.ops.kda(*leaves[:5], state=leaves[5]))


def chunkwise(leaves: list[Tensor]) -> list[Tensor]:
    return list(forward_op(*leaves, None, 64)[:2])


def written_out(leaves: list[Tensor]) -> list[Tensor]:
    return list(reference.recurrence(*leaves))


FORMS = {"ops.kda, recurrence": recurrent, "ops.kda, chunkwise": chunkwise, "the tests' own reference": written_out}


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", ["naive_recurrent_kda", "naive_chunk_kda"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kda_is_the_naive_kda(shape: Any, form: str, name: str, agree: Any) -> None:
    leaves = inputs(*shape)
    agree(f"{form}, against {name}", FORMS[form](leaves), theirs(name, leaves), leaves)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("strength", [20.0, 1000.0])
def test_kda_is_the_naive_kda_however_strong_the_decay(strength: float, agree: Any) -> None:
    leaves = inputs(2, 2, 128, 16, 16, strength)
    agree("ops.kda under strong decay", chunkwise(leaves), theirs("naive_recurrent_kda", leaves), leaves)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_the_log_decay_is_the_naive_gate(bound: float | None, agree: Any) -> None:
    f, a_log, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 5, 3, 16), (3,), (48,)))
    name = "naive_kda_gate" if bound is None else "naive_kda_lowerbound_gate"
    options = {} if bound is None else {"lower_bound": bound}
    with float_as_double():
        want = load_gate(name)(f, a_log, bias, output_dtype=torch.float64, **options)
    ours = dm.ops.log_decay(f + bias.unflatten(0, (3, 16)), a_log, bound)
    agree(f"ops.log_decay{'' if bound is None else ', bounded'}", [ours], [want], [f, a_log, bias])


def test_as_shipped_in_float32(agree: Any) -> None:
    leaves = inputs(2, 3, 128, 16, 24, dtype=torch.float32)
    agree("ops.kda in float32, as shipped", chunkwise(leaves), theirs("naive_recurrent_kda", leaves), leaves, 5e-6)


def test_difference_naive_kda_rounds_float64_to_float32_and_depthmix_does_not(note: Any) -> None:
    leaves = inputs(2, 3, 128, 16, 24)
    lost = difference(chunkwise(leaves), theirs("naive_recurrent_kda", leaves))
    note("differs", "KDA: float64 input is computed in float32", lost)
    assert 1e-9 < lost < 1e-5


def test_difference_naive_chunk_kda_needs_whole_chunks_and_depthmix_does_not() -> None:
    leaves = inputs(1, 2, 65, 4, 4)
    with pytest.raises(AssertionError):
        theirs("naive_chunk_kda", leaves)
    assert difference(chunkwise(leaves), recurrent(leaves)) <= 1e-12
