"""The paper's observations: each is seen where it is planted, not seen elsewhere, and never claimed from noise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from depthmix.report.document import make_document, open_folders
from depthmix.report.findings import Finding, check_findings
from depthmix.report.observations import Arm, Observation
from tests.report.conftest import STUDY

L = 12
N = L + 1
KINDS = ["attn", "mlp"] * (L // 2)
Weights = Callable[[int], list[float]]  # of a row with so many sources, the newest last


def equal(count: int) -> list[float]:
    return [1.0] * count


def diagonal(count: int) -> list[float]:
    return [1.0] * (count - 1) + [3.0 * count]


def with_embedding(count: int) -> list[float]:
    return [3.0 * count] + [1.0] * (count - 1)


def skipping(count: int) -> list[float]:
    return [1.0, *([4.0 * count] if count > 3 else []), *[1.0] * (count - 1 - (count > 3))]


def observation(
    seed: int,
    weights: Weights = equal,
    *,
    before_attention: Weights | None = None,
    block: int = 1,
    grows: float = 0.0,
    gradient: float = 1.0,
    noise: float = 0.0,
) -> Observation:
    """A run whose rows have these weights; blocks of `block` sublayers; norms of the state grow by exp(grows · l)."""
    chance = random.Random(f"{seed} {noise} {grows}")
    reads = [list(range(1 + -(-row // block))) for row in range(N)]
    table, M = np.zeros((N, 1 + -(-L // block))), np.zeros((N, N))
    locality, embedding, entropy = [], [], []
    for row in range(N):
        form = before_attention if before_attention and row < L and KINDS[row] == "attn" else weights
        raw = [w * math.exp(chance.gauss(0, noise)) for w in form(len(reads[row]))]
        shares = [w / sum(raw) for w in raw]
        table[row, reads[row]] = shares
        M[row, 0] = shares[0]
        for i in range(1, row + 1):
            M[row, i] = shares[-(-i // block)]
        locality.append(shares[-1])
        embedding.append(shares[0])
        entropy.append(-sum(s * math.log(s) for s in shares))
    inside = [(i % block) / 3 if block > 1 else 0.0 for i in range(L)]
    line = {
        "locality": locality,
        "embedding_share": embedding,
        "weight_entropy": entropy,
        "output_norm": [1.0] * L,
        "state_norm": [[math.exp(grows * i + inside[i] + chance.gauss(0, noise / 10))] for i in range(L)],
        "gradient_norm": [gradient ** (i / L) * math.exp(chance.gauss(0, noise / 10)) for i in range(L)],
    }
    partial = [block > 1 and row > 0 and row % block != 0 for row in range(N)]
    counts = [len(row) for row in reads]
    fields = {"kinds": KINDS, "counts": counts, "reads": reads, "partial": partial}
    return Observation(seed=seed, line=line, M=M, weights=table, **fields)  # type: ignore[arg-type]


def arm(mechanism: str, seeds: int = 3, **form: object) -> Arm:
    observations = [observation(seed, noise=0.02, **form) for seed in range(seeds)]  # type: ignore[arg-type]
    return Arm(label=mechanism, mechanism=mechanism, depth=L, dim=16, observations=observations)


def verdicts(*arms: Arm) -> dict[str, str]:
    return {finding.claim: finding.verdict for finding in check_findings(arms) or []}


def found(words: str, *arms: Arm) -> Finding:
    (finding,) = [f for f in check_findings(arms) or [] if words in f.claim]
    return finding


@pytest.mark.parametrize(
    ("words", "there", "absent", "verdict"),
    [
        ("diagonal", diagonal, with_embedding, "not seen"),
        ("skip to a distant", skipping, equal, "not seen"),
        ("embedding stays a source", with_embedding, diagonal, "not seen"),
    ],
)
@pytest.mark.parametrize("mechanism", ["attnres", "block_attnres"])
def test_what_rows_read_is_seen_where_it_is_planted(
    words: str, there: Weights, absent: Weights, verdict: str, mechanism: str
) -> None:
    assert found(words, arm(mechanism, weights=there)).verdict == "seen"
    assert found(words, arm(mechanism, weights=absent)).verdict == verdict


def test_more_of_the_embedding_before_attention_and_its_opposite() -> None:
    words = "more of the embedding before attention"
    assert found(words, arm("attnres", weights=equal, before_attention=with_embedding)).verdict == "seen"
    assert found(words, arm("attnres", weights=with_embedding, before_attention=equal)).verdict == "opposite"
    assert found(words, arm("attnres", weights=equal)).verdict == "unclear", "the order of rows alone is no difference"


def test_equal_weights_are_not_taken_for_sharper_reads_before_mlps() -> None:
    words = "sharper reads before MLPs"
    assert found(words, arm("attnres", weights=with_embedding, before_attention=equal)).verdict == "seen"
    assert found(words, arm("attnres", weights=equal, before_attention=diagonal)).verdict == "opposite"
    finding = found(words, Arm(label="a", mechanism="attnres", depth=L, dim=1, observations=[observation(0)]))
    assert finding.verdict == "unclear"
    assert "+0.000" in finding.figure.replace("-0.000", "+0.000")


def test_a_pattern_that_blocks_keep_is_told_from_one_that_they_do_not() -> None:
    full = arm("attnres", weights=with_embedding)
    assert found("keeps the pattern", arm("block_attnres", weights=with_embedding, block=3), full).verdict == "seen"
    assert found("keeps the pattern", arm("block_attnres", weights=diagonal, block=3), full).verdict == "not seen"
    finding = found("keeps the pattern", arm("block_attnres", weights=with_embedding, block=3), full)
    assert "among outputs alone" in finding.figure
    assert "two seeds of Full have 1.00" in finding.figure


def test_sharper_blocks_are_told_from_sharper_outputs() -> None:
    sharp, flat = {"weights": with_embedding}, {"weights": equal}
    words = "more sharply than Full"
    assert found(words, arm("block_attnres", **sharp, block=3), arm("attnres", **flat)).verdict == "seen"
    assert found(words, arm("block_attnres", **flat, block=3), arm("attnres", **sharp)).verdict == "opposite"


def test_a_growing_stream_and_bounded_blocks() -> None:
    block, base = arm("block_attnres", block=3), arm("residual", grows=0.2)
    assert found("stream grows", block, base).verdict == "seen"
    bounded = found("bounds the state", block, base)
    assert bounded.verdict == "seen"
    assert "falls at 1.00" in bounded.figure
    assert found("bounds the state", arm("block_attnres", block=3, grows=0.4), base).verdict == "opposite"
    assert found("stream grows", block, arm("residual", grows=-0.2)).verdict == "opposite"


def test_a_state_that_is_bounded_but_does_not_restart_is_unclear() -> None:
    rising = arm("block_attnres", block=3, grows=0.8)  # the next block begins above the end of the one before
    assert found("bounds the state", rising, arm("residual", grows=1.2)).verdict == "unclear"


def test_flatter_gradients_count_in_either_direction_of_the_slope() -> None:
    base = arm("residual", gradient=4.0)
    assert found("gradients are flatter", arm("attnres", gradient=1.1), base).verdict == "seen"
    assert found("gradients are flatter", arm("attnres", gradient=0.9), base).verdict == "seen"
    assert found("gradients are flatter", arm("attnres", gradient=20.0), base).verdict == "opposite"
    assert found("gradients are flatter", arm("attnres", gradient=0.25), base).verdict == "unclear"


def test_one_seed_has_no_interval_and_needs_a_margin() -> None:
    finding = found("diagonal", arm("attnres", seeds=1, weights=diagonal))
    assert finding.verdict == "seen"
    assert "one seed" in finding.figure
    assert "one seed, no interval" in finding.note
    slight = found("diagonal", arm("attnres", seeds=1, weights=lambda n: [1.0] * (n - 1) + [1.05]))
    assert slight.verdict == "unclear"


def test_seeds_that_disagree_are_unclear() -> None:
    seeds = [observation(s, diagonal if s % 2 else with_embedding) for s in range(4)]
    mixed = Arm(label="a", mechanism="attnres", depth=L, dim=1, observations=seeds)
    assert found("diagonal", mixed).verdict == "unclear"


def test_claims_need_their_arms_at_one_size() -> None:
    assert check_findings([arm("residual"), arm("mhc")]) == check_findings([arm("residual")])
    assert not any("Block" in claim for claim in verdicts(arm("attnres"), arm("residual")))
    other = Arm(label="a", mechanism="block_attnres", depth=L, dim=99, observations=[observation(0, block=3)])
    assert not any("keeps the pattern" in claim for claim in verdicts(arm("attnres"), other))
    assert check_findings([]) is None
    assert check_findings([arm("mhc")]) is None


def test_the_published_study_is_judged_as_its_page_was_by_hand() -> None:
    """docs/results/first_study.md, "What the depth learned": the same runs, read by people."""
    judged = {f["claim"]: f for f in make_document(open_folders([STUDY]), "c")["findings"]}

    def verdict(words: str) -> set[str]:
        return {finding["verdict"] for claim, finding in judged.items() if words in claim}

    assert verdict("diagonal dominance") == {"not seen"}
    assert verdict("embedding stays a source") == {"seen"}
    assert verdict("more of the embedding before attention") == {"opposite"}
    assert verdict("sharper reads before MLPs") == {"seen"}
    assert verdict("stream grows") == verdict("bounds the state") == verdict("gradients are flatter") == {"seen"}
    full = next(f for claim, f in judged.items() if claim.startswith("Full AttnRes: the newest"))
    runs = json.loads((STUDY / "comparison.json").read_text())["runs"]
    shares = [sum(r["depth"]["locality"][1:-1]) / 23 for r in runs if r["arm"] == "attnres"]
    assert f"its share is {sum(shares) / 5:.3f} where" in full["figure"]


def test_the_study_with_another_optimiser_is_judged_on_its_own(tmp_path: Path) -> None:
    judged = make_document(open_folders([STUDY.parent / "first_study_adamw"]), "c")["findings"]
    gradients = {f["claim"]: f["verdict"] for f in judged if "gradients" in f["claim"]}
    assert set(gradients.values()) == {"unclear"}, "three seeds that lie far apart"
