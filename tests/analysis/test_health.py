"""Health: every known failure is found where it is planted, with its figure, and a healthy run is good throughout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from depthmix.analysis.evidence import Evidence, numbers
from depthmix.analysis.health import SINK, UNIFORM, check_health

L = 12
N = L + 1
NAMES = ["embedding", *(f"output {i}" for i in range(1, N))]


def entropy_of(row: int, sharp: float) -> float:
    """Of a row whose newest source has `sharp` times the weight of each other one."""
    weights = [1.0] * row + [sharp]
    return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)


def line(sharp: float = 3.0, **changes: Any) -> dict[str, Any]:
    """A recording of a healthy run of full AttnRes."""
    shares = [sharp / (row + sharp) for row in range(N)]
    healthy = {
        "kind": "depth",
        "step": 100,
        "shares_of": "weights",
        "state_norm": [[1.0 + 0.1 * (i % 3)] for i in range(L)],
        "output_norm": [1.0 + 0.1 * (i % 3) for i in range(L)],
        "contribution": [0.5] * L,
        "read_norm": [1.0] * N,
        "weight_entropy": [entropy_of(row, sharp) for row in range(N)],
        "weight_spread": [0.1] * N,
        "locality": shares,
        "embedding_share": [1.0, *(1 / (row + sharp) for row in range(1, N))],
        "sinks": [1.2 * sum(1 / (r + 1) for r in range(i, N)) / (N - i) for i in range(N)],
        "query_norm": [0.5 + 0.01 * k for k in range(L)],
        "stream_distance": None,
    }
    return {**healthy, **changes}


def evidence(mechanism: str = "attnres", **changes: Any) -> Evidence:
    known = {"reads": [list(range(row + 1)) for row in range(N)], "names": NAMES, **changes}
    return Evidence(mechanism=mechanism, **{"lines": [line()], **known})


def levels(given: Evidence) -> dict[str, str]:
    return {health.name: health.level for health in check_health(given)}


def figure(given: Evidence, name: str) -> str:
    return next(health.figure for health in check_health(given) if health.name == name)


def planted(**changes: Any) -> Evidence:
    return evidence(lines=[line(), line(**changes)])


def test_a_healthy_run_is_good_throughout_and_asks_for_nothing() -> None:
    found = check_health(evidence())
    assert {health.level for health in found} == {"good"}
    assert {health.remedy for health in found} == {""}
    assert all(health.meaning and any(c.isdigit() for c in health.figure) for health in found)
    assert {"uniform reading", "dead queries", "dilution", "rounding"} <= {health.name for health in found}


def test_everything_that_is_not_good_says_what_to_do() -> None:
    sick = planted(sharp=1.0, query_norm=[0.0] * L, contribution=[1e-3] * L, output_norm=[20.0] + [1.0] * (L - 1))
    found = check_health(sick)
    assert [h.level for h in found] == sorted((h.level for h in found), key=["problem", "notice", "good"].index)
    assert sum(h.level == "problem" for h in found) >= 4
    assert all(h.remedy for h in found if h.level != "good")


def test_equal_weights_in_every_row_are_a_problem_and_in_most_a_notice() -> None:
    equal = planted(sharp=1.0)
    assert levels(equal)["uniform reading"] == "problem"
    assert figure(equal, "uniform reading").startswith(f"{L} of {L} rows within {UNIFORM} nats")
    some = [entropy_of(row, 1.0 if row < 10 else 5.0) for row in range(N)]
    assert levels(planted(weight_entropy=some))["uniform reading"] == "notice"
    few = [entropy_of(row, 1.0 if row < 4 else 5.0) for row in range(N)]
    assert levels(planted(weight_entropy=few))["uniform reading"] == "good"


def test_the_plain_residual_is_not_blamed_for_equal_weights() -> None:
    found = levels(evidence("residual", lines=[line(sharp=1.0, shares_of="M", query_norm=None)], reads=None))
    assert not {"uniform reading", "embedding as a sink", "dead queries"} & found.keys()
    assert found["dilution"] == "good"


def test_an_embedding_with_nearly_all_reading_is_told_from_one_with_much_and_from_a_later_sink() -> None:
    healthy = line()["sinks"]
    much = planted(sinks=[healthy[0] / 1.2 + SINK + 0.01, *healthy[1:]])
    assert levels(much)["embedding as a sink"] == "notice"
    assert levels(much)["sink in a later source"] == "good"
    nearly_all = planted(sinks=[0.93, *healthy[1:]])
    assert levels(nearly_all)["embedding as a sink"] == "problem"
    later = planted(sinks=[*healthy[:5], 0.7, *healthy[6:]])
    assert levels(later)["sink in a later source"] == "problem"
    assert levels(later)["embedding as a sink"] == "good"
    assert "output 5: 0.70" in figure(later, "sink in a later source")


def test_the_newest_sources_are_no_sinks() -> None:
    """Only one or two rows read them, so their share says nothing about all reading."""
    newest = [*line()["sinks"][:-2], 0.9, 0.9]
    assert levels(planted(sinks=newest))["sink in a later source"] == "good"


def test_a_first_output_of_ten_times_the_median_is_a_problem() -> None:
    for norm, level in ((2.0, "good"), (4.0, "notice"), (15.0, "problem")):
        norms = [norm] + [1.0] * (L - 1)
        assert levels(planted(output_norm=norms))["spike of an output"] == level
    assert "15 times the median" in figure(planted(output_norm=[15.0] + [1.0] * (L - 1)), "spike of an output")
    assert "‖v_2‖" in figure(planted(output_norm=[1.0, 15.0] + [1.0] * (L - 2)), "spike of an output")


def test_a_query_that_stays_at_zero_is_named_by_its_sublayer() -> None:
    norms = [0.5] * L
    norms[3] = 0.001
    dead = planted(query_norm=norms)
    assert levels(dead)["dead queries"] == "notice"
    assert "1 of 12 queries" in figure(dead, "dead queries")
    assert "(sublayer 5)" in figure(dead, "dead queries"), "row 1 is the first that has a query: it is of sublayer 2"
    assert "(the head)" in figure(planted(query_norm=[*[0.5] * (L - 1), 0.0]), "dead queries")
    assert levels(planted(query_norm=[0.0] * 5 + [0.5] * (L - 5)))["dead queries"] == "problem"


def test_queries_that_are_all_at_zero_are_a_problem_though_none_is_below_the_others() -> None:
    asleep = planted(query_norm=[1e-5] * L, sharp=1.0, weight_spread=[0.0] * N)
    assert levels(asleep)["dead queries"] == "problem"
    assert f"{L} rows give equal weights for every token" in figure(asleep, "dead queries")


def streams(**changes: Any) -> Evidence:
    """mHC, whose matrices have moved: shares of M, no queries."""
    common = {"shares_of": "M", "query_norm": None, "stream_distance": [0.6] * L}
    first = line(**{**common, "locality": [1 / (r + 1) for r in range(N)]})
    return evidence("mhc", lines=[first, line(**{**common, **changes})], reads=None, names=())


def test_streams_that_are_copies_of_one_another_are_a_problem() -> None:
    assert levels(streams())["collapsed streams"] == "good"
    assert levels(streams(stream_distance=[0.05] * L))["collapsed streams"] == "notice"
    assert levels(streams(stream_distance=[0.001] * L))["collapsed streams"] == "problem"
    assert "collapsed streams" not in levels(evidence()), "one stream cannot collapse"


def test_matrices_that_stay_the_identity_and_those_that_stay_at_their_start_are_told_apart() -> None:
    assert levels(streams())["matrices at their start"] == "good"
    assert levels(streams(sharp=1.0))["matrices at their start"] == "problem"
    still = streams()
    assert levels(dataclasses.replace(still, lines=[still.lines[1]] * 2))["matrices at their start"] == "notice"
    assert levels(dataclasses.replace(still, lines=still.lines[1:]))["matrices at their start"] == "unknown"


def test_late_outputs_that_vanish_in_the_state_are_dilution() -> None:
    for part, level in ((0.2, "good"), (0.03, "notice"), (0.002, "problem")):
        assert levels(planted(contribution=[0.5] * 9 + [part] * 3))["dilution"] == level


@pytest.mark.parametrize("bad", ["nan", "inf", math.nan])
def test_a_number_that_is_not_finite_is_a_problem_and_says_where(bad: object) -> None:
    sick = planted(gradient_norm=[0.1, bad])
    assert levels(sick)["range of numbers"] == "problem"
    assert figure(sick, "range of numbers") == "not finite: gradient norm"
    assert levels(evidence(trace={"finite": False}))["range of numbers"] == "problem"


def test_norms_near_the_end_of_float16_are_a_problem_there_only() -> None:
    large = planted(state_norm=[[300.0]] * L)
    assert levels(large)["range of numbers"] == "good"
    assert levels(dataclasses.replace(large, precision="float16"))["range of numbers"] == "problem"


def test_an_output_below_the_last_bit_of_bfloat16_is_lost_and_of_float32_is_not() -> None:
    small = planted(contribution=[0.5] * (L - 1) + [0.002])
    assert levels(small)["rounding"] == "good"
    assert levels(dataclasses.replace(small, precision="bfloat16"))["rounding"] == "problem"
    few = planted(contribution=[0.5] * (L - 1) + [0.02])
    assert levels(dataclasses.replace(few, precision="bfloat16"))["rounding"] == "notice"


def test_a_source_with_weight_but_without_size_is_lost_beside_a_large_one_in_bfloat16() -> None:
    M = [[1.0] * (row + 1) + [0.0] * (L - row) for row in range(N)]
    parts = [[*row] for row in M]
    parts[6][2] = 1e-3
    given = evidence(M=M, contribution=parts, precision="bfloat16")
    assert levels(given)["rounding"] == "problem"
    assert "1 sources with at least 0.05 of a row's weight" in figure(given, "rounding")
    assert levels(dataclasses.replace(given, precision="float32"))["rounding"] == "good"


def test_a_trace_is_used_before_the_last_recording() -> None:
    rows = {"entropy": [entropy_of(row, 1.0) for row in range(N)], "spread": [0.0] * N}
    magnitudes = {"output_norm": [12.0] + [1.0] * (L - 1), "contribution": [0.5] * L}
    given = evidence(trace={"rows": rows, "magnitudes": magnitudes, "sinks": [0.95, *[0.01] * L], "finite": True})
    found = levels(given)
    assert found["uniform reading"] == "problem"
    assert found["spike of an output"] == "problem"
    assert found["embedding as a sink"] == "problem"


def test_without_recordings_everything_is_unknown_and_says_how_to_record() -> None:
    found = check_health(Evidence(mechanism="attnres"))
    assert {health.level for health in found} == {"unknown"}
    assert all("depth_every" in health.remedy for health in found)


def test_shares_of_weights_need_the_list_of_sources() -> None:
    """Entropies of blocks are not held against the number of outputs."""
    assert levels(evidence(reads=[]))["uniform reading"] == "unknown"


@pytest.mark.parametrize("damage", [None, "nan", [], [None] * N, [[1.0]], {"a": 1}, 10**400, [True] * N])
def test_damaged_recordings_never_end_in_an_error(damage: object) -> None:
    for name in line():
        assert check_health(planted(**{name: damage}))
    assert check_health(evidence(trace={"rows": damage, "magnitudes": damage, "sinks": damage}))


def test_numbers_takes_anything() -> None:
    assert numbers([1, 2.5, 3]) == [1.0, 2.5, 3.0]
    assert all(map(math.isnan, numbers([None, "nan", True, [1.0], 10**400])))
    assert numbers("text") == []
    assert numbers([1.0], 2)[0] == 1.0
    assert math.isnan(numbers([1.0], 2)[1])
