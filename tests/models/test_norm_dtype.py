"""Under autocast a norm's input is bfloat16 and its weight float32: computed in float32, without a warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import depthmix as dm
from depthmix.training import train
from tests.decoders import FORMS, some_tokens, tiny
from tests.runs import tiny_run


@pytest.fixture
def every_warning() -> Iterator[list[warnings.WarningMessage]]:
    """torch tells most of its warnings once in a process; here each time."""
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found
    torch.set_warn_always(False)


def words(found: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in found]


@pytest.mark.parametrize("mixer", dm.list_mechanisms())
@pytest.mark.parametrize("key_norm", ["before_rope", "after_rope"])
def test_a_step_under_autocast_warns_of_nothing(
    mixer: str, key_norm: str, every_warning: list[warnings.WarningMessage]
) -> None:
    model = tiny("moe", torch.float32, layers=1, mixer=mixer, kv_mixer="depth_attention", key_norm=key_norm).train()
    with torch.autocast("cpu", torch.bfloat16):
        model.loss(some_tokens(2, 8)).backward()
    assert words(every_warning) == []


@pytest.mark.parametrize("form", FORMS)
def test_a_bfloat16_model_warns_of_nothing(form: str, every_warning: list[warnings.WarningMessage]) -> None:
    tiny(form, torch.bfloat16)(some_tokens(2, 8))
    assert words(every_warning) == []


def test_a_bfloat16_run_warns_of_nothing(tmp_path: Path, every_warning: list[warnings.WarningMessage]) -> None:
    train(tiny_run(tmp_path / "run", run__precision="bfloat16", run__steps=2))
    assert words(every_warning) == []


def test_the_norms_of_queries_and_keys_compute_in_float32() -> None:
    """Bit for bit float32's result, rounded once."""
    attention = tiny("dense", torch.float32).sublayers[0]
    x = torch.randn(3, 4, 5, attention.head_dim).bfloat16()
    for norm in (attention.q_norm, attention.k_norm):
        with torch.autocast("cpu", torch.bfloat16):
            found = norm(x)
        assert found.dtype == torch.bfloat16
        exact = nn.functional.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.eps)
        assert torch.equal(found, exact.bfloat16())
        assert not torch.equal(found, nn.functional.rms_norm(x, x.shape[-1:], norm.weight.bfloat16(), norm.eps))
