"""The formulas for parameters and cache of Kimi Linear give the published figures, and the sum over all its tensors."""

from __future__ import annotations

import pytest

from tests.reference import kimi_counts as counts

KIMI = counts.KIMI_LINEAR_48B
SCALING_LAW = {  # active without embeddings, in millions: plain, with attention residuals
    "194M": (193.57, 193.61),
    "241M": (240.59, 240.64),
    "296M": (295.57, 295.62),
    "436M": (435.73, 435.80),
    "528M": (528.24, 528.32),
}


def millions(model: counts.Model, *, attnres: bool = False) -> float:
    """Active parameters without embeddings, to two digits."""
    number = counts.active(model) - counts.embeddings(model) + (counts.attnres(model) if attnres else 0)
    return round(number / 1e6, 2)


def test_parts_of_kimi_linear_48b_have_the_published_sizes() -> None:
    assert counts.kda(KIMI) == 39_514_272
    assert counts.mla(KIMI) == 29_114_880
    assert (counts.expert(KIMI), counts.router(KIMI), counts.dense(KIMI)) == (7_077_888, 589_824, 63_700_992)
    assert counts.embeddings(KIMI) == 754_974_720


def test_kimi_linear_48b_has_48_billion_parameters_and_uses_3_billion_per_token() -> None:
    embeddings = counts.embeddings(KIMI)
    assert (counts.total(KIMI), counts.total(KIMI) - embeddings) == (49_122_675_072, 48_367_700_352)
    assert (counts.active(KIMI), counts.active(KIMI) - embeddings) == (3_484_453_248, 2_729_478_528)


def test_attention_residuals_add_a_query_and_a_key_weight_to_every_read_but_the_first() -> None:
    assert counts.attnres(KIMI) == 248_832
    assert counts.total(KIMI) + counts.attnres(KIMI) == 49_122_923_904
    assert counts.active(KIMI) + counts.attnres(KIMI) == 3_484_702_080


def test_mla_is_at_every_fourth_layer_and_at_the_last() -> None:
    assert [i + 1 for i, kind in enumerate(KIMI.attention) if kind == "mla"] == [4, 8, 12, 16, 20, 24, 27]
    assert counts.three_to_one(12)[-1] == "mla"
    assert counts.three_to_one(12).count("mla") == 3


@pytest.mark.parametrize("name", SCALING_LAW)
def test_the_sizes_of_the_scaling_law_are_their_names(name: str) -> None:
    model = counts.SCALING_LAW[name]
    plain, mixed = SCALING_LAW[name]
    assert millions(model) == plain
    assert millions(model, attnres=True) == mixed
    assert f"{plain:.0f}M" == f"{mixed:.0f}M" == name


@pytest.mark.parametrize("model", [KIMI, *counts.SCALING_LAW.values()], ids=["48B", *counts.SCALING_LAW])
def test_the_tensors_of_a_checkpoint_sum_to_the_total(model: counts.Model) -> None:
    biases = (len(model.attention) - model.dense_layers) * model.experts
    assert counts.elements(counts.shapes(model)) == counts.total(model) + biases


def test_kimi_linear_48b_is_20493_tensors() -> None:
    assert len(counts.shapes(KIMI)) == 20_493


def test_a_million_tokens_of_kimi_linear_48b_fit_in_8_gib() -> None:
    assert counts.cache_per_token(KIMI) == 8_064
    assert counts.cache_per_row(KIMI) == 20 * (2 * 2**20 + 72 * 2**10)
    assert counts.cache(KIMI, tokens=2**20) == 8_499_134_464
    assert counts.cache(KIMI, tokens=2**20) < 8 * 2**30
    assert counts.cache(KIMI, tokens=1000, rows=3) == 3 * counts.cache(KIMI, tokens=1000)
