"""docs/ranks.md: the ranks that the papers and this library give, and the indices of closed forms, measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import depthmix as dm
from depthmix.analysis.invariants import make_probe
from tests.decoders import some_tokens, tiny

PAGE = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text(encoding="utf-8")
TOL = 1e-9  # the least singular value that counts is above 1e-5 of the first, the next below 1e-14


def table() -> list[tuple[str, ...]]:
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in PAGE.splitlines() if line[:1] == "|"]
    return [row for row in rows if len(row) == 7 and row[0].isdigit()]


def random_matrix(name: str, depth: int, **options: int) -> Tensor:
    """M [n, n] of a stack with random queries over random sources."""
    generator = torch.Generator().manual_seed(depth)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    stack = dm.DepthStack(name, dim=16, depth=depth, **options).double()
    with torch.no_grad():
        for parameter_name, parameter in stack.named_parameters():
            if parameter_name.endswith("query"):
                parameter.copy_(0.15 * draw(*parameter.shape))
    outputs = draw(depth, 16)
    return dm.trace(stack, draw(16), [lambda _, v=v: v for v in outputs]).M


def ordinary_rank(M: Tensor) -> int:
    return int(torch.linalg.matrix_rank(M, rtol=TOL))


def measured(depth: int, size: int) -> tuple[str, ...]:
    """A row of the page's table."""
    M = random_matrix("block_attnres", depth, block_sublayers=size)
    blocks, rank = -(-depth // size), int(dm.semiseparable_rank(M, TOL))
    low, high = (depth, depth) if size == 1 else (blocks, blocks + size)
    says = str(depth) if size == 1 else f"{low} to {high}"
    holds = "yes" if low <= rank <= high else f"no, {rank} < {low}"
    return str(depth), str(size), str(blocks), str(ordinary_rank(M)), str(rank), says, holds


def test_the_table_of_ranks_is_what_is_measured() -> None:
    rows = table()
    assert len(rows) == 20
    assert rows == [measured(int(depth), int(size)) for depth, size, *_ in rows]


def test_the_lower_end_of_the_papers_range_holds_where_the_last_two_blocks_have_n_sublayers() -> None:
    for depth, size, blocks, _, rank, _, holds in table():
        L, S, N = int(depth), int(size), int(blocks)
        if S > 1:
            assert (holds == "yes") == (L - (N - 2) * S >= N)
            assert (holds == "yes") == (N <= 2 * S) or L % S
        assert int(rank) <= N + 1
        assert int(rank) == dm.DepthStack("block_attnres", dim=4, depth=L, block_sublayers=S).facts.rank


@pytest.mark.parametrize("depth", [4, 9, 24])
def test_full_attnres_has_ordinary_rank_l_without_the_heads_row_and_half_of_it_across_a_cut(depth: int) -> None:
    M = random_matrix("attnres", depth)
    assert ordinary_rank(M[:-1, :-1]) == depth
    assert ordinary_rank(M) == depth + 1
    assert int(dm.semiseparable_rank(M, TOL)) == (depth + 2) // 2


def test_ordinary_rank_says_the_same_of_the_residual() -> None:
    M = random_matrix("residual", 24)
    assert (ordinary_rank(M), int(dm.semiseparable_rank(M, TOL))) == (25, 1)


# Indices


def highway_product(gates: list[float], row: int, first_offset: int, past: int) -> list[float]:
    """g_i ∏_{j=i+first_offset}^{row−1+past} (1 − g_j) for i < row; gates begin with g_0 = 1."""
    found = []
    for i in range(row):
        product = gates[i]
        for j in range(i + first_offset, row + past):
            product *= 1 - gates[j]
        found.append(product)
    return found


def test_highways_product_runs_from_the_next_gate_to_the_last_that_was_written() -> None:
    probe = make_probe("highway", {}, depth=6, tokens=())
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    own = [1.0, *(float(gate) for _, gate in traced.coefficients[:-1])]
    later = [0.0, 0.0, *own[1:]]  # the other convention: g_l belongs to the step to h_l and is g_{l−1} here
    for row in range(1, 8):
        want = traced.M[row - 1, :row].tolist()
        assert highway_product(own, row, 1, 0) == pytest.approx(want, abs=1e-12)
        shifted = [later[i + 1] if i else 1.0 for i in range(row)]
        for i in range(row):
            for j in range(i + 2, row + 1):
                shifted[i] *= 1 - later[j]
        assert shifted == pytest.approx(want, abs=1e-12)
        assert sum(want) == pytest.approx(1, abs=1e-12)
    wrong = highway_product(own, 6, 1, 1)  # ∏ from i+1 to l
    assert abs(sum(wrong) - 1) > 0.05


@pytest.mark.parametrize("name", ["hyper_connections", "mhc", "mhc_lite"])
def test_the_product_of_hyper_connections_is_a_range_of_one_convention_and_one_matrix_off_in_a_mixture(
    name: str,
) -> None:
    probe = make_probe(name, {"streams": 3, "start": "prenorm"}, depth=6, tokens=())
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    sites, unit = traced.coefficients, torch.eye(3, dtype=torch.float64)
    A = [unit, *(c.transition.mT for c in sites[:-1])]  # A[k] of sublayer k; streams are rows, applied transposed
    alpha = [None, unit[0], *(c.read for c in sites[1:])]  # of row l
    beta = [torch.ones(3, dtype=torch.float64), *(c.gain for c in sites[:-1])]
    paper = [None, *A]  # its A_l is the transition of sublayer l − 1

    def entry(row: int, i: int, factors: list[Tensor]) -> Tensor:
        carried = beta[i]
        for factor in factors:  # the oldest acts first
            carried = factor.mT @ carried
        return alpha[row] @ carried

    def matrix(product: str) -> Tensor:
        M = torch.zeros_like(traced.M)
        for row in range(1, 8):
            for i in range(row):
                ours, theirs = A[i + 1 : row], paper[i + 2 : row + 1]
                factors = {"ours": ours, "theirs": theirs, "mixed up": paper[i + 1 : row + 1]}[product]
                M[row - 1, i] = entry(row, i, factors)
        return M

    torch.testing.assert_close(matrix("ours"), traced.M, rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix("theirs"), traced.M, rtol=0, atol=1e-12)
    wrong = float((matrix("mixed up") - traced.M).norm() / traced.M.norm())
    assert wrong > (0.1 if name == "hyper_connections" else 1e-3)  # the others start near the identity


def test_hyper_connections_read_as_query_key_and_position() -> None:
    """Identity transitions: q_l · k_i. One matrix for all: q_lᵀ A^(l−1−i) k_i, a rotation by the distance."""
    angle = torch.tensor(0.3, dtype=torch.float64)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    for transition in (torch.eye(2, dtype=torch.float64), turn, 0.8 * torch.eye(2, dtype=torch.float64)):
        probe = make_probe("hyper_connections", {"streams": 2, "dynamic": False}, depth=6, tokens=())
        with torch.no_grad():
            for mixer in probe.stack:
                mixer.alpha_r.copy_(transition.mT)  # applied transposed
        M = dm.trace(probe.stack, probe.x, probe.sublayers).M.detach()
        mixers = list(probe.stack)
        query = [*(m.alpha_m for m in mixers[1:]), torch.full((2,), 0.5, dtype=torch.float64)]  # of rows 2 … L+1
        key = [torch.ones(2, dtype=torch.float64), *(m.beta for m in mixers)]
        for row in range(2, 8):
            for i in range(row):
                position = torch.linalg.matrix_power(transition, row - 1 - i)
                want = (query[row - 2] @ position @ key[i]).detach()
                assert float(M[row - 1, i]) == pytest.approx(float(want), abs=1e-12)


@pytest.mark.parametrize("layers", [2, 5, 6])
def test_depth_attention_reads_the_first_and_the_middle_layer_and_no_other(layers: int) -> None:
    traced = dm.trace(tiny(layers=layers, kv_mixer="depth_attention"), some_tokens(1, 3))
    assert traced.values is not None
    weights = traced.values.abs().amin((0, 1, 2))  # [N, N] over tokens and heads: softmax gives no zero
    read = weights.tril(-1) > 0
    middle = layers // 2
    want = torch.zeros(layers, layers, dtype=torch.bool)
    want[1:, 0] = True
    want[middle + 1 :, middle] = True
    assert torch.equal(read, want)


def test_the_page_says_which_layers_depth_attention_reads() -> None:
    assert re.search(r"Depth-Attention\.\*\* .* two layers and no others: 0 and \$\\lfloor N/2 \\rfloor\$", PAGE)
