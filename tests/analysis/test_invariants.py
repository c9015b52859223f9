"""The invariants of `depthmix verify`: they hold for every case, and they notice what is broken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import depthmix as dm
from depthmix.analysis.invariants import verify
from depthmix.mechanisms.highway import Highway
from depthmix.mechanisms.residual import Residual
from tests.cases import EVERY_CASE, EVERY_MECHANISM


def failed(name: Any, options: Any = None, **kwargs: Any) -> list[str]:
    return [f"{c.name}: {c.error:.1e} > {c.bound:.1e}" for c in verify(name, options, **kwargs) if not c.holds]


@EVERY_CASE
def test_every_invariant_holds_in_double_precision(name: str, options: dict[str, Any]) -> None:
    assert failed(name, options) == []


@EVERY_MECHANISM
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_invariant_holds_in_other_dtypes(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    assert failed(name, options, dtype=dtype) == []


@EVERY_MECHANISM
def test_every_invariant_holds_for_wider_and_deeper_stacks(name: str, options: dict[str, Any]) -> None:
    assert failed(name, options, dim=24, depth=13, tokens=(2,), spread=0.2) == []


class Forgetful(Residual):
    """Loses a little on every write: M is not what it says."""

    def update(self, state: dm.State, c: Any, v: torch.Tensor) -> dm.State:
        return (0.9 * state[0] + v,)


class ShortCut(Residual):
    """A fast path that computes something else."""

    def read(self, state: dm.State) -> tuple[torch.Tensor, Any]:
        return state[0] * 1.001, None


class Boastful(Highway):
    """Claims to start as PreNorm."""

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> dm.Facts:
        return dm.Facts(preserves_prenorm="exact", rank=1, parameters=depth * (dim + 1), reads=2 * dim, writes=dim)


class Idle(Residual):
    """Owns a parameter that nothing uses, and does not count it."""

    def __init__(self, site: dm.Site, config: Any) -> None:
        super().__init__(site, config)
        self.add_parameter("unused", 3)


class Leaky(Residual):
    """Mixes tokens."""

    def combine(self, state: dm.State, c: Any) -> torch.Tensor:
        return state[0] + 0.01 * state[0].mean(-2, keepdim=True) if state[0].dim() > 1 else state[0]


class Liar(Residual):
    """Calls its running stream sealed."""

    def spec(self, site: dm.Site) -> dm.StateSpec:
        return dm.StateSpec(((site.dim,),), essential=1, sealed=1)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (Forgetful, "starts as PreNorm"),
        (ShortCut, "read equals combine(coeff)"),
        (Boastful, "starts as PreNorm"),
        (Idle, "every parameter gets a gradient (missing: "),
        (Idle, "has 0 parameters"),
        (Leaky, "tokens are independent"),
        (Liar, "sealed tensors never change"),
    ],
)
def test_a_broken_mechanism_is_found_out(broken: type[dm.DepthMixer], complaint: str) -> None:
    assert any(complaint in line for line in failed(broken)), failed(broken)
