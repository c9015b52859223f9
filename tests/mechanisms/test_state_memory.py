"""How wide a state is: at a cut, where its essential tensors are enough, and in a read; told and measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from depthmix.cli import main
from depthmix.mechanisms.state import StateSpec, state_widths
from depthmix.ops.memory import LiveBytes
from tests.cases import EVERY_MECHANISM


@torch.no_grad()
def measured_widths(stack: dm.DepthStack, tokens: int = 3) -> float:
    """The most that is alive while a sublayer runs, in widths per token, without the tensor that it was given."""
    x = torch.randn(tokens, stack.dim)
    highest = 0.0
    with LiveBytes() as live:

        def sublayer(h: Tensor) -> Tensor:
            nonlocal highest
            own = 0 if any(h is tensor for tensor in state) else h.nbytes  # the residual reads its state itself
            held = live.now + x.nbytes - own  # the embedding was made before
            highest = max(highest, held / (4 * tokens * stack.dim))
            return torch.tanh(h)

        state = stack.begin(x)
        for mixer in stack:
            h, carry = mixer.read(state)
            state = mixer.write(state, carry, sublayer(h))
            del h, carry
    return highest


@pytest.mark.parametrize("dim", [64, 96])
def test_block_attnres_is_nine_widths_at_a_cut_and_24_2_in_a_read_at_128_sublayers_in_8_blocks(dim: int) -> None:
    """In a read: embedding, 7 finished blocks and a partial; 15 mixtures of phase 1 to be used up, and as many
    log-sum-exps, which are numbers."""
    stack = dm.DepthStack("block_attnres", dim=dim, depth=128, num_blocks=8)
    assert stack.state_widths() == (9.0, 24 + 15 / dim)
    assert f"{stack.state_widths()[1]:.1f}" == "24.2"
    assert measured_widths(stack) == pytest.approx(24 + 16 / dim), "the log-sum-exps of a block share one storage"
    boundaries = [stack.spec(index).essential for index in range(16, 129, 16)]
    assert boundaries == [2, 3, 4, 5, 6, 7, 8, 9], "between blocks: the embedding and the finished ones"


@EVERY_MECHANISM
def test_what_is_alive_while_a_sublayer_runs_is_what_the_specs_say(name: str, options: Mapping[str, Any]) -> None:
    stack = dm.DepthStack(name, dim=64, depth=12, **options)
    at_cut, in_read = stack.state_widths()
    assert at_cut <= in_read
    assert at_cut == max(
        sum(math.prod(shape) for shape in stack.spec(i).shapes[: stack.spec(i).essential]) / 64 for i in range(13)
    )
    small = 12 * 24 / 64  # gates and weights, numbers per token, beside vectors
    # A sublayer's input is the last that is alive before the output's read, so the output's state may be wider.
    before_out = state_widths([stack.spec(index) for index in range(12)], 64)[1]
    assert before_out <= measured_widths(stack) <= in_read + small


def test_bytes_count_derived_numbers_as_float32() -> None:
    spec = StateSpec(((8,), (8,), (8,), ()), essential=2, sealed=1)
    assert spec.nbytes(torch.bfloat16, essential=True) == 32
    assert spec.nbytes(torch.bfloat16) == 52
    assert spec.nbytes(torch.float64) == 200


def test_list_and_show_print_both_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    wide = ["--dim", "64", "--depth", "128"]
    assert main(["show", "block_attnres", "--options", "num_blocks=8", *wide]) == 0
    printed = capsys.readouterr().out
    assert "9/24.2, at a cut / in a read" in " ".join(printed.split())
    assert main(["show", "block_attnres", "--options", "num_blocks=8", *wide, "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert (page["state_at_cut_in_widths"], page["state_in_read_in_widths"]) == (9, 24 + 15 / 64)
    assert page["cost"]["state_at_cut_bytes_per_token"] == 9 * 64 * 2
    assert page["cost"]["state_in_read_bytes_per_token"] == 24 * 64 * 2 + 15 * 4
    assert main(["list", *wide, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["residual"]["state_at_cut_in_widths"] == rows["residual"]["state_in_read_in_widths"] == 1
    assert rows["mhc"]["state_at_cut_in_widths"] == 4
    assert rows["depth_attention"]["state_at_cut_in_widths"] == 4, "keys and values of two layers"
    assert rows["value_residual"]["state_at_cut_in_widths"] == 1
    assert main(["list", "--dim", "64", "--depth", "24"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "7/10·D" in printed
    assert "4/4·K" in printed
    assert "up to" in printed, "a table of 80 columns holds every column"
