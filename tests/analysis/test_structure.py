"""Ranks, starts and row sums: what the mixing matrices are, measured on independent random coefficients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import depthmix as dm
from depthmix.analysis.invariants import make_probe
from depthmix.mechanisms.base import rank_cap


def ranks(name: str, depth: int, dim: int = 16, seed: int = 0, **options: Any) -> set[int]:
    """Semiseparable ranks over tokens, heads and channels, each sublayer writing fresh noise."""
    probe = make_probe(name, options, dim=dim, depth=depth, tokens=(4,), seed=seed, spread=0.5)
    noise = torch.randn(depth, *probe.x.shape, dtype=probe.x.dtype)
    sublayers = [lambda h, i=i: noise[i] for i in range(depth)]
    return set(dm.trace(probe.stack, probe.x, sublayers).rank(tol=1e-9).unique().tolist())


@pytest.mark.parametrize("depth", [1, 2, 7, 16])
@pytest.mark.parametrize(
    ("name", "options"),
    [("residual", {}), ("scaled_residual", {}), ("highway", {}), ("highway", {"gate": "channel"})],
)
def test_one_stream_has_rank_one(name: str, options: dict[str, Any], depth: int) -> None:
    assert ranks(name, depth, **options) == {1}


@pytest.mark.parametrize("streams", [2, 3, 4, 6])
@pytest.mark.parametrize(
    ("name", "options"), [("hyper_connections", {"dynamic": False}), ("hyper_connections", {}), ("mhc", {})]
)
def test_m_streams_have_rank_m(name: str, options: dict[str, Any], streams: int) -> None:
    assert ranks(name, 16, streams=streams, **options) == {streams}


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
@pytest.mark.parametrize("rule", ["plain", "gated", "delta"])
def test_linear_attention_of_rank_r_has_rank_r(rule: str, rank: int) -> None:
    assert ranks("linear_attention", 16, rank=rank, rule=rule) == {rank}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("depth", [8, 11, 16, 23])
def test_block_attnres_has_the_rank_of_its_formula(size: int, depth: int) -> None:
    formula = max(min(1 + -(-k // size), depth + 1 - k) for k in range(depth + 1))
    assert ranks("block_attnres", depth, block_sublayers=size) == {formula}
    assert dm.DepthStack("block_attnres", dim=16, depth=depth, block_sublayers=size).facts.rank == formula


@pytest.mark.parametrize("depth", [1, 2, 5, 8, 15, 16])
@pytest.mark.parametrize("name", ["attnres", "delta_attnres"])
def test_attention_over_all_outputs_reaches_the_cap(name: str, depth: int) -> None:
    cap = (depth + 1 + 1) // 2  # n = L + 1 rows
    expected = 1 if name == "delta_attnres" and depth <= 1 else cap
    assert ranks(name, depth) == {expected}


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_window_keeps_the_embedding_and_w_outputs(window: int) -> None:
    assert ranks("attnres", 15, window=window) == {window + 1}


@pytest.mark.parametrize(("dim", "heads"), [(2, 1), (4, 1), (8, 4)])
def test_a_linear_kernel_factors_through_the_width_of_a_head(dim: int, heads: int) -> None:
    assert ranks("attnres", 15, dim=dim, heads=heads, mixing="linear") == {dim // heads}


@pytest.mark.parametrize("depth", [4, 5, 8, 13, 16])
@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_denseformer_has_the_rank_that_it_says(depth: int, period: int, size: int) -> None:
    said = dm.DepthStack("denseformer", dim=16, depth=depth, period=period, block_sublayers=size).facts.rank
    assert ranks("denseformer", depth, period=period, block_sublayers=size) == {said}


def test_mrla_light_has_rank_two_and_base_reaches_the_cap() -> None:
    assert ranks("mrla", 13) == {2}
    assert ranks("mrla", 13, form="base") == {rank_cap(13)}


def test_ordinary_rank_says_nothing() -> None:
    ones = torch.ones(9, 9, dtype=torch.float64).tril()
    assert torch.linalg.matrix_rank(ones) == 9
    assert dm.semiseparable_rank(ones) == 1


def test_the_mean_over_tokens_has_another_rank_than_the_tokens() -> None:
    probe = make_probe("highway", {}, depth=15, dim=16, tokens=(32,), spread=1.0)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    assert set(traced.rank().tolist()) == {1}
    assert dm.semiseparable_rank(traced.M.mean(0)) > 1


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 12), rank=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_semiseparable_rank_of_a_product_of_states_is_their_number(n: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(3, n, rank, generator=generator, dtype=torch.float64) for _ in range(2))
    assert set(dm.semiseparable_rank((q @ k.mT).tril(), tol=1e-9).tolist()) == {min(rank, (n + 1) // 2)}


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_only_maximal_blocks_are_needed(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randint(-1, 2, (n, n), generator=generator).double().tril()
    every = max(
        int(torch.linalg.matrix_rank(matrix[r:end, c : b + 1]))
        for r in range(n)
        for end in range(r + 1, n + 1)
        for b in range(r + 1)
        for c in range(b + 1)
    )
    assert int(dm.semiseparable_rank(matrix, tol=1e-9)) == every


def test_effective_rank_lies_between_one_and_the_rank() -> None:
    probe = make_probe("attnres", {}, depth=12, tokens=(5,))
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    assert (traced.effective_rank() >= 1 - 1e-9).all()
    assert (traced.effective_rank() <= traced.rank() + 1e-9).all()
    assert dm.effective_rank(torch.ones(6, 6).tril()) == pytest.approx(1)


def test_sinks_find_the_source_that_everyone_reads() -> None:
    n = 8
    uniform = torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None]
    drawn = uniform.clone()
    drawn[3:, 2] += 2
    assert dm.sinks(drawn).argmax() == 2
    assert torch.allclose(dm.sinks(torch.eye(n)), 1 / torch.arange(n, 0, -1.0))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 12])
@pytest.mark.parametrize("mixing", ["softmax", "sigmoid", "static"])
@pytest.mark.parametrize("name", ["attnres", "block_attnres"])
def test_zero_queries_compute_the_prenorm_network(name: str, mixing: str, size: int) -> None:
    options: dict[str, Any] = {"mixing": mixing} | ({"block_sublayers": size} if name == "block_attnres" else {})
    difference = prenorm_difference(name, options, eps=1e-12)
    assert difference <= 1e-9


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-2])
@pytest.mark.parametrize("mixing", ["softmax", "static"])
@pytest.mark.parametrize("name", ["attnres", "block_attnres"])
def test_scaled_by_the_number_of_sources_it_is_prenorm_at_any_eps(name: str, mixing: str, eps: float) -> None:
    assert prenorm_difference(name, {"mixing": mixing, "scale_by_count": True}, eps) <= 1e-12


def test_without_that_eps_is_what_is_left_over() -> None:
    assert prenorm_difference("attnres", {}, eps=1e-2) > 1e-3


@torch.no_grad()
def prenorm_difference(name: str, options: dict[str, Any], eps: float) -> float:
    """Between a fresh stack and the residual, at the head's normalised input; unit embedding and branches."""
    dim, depth = 16, 12
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(depth, dim, dim, generator=generator, dtype=torch.float64) / dim**0.5
    x = torch.randn(3, 5, dim, generator=generator, dtype=torch.float64)

    def norm(h: torch.Tensor) -> torch.Tensor:
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)

    sublayers = [lambda h, w=w: norm(h) @ w for w in weights]
    outs = [
        norm(dm.DepthStack(n, dim=dim, depth=depth, **o)(x, sublayers)) for n, o in ((name, options), ("residual", {}))
    ]
    return float((outs[0] - outs[1]).abs().max())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("denseformer", {}),
        ("denseformer", {"dilation": 2, "period": 2}),
        ("hyper_connections", {"dynamic": False}),
        ("hyper_connections", {"dynamic": True}),
        ("hyper_connections", {"readout": "learned"}),
        ("mhc", {"start": "prenorm"}),
        ("mhc", {"start": "parted"}),
        ("mhc", {"start": "prenorm", "readout": "learned"}),
        ("mhc_lite", {"start": "prenorm"}),
        ("mrla", {}),
        ("mrla", {"form": "base"}),
    ],
)
def test_m_is_one_at_the_start_with_the_output_row(name: str, options: dict[str, Any]) -> None:
    probe = make_probe(name, options, dim=12, depth=10, spread=0)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    assert (traced.M - torch.ones(11, 11, dtype=torch.float64).tril()).abs().max() <= 1e-12


