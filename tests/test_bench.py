"""The benchmark: its arithmetic, its honesty and its command."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch

from depthmix.bench import Ratio, Size, kept_bytes_per_token, measure, ratio
from depthmix.bench.step import CONTROL
from depthmix.cli import bench, main


def test_variants_take_turns_in_rotating_order() -> None:
    calls: list[str] = []
    variants = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times = measure(variants, rounds=3, warmup=0)
    assert calls == [*"abc", *"bca", *"cab"]
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_ratios_are_paired_round_by_round() -> None:
    """A slow round slows both: the ratio does not notice."""
    times = {"plain": [1.0, 10.0, 2.0, 5.0], "other": [1.1, 11.0, 2.2, 5.5]}
    found = ratio(times, "other", "plain")
    assert found.median == pytest.approx(1.1)
    assert found.high - found.low < 1e-9
    assert ratio(times, "other", "plain", scale=2).median == pytest.approx(0.55)


def test_a_figure_whose_interval_straddles_its_bound_is_undecided() -> None:
    assert Ratio(1.04, 1.02, 1.06, 15).verdict(1.05) == "undecided"
    assert Ratio(1.02, 1.01, 1.03, 15).verdict(1.05) == "holds"
    assert Ratio(1.10, 1.08, 1.12, 15).verdict(1.05) == "fails"


def test_a_control_that_differs_from_itself_decides_nothing() -> None:
    found = {"residual": Ratio(1, 1, 1, 15), CONTROL: Ratio(1.05, 1.0, 1.1, 15), "mhc": Ratio(1.2, 1.19, 1.21, 15)}
    rows = {row.what: row for row in bench.rows_of("step", found, "×")}
    assert rows["mhc"].verdict == "undecided (control)"
    found[CONTROL] = Ratio(1.01, 1.0, 1.02, 15)
    assert {row.what: row for row in bench.rows_of("step", found, "×")}["mhc"].verdict == "holds"


def test_block_attnres_keeps_one_vector_a_sublayer_more_than_the_residual() -> None:
    size = Size(dim=64, depth=24, hidden=64, tokens=64)
    extra = kept_bytes_per_token("block_attnres", {"num_blocks": 8}, size) - kept_bytes_per_token("residual", {}, size)
    assert 0 < extra <= (size.depth + 2) * size.dim * 4 + 64 * size.depth


def test_measuring_memory_leaves_none_behind() -> None:
    size = Size(dim=64, depth=6, hidden=64, tokens=64)
    alive = []
    for _ in range(3):
        kept_bytes_per_token("block_attnres", {}, size)
        gc.collect()
        alive.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    assert alive[1] == alive[2]


def test_the_command_prints_figures_with_their_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", "--mixers", "block_attnres", "mhc", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    parts = {row["part"] for row in report["rows"]}
    assert parts == {"read", "growth", "step", "forward", "memory"}
    assert {"machine", "reads", "size", "rounds", "command"} <= set(report)
    assert all(row["figure"] > 0 for row in report["rows"])
    judged = {row["part"] for row in report["rows"] if row["verdict"]}
    assert judged <= {"memory"}, "small sizes say nothing about speed"


def test_no_figure_while_a_mechanism_is_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from depthmix.analysis.invariants import Check

    def red(*_: Any, **__: Any) -> list[Check]:
        return [Check("h is the sum of M v, every row", 1.0, 1e-12)]

    monkeypatch.setattr(bench, "verify", red)
    assert main(["bench", "--quick", "--mixers", "mhc"]) == 2
    captured = capsys.readouterr()
    assert "mhc is not right yet" in captured.err
    assert captured.out == ""


def test_an_unknown_mechanism_is_told_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--mixers", "mch"]) == 2
    assert "Did you mean" in capsys.readouterr().err