def test_delta_rows_are_one_then_row_plus_two_then_ones() -> None:
    probe = make_probe("delta_attnres", {}, depth=9)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    want = torch.tensor([1.0, *(row + 2.0 for row in range(1, 9)), 10.0], dtype=torch.float64)
    assert (traced.row_sums() - want).abs().max() <= 1e-12
    assert (traced.M[..., -1, :] - 1).abs().max() <= 1e-12
    assert (traced.M[..., 0, 0] - 1).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["attnres", "block_attnres"])
def test_softmax_weights_sum_to_one(name: str) -> None:
    probe = make_probe(name, {"heads": 2}, depth=9)
    for c in dm.trace(probe.stack, probe.x, probe.sublayers).coefficients[1:]:
        assert (c.sum(-1) - 1).abs().max() <= 1e-12


def test_traffic_is_that_of_the_papers_table() -> None:
    """Table 1 of arXiv 2603.15031 at L = 128, N = 8, S = 16, m = 4, in widths: 3, 34, 24 and 5.5."""
    dim, depth = 1024, 128

    def traffic(name: str, **options: Any) -> float:
        facts = dm.DepthStack(name, dim=dim, depth=depth, **options).facts
        return (facts.reads + facts.writes) / dim

    m = 4
    assert traffic("residual") == 3
    with torch.device("meta"):
        assert traffic("mhc", streams=m) == pytest.approx(34 + (2 * m * m + 4 * m) / dim)
        assert traffic("block_attnres", num_blocks=8) == 5.5
        assert traffic("attnres", group_sublayers=16) == 24
        assert traffic("attnres") < 24


def test_query_norms_move_rows_away_from_the_plain_mean() -> None:
    """One gradient step from zero moves the queries and not yet the key weights."""
    probe = make_probe("block_attnres", {"block_sublayers": 2}, spread=0)
    probe.run().square().sum().backward()
    for mixer in list(probe.stack)[1:]:
        assert mixer.query.grad.abs().max() > 0
        assert mixer.key_weight.grad.abs().max() == 0
