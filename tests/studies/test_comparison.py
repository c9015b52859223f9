"""Comparisons: intervals that hold what they promise, speed-ups, crossings, verdicts, pages."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from depthmix.analysis.statistics import POWER, estimate, interpolate, ratio, student
from depthmix.cli.compare import print_comparison
from depthmix.studies.comparison import Row, Run, compare, crossings, needed, reached, read_run, speed_up
from depthmix.studies.comparison_figures import draw_comparison
from depthmix.studies.comparison_page import render
from depthmix.studies.page import Provenance

ABOUT = Provenance(command="depthmix compare", machine="a machine", data="stdlib")


def curve(tokens: float, gain: float = 0.0, speed: float = 1.0) -> float:
    """A loss that falls like a real one; `gain` at every point, tokens worth `speed` of the plain ones."""
    return 1.2 + 3 * (1 + speed * tokens / 1e5) ** -0.4 - gain


def run(
    arm: str,
    seed: int,
    *,
    gain: float = 0.0,
    speed: float = 1.0,
    pace: float = 1e4,
    noise: float = 0.0,
    points: int = 20,
) -> Run:
    """One run of 1e6 tokens; noise of the pair in common, and of the arm alone."""
    tokens = [1e6 * (k + 1) / points for k in range(points)]
    shared = random.Random(f"seed {seed}").gauss(0, 0.05)
    own = random.Random(f"{arm} {seed}").gauss(0, noise) if noise else 0.0
    return Run(
        arm=arm,
        seed=seed,
        tokens=tuple(tokens),
        seconds=tuple(t / pace for t in tokens),
        losses=tuple(curve(t, gain, speed) + shared + own for t in tokens),
        flops=6e12,
        tokens_per_second=pace,
        memory_bytes=1e8,
        parameters=1_000_000,
        lr=1e-3,
    )


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227)]
)
def test_students_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert student(0.95, freedom) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_interval_holds_the_true_difference_95_times_in_100(n: int) -> None:
    source, trials = random.Random(n), 4000
    held = 0
    for _ in range(trials):
        found = estimate([source.gauss(-0.02, 0.005) for _ in range(n)])
        held += not found.excludes(-0.02)
    assert held / trials == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / trials))


@pytest.mark.parametrize("n", [3, 5])
def test_the_smallest_visible_difference_is_seen_as_often_as_told(n: int) -> None:
    """Told from the spread of a study, which is itself uncertain: averaged over studies, not for each."""
    source, trials, sd = random.Random(n), 4000, 0.005
    error = sd / math.sqrt(n)
    planted = (student(0.95, n - 1) + student(2 * POWER - 1, n - 1)) * error
    found = [estimate([source.gauss(planted, sd) for _ in range(n)]) for _ in range(trials)]
    assert sum(e.excludes(0) for e in found) / trials == pytest.approx(POWER, abs=0.06)
    told = math.sqrt(statistics.mean((e.visible or 0.0) ** 2 for e in found))  # the spread is unbiased in its square
    assert told == pytest.approx(planted, rel=0.05)


def test_a_planted_difference_is_found_with_its_size_and_sign() -> None:
    runs = [run(arm, seed, gain=gain, noise=0.001) for seed in range(4) for arm, gain in (("base", 0), ("arm", 0.03))]
    (row,) = compare(runs, {"arm": "base"}).rows
    assert row.difference is not None
    assert row.difference.excludes(0)
    assert row.difference.mean == pytest.approx(-0.03, abs=0.003)
    assert "lower than base's" in row.verdict
    assert "no difference" not in row.verdict
    (other,) = compare(runs, {"base": "arm"}).rows
    assert "higher than arm's" in other.verdict


def test_pairing_removes_what_a_seed_does_to_both() -> None:
    """Seeds move both arms by fifty times the difference; between unpaired means it would drown."""
    runs = [run(arm, seed, gain=gain, noise=1e-5) for seed in range(3) for arm, gain in (("base", 0), ("arm", 0.001))]
    (row,) = compare(runs, {"arm": "base"}).rows
    assert row.difference is not None
    assert row.difference.excludes(0)


def test_noise_alone_is_no_difference_and_says_what_could_have_been_seen() -> None:
    runs = [run(arm, seed, noise=0.004) for seed in range(3) for arm in ("base", "arm")]
    (row,) = compare(runs, {"arm": "base"}).rows
    assert row.difference is not None
    assert row.difference.visible is not None
    assert "no difference from base was found" in row.verdict
    assert f"a true difference of {row.difference.visible:.4f} would be detected with 80% power" in row.verdict


def test_equal_runs_differ_by_exactly_nothing() -> None:
    pairs = [run(arm, seed) for seed in range(3) for arm in ("base", "arm")]
    (row,) = compare(pairs, {"arm": "base"}).rows
    assert row.difference is not None
    assert (row.difference.mean, row.difference.low, row.difference.high) == (0, 0, 0)
    assert "no difference from base; the final losses are bitwise equal in 3 seeds" in row.verdict
    assert row.speed_ups["tokens"] is not None
    assert row.speed_ups["tokens"].mean == pytest.approx(1, abs=1e-12)
    assert row.crossings["tokens"] == []


def test_one_seed_makes_no_statement_about_significance() -> None:
    (row,) = compare([run("base", 0), run("arm", 0, gain=0.5)], {"arm": "base"}).rows
    assert row.difference is not None
    assert row.difference.low is None
    assert "its final loss is 0.5000 lower than base's (one seed, so no statement about significance)" in row.verdict


def test_only_seeds_that_both_have_are_compared() -> None:
    runs = [run("base", 0), run("base", 1), run("arm", 1, gain=0.1), run("arm", 2)]
    (row,) = compare(runs, {"arm": "base"}).rows
    assert row.seeds == (1,)
    (alone,) = compare(runs, {"other": "base"}).rows
    assert "other: no statement, because it and base have no completed seed in common" in alone.verdict


def test_a_token_that_is_worth_more_is_found_out_and_so_is_its_price() -> None:
    """Tokens worth 1.5 of the baseline's at half the pace: 1.5 by tokens, 0.75 by the clock."""
    runs = [
        r
        for seed in range(3)
        for r in (run("base", seed, points=200), run("arm", seed, speed=1.5, pace=5e3, points=200))
    ]
    pairs = [(runs[2 * k + 1], runs[2 * k]) for k in range(3)]
    by_tokens, by_clock = speed_up(pairs, "tokens"), speed_up(pairs, "seconds")
    assert by_tokens is not None
    assert by_clock is not None
    assert by_tokens.mean == pytest.approx(1.5, rel=1e-3)
    assert by_clock.mean == pytest.approx(0.75, rel=1e-3)
    assert needed(pairs, "tokens") is None, "the baseline never has the arm's loss: beyond the run"
    back = [(base, arm) for arm, base in pairs]
    assert needed(back, "tokens") == pytest.approx(1e6 / 1.5, rel=1e-3)


def rendered(runs: list[Run], baselines: dict[str, str]) -> str:
    return render(compare(runs, baselines), {}, ABOUT, {}, Path())


@pytest.mark.parametrize("gain", [0.2, -0.2], ids=["better", "worse"])
def test_one_validation_cannot_tell_what_a_token_is_worth(gain: float) -> None:
    """Where the better run passed the other's final loss was not looked at: no factor of 1.00."""
    arms = (("base", 0.0), ("arm", gain))
    runs = [run(arm, seed, gain=more, noise=0.001, points=1) for seed in range(3) for arm, more in arms]
    compared = compare(runs, {"arm": "base"})
    (row,) = compared.rows
    assert row.difference is not None
    assert row.difference.excludes(0)
    assert "and one of its tokens is worth" not in row.verdict
    assert "what a token is worth cannot be determined (a run was validated only once)" in row.verdict
    told = json.loads(json.dumps(compared.to_dict()))["rows"][0]
    assert told["speed_ups"] == {"tokens": None, "seconds": None, "flops": None}
    assert told["needed"] == {"tokens": None, "seconds": None, "flops": None}
    assert told["unknown"] == "a run was validated only once"
    page = rendered(runs, {"arm": "base"})
    needed_words = "beyond the run" if gain > 0 else "cannot tell"
    assert f"| arm | base | cannot tell | cannot tell | cannot tell | {needed_words} | cannot tell |" in page
    assert "arm: cannot tell, because a run was validated only once. Validate more often" in page
    assert "1.000×" not in page.partition("## Effective speed-up")[2]


def test_a_loss_reached_before_the_first_validation_cannot_tell_either() -> None:
    """Two validations, both of the better run below the other's final loss."""
    runs = [run(arm, seed, gain=gain, points=2) for seed in range(3) for arm, gain in (("base", 0), ("arm", 0.9))]
    (row,) = compare(runs, {"arm": "base"}).rows
    assert row.unknown == "a run had reached the other's final loss before its first validation"
    assert row.speed_ups["tokens"] is None
    (back,) = compare(runs, {"base": "arm"}).rows
    assert back.needed["tokens"] is None
    assert "cannot tell" in rendered(runs, {"base": "arm"})
    (visible,) = compare([run(a, 0, gain=g, points=2) for a, g in (("base", 0), ("arm", 0.1))], {"arm": "base"}).rows
    assert visible.unknown == ""
    assert visible.speed_ups["tokens"] is not None


def test_a_curve_reaches_a_loss_for_good_between_its_points() -> None:
    xs, losses = [1.0, 2.0, 3.0, 4.0], [5.0, 3.0, 4.0, 2.0]
    assert reached(3.5, xs, losses) == pytest.approx(3.25), "not at 1.75, from where it rises again"
    assert reached(1.9, xs, losses) is None
    assert reached(9.0, xs, losses) == 1.0
    assert interpolate(2.5, xs, losses) == 3.5


def test_curves_cross_where_they_were_made_to() -> None:
    base = run("base", 0, points=100)
    tilted = [loss + 0.2 * (0.6 - t / 1e6) for t, loss in zip(base.tokens, base.losses, strict=True)]
    arm = Run(**{**vars(base), "arm": "arm", "losses": tuple(tilted)})
    (crossing,) = crossings([(arm, base)], "tokens")
    assert crossing.at == pytest.approx(6e5, rel=1e-6)
    assert crossing.ahead == "arm"
    (other,) = crossings([(base, arm)], "tokens")
    assert other.ahead == "arm"


def test_noise_around_nothing_is_no_crossing() -> None:
    pairs = []
    for seed in range(4):
        source = random.Random(seed)
        base = run("base", seed, points=40)
        noisy = Run(**{**vars(base), "arm": "arm", "losses": tuple(x + source.gauss(0, 0.01) for x in base.losses)})
        pairs.append((noisy, base))
    assert len(crossings(pairs, "tokens")) <= 2, "each point excludes 0 by chance one time in twenty"
    assert len(crossings(pairs[:1], "tokens")) > 5


def test_speed_is_undecided_where_a_control_or_the_seeds_say_so() -> None:
    """The machine was slower by 5 % whenever the control ran; then it was slow for one seed of the arm."""

    def row(control: float, paces: Sequence[float]) -> Row:
        runs = [run(a, s, pace=1e4 * p) for s in range(3) for a, p in (("base", 1), ("base again", control))]
        runs += [run("arm", s, pace=1e4 * p) for s, p in enumerate(paces)]
        return compare(runs, {"base again": "base", "arm": "base"}, ["base again"]).rows[1]

    assert row(0.98, (0.8, 0.81, 0.82)).undecided == ""
    assert "0.81 times base's tokens/s" in row(0.98, (0.8, 0.81, 0.82)).verdict
    off = row(0.95, (0.8, 0.81, 0.82))
    assert off.undecided == "a control differs by 0.05"
    assert "tokens/s: undecided (a control differs by 0.05)" in off.verdict
    assert "times base's tokens/s" not in off.verdict
    assert row(1.0, (0.8, 0.6, 0.82)).undecided == "0.60 to 0.82 across seeds"


def test_ratios_are_paired_and_geometric() -> None:
    found = ratio([2.0, 8.0], [1.0, 1.0])
    assert found.mean == pytest.approx(4)
    assert found.values == pytest.approx((2, 8))
    assert found.low is not None
    assert found.high is not None
    assert found.low * found.high == pytest.approx(16)


@pytest.mark.parametrize(
    "arm", ["attnres", "hyper_connections+depth_attention", "block_attnres+value_residual block_sublayers=2 lr=0.001"]
)
def test_the_console_says_what_the_page_says_in_80_columns(arm: str, capsys: pytest.CaptureFixture[str]) -> None:
    arms = (("residual", 0.0, 1e4), ("residual again", 0.0, 1.01e4), (arm, 0.03, 8e3))
    runs = [run(name, s, gain=g, noise=0.001 * (g > 0), pace=p) for s in range(3) for name, g, p in arms]
    found = compare(runs, {"residual again": "residual", arm: "residual"}, ["residual again"])
    print_comparison(found, {}, Path("comparison.md"))
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert all(word in out.split() for word in arm.split()), "no name is broken"
    said, page = " ".join(out.split()), render(found, {}, ABOUT, {}, Path())
    for row in found.rows:
        assert row.verdict in page
        assert row.verdict in said
    difference, speed, worth = (e for e in (row.difference, row.tokens_per_second, row.speed_ups["tokens"]))
    assert difference is not None
    assert speed is not None
    assert worth is not None
    assert f"(95% interval {difference.low:+.4f} to {difference.high:+.4f}, 3 seeds)" in row.verdict
    assert f"0.80 times residual's tokens/s (95% interval {speed.low:.2f} to {speed.high:.2f})" in row.verdict
    words = f"and one of its tokens is worth {worth.mean:.2f} of residual's"
    assert f"{words} (95% interval {worth.low:.2f} to {worth.high:.2f})" in row.verdict
    for caveat in (
        "Each 95% interval holds on its own: with 2 arms,",
        "Control: residual, trained again, differs from itself by 0.01 in tokens/s.",
    ):
        assert caveat in page
        assert caveat in said


def test_without_a_control_the_console_and_the_page_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare([run("base", 0), run("arm", 0, gain=0.5)], {"arm": "base"})
    print_comparison(found, {}, Path("comparison.md"))
    caveat = "No control: nothing shows how much tokens/s vary on this machine by themselves."
    assert caveat in " ".join(capsys.readouterr().out.split())
    assert caveat in render(found, {}, ABOUT, {}, Path())


def test_runs_that_cannot_be_compared_are_named() -> None:
    broken = Run(**{**vars(run("arm", 0)), "losses": (float("nan"),) * 20})
    with pytest.raises(ValueError, match="arm, seed 0: a validation loss is not finite"):
        compare([broken], {})
    with pytest.raises(ValueError, match="arm has two runs with seed 0"):
        compare([run("arm", 0), run("arm", 0)], {})


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"kind": "train", "step": 1, "tokens": 10, "loss": 5.0},
        {"kind": "validation", "step": 1, "tokens": 10, "seconds": 1.0, "loss": 4.0, "bits_per_byte": 5.8},
        {"kind": "validation", "step": 2, "tokens": 20, "seconds": 2.0, "loss": 3.0, "bits_per_byte": 4.3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"flops": 60, "tokens_per_second": 10.0, "peak_memory_bytes": 5, "parameters": 7}
    (tmp_path / "result.json").write_text(json.dumps(result))
    found = read_run(tmp_path, arm="arm", seed=3, lr=1e-3)
    assert (found.tokens, found.losses, found.final) == ((10, 20), (4, 3), 3)
    assert found.axis("flops") == [30, 60]


def page_of(tmp_path: Path, gains: Sequence[float], seeds: int, failures: dict[str, str] | None = None) -> str:
    arms = ["residual", *(f"arm {k}" for k in range(1, len(gains)))]
    runs = [run(a, s, gain=g, noise=0.002) for s in range(seeds) for a, g in zip(arms, gains, strict=True)]
    found = compare(runs, dict.fromkeys(arms[1:], "residual"))
    sweeps = {arm: {1e-3: 2.0, 2e-3: 1.9, 4e-3: None} for arm in arms}
    figures = draw_comparison(found, sweeps, tmp_path / "figures")
    about = Provenance(command=ABOUT.command, machine="a machine", data="stdlib", failures=failures or {})
    return render(found, sweeps, about, figures, tmp_path)


def test_the_page_tells_all_and_its_pictures_exist(tmp_path: Path) -> None:
    page = page_of(tmp_path, [0, 0.03, 0], 3, {"arm 9, seed 0": "ended by SIGKILL"})
    links = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert sorted(links) == [f"figures/{n}.png" for n in ("differences", "learning_rates", "seconds", "tokens")]
    for link in links:
        assert (tmp_path / link).read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "figures").glob(".*"))
    for words in (
        "beyond the run",
        "arm 9, seed 0: ended by SIGKILL",
        "**1.9000**",
        "failed",
        "tokens/s",
        "peak memory",
    ):
        assert words in page
    tables = re.findall(r"(?:^\|.*\n)+", page, re.M)
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1, "as many cells in every line"


def test_what_is_undecided_is_not_on_the_page_as_a_number(tmp_path: Path) -> None:
    runs = [run(a, s, gain=g, pace=1e4 * p) for s in (0, 1) for a, g, p in (("a", 0, 1), ("b", 0, 1.07), ("c", 0.1, 3))]
    page = render(compare(runs, {"b": "a", "c": "a"}, ["b"]), {}, ABOUT, {}, tmp_path)
    (line,) = re.findall(r"^\| c \| a \| undecided.*$", page, re.M)
    assert "undecided (a control differs by 0.07)" in line
    assert "3.000×" not in page
    assert "`depthmix bench`" in page


def test_curves_that_cross_often_are_told_by_their_last_crossing(tmp_path: Path) -> None:
    base = run("base", 0, points=10)
    wave = [loss + 0.1 * (-1) ** k for k, loss in enumerate(base.losses)]
    found = compare([base, Run(**{**vars(base), "arm": "arm", "losses": tuple(wave)})], {"arm": "base"})
    assert "950,000 tokens (arm ahead after, the last of 9 crossings)" in render(found, {}, ABOUT, {}, tmp_path)


def test_a_page_of_one_seed_has_no_intervals(tmp_path: Path) -> None:
    page = page_of(tmp_path, [0, 0.03], 1)
    assert "95 % interval |" not in page
    assert "than residual's (one seed, so no statement about significance)" in page


def test_the_best_learning_rate_at_the_edge_is_told(tmp_path: Path) -> None:
    assert "try rates beyond" not in page_of(tmp_path, [0, 0.1], 1)
    found = compare([run("a", 0)], {})
    page = render(found, {"a": {1e-3: 2.0, 2e-3: 1.9}}, ABOUT, {}, tmp_path)
    assert "lowest or highest that was tried for a: try rates beyond." in page


def with_depth(one: Run, **line: Any) -> Run:
    return dataclasses.replace(one, depth={"kind": "depth", **line})


def test_the_page_tells_what_was_recorded_over_depth(tmp_path: Path) -> None:
    new = {
        "state_norm": [[1.0], [3.0, 4.0], [2.0], [2.0]],
        "contribution": [1.0, 0.25, 0.5, None],
        "gradient_norm": [6.0, 1.0, 1.0, 2.0],
        "output_norm": [1.0, 1.0, 1.0, 1.0],
        "sinks": [0.44, 0.1],
        "effective_rank": None,
        "stream_distance": None,
        "shares_of": "weights",
        "recording_seconds": 0.5,
        "processor_seconds": 100.0,
    }
    old = {"output_norm": [1.0, 2.0, 3.0, 4.0], "gradient_norm": [2.0, 1.0, 1.0, 1.0]}  # of depthmix 0.1
    found = compare([with_depth(run("a", 0), **new), with_depth(run("b", 0), **old)], {"b": "a"})
    figures = draw_comparison(found, {}, tmp_path / "figures")
    page = render(found, {}, ABOUT, figures, tmp_path)
    assert "![Magnitudes over depth](figures/depth.png)" in page
    table = page.split("## Over depth")[1].split("\n\n")[1]
    assert table.splitlines() == [
        "| arm | largest state norm | gradient norm, early / late | embedding's share | recording time "
        "| shares computed from |",
        "|---|---|---|---|---|---|",
        "| a | 3.54 | 3.00 | 0.440 | 0.50% | weights |",
        "| b |  | 2.00 |  |  |  |",
    ]


def test_the_last_recording_of_a_run_is_read_with_it() -> None:
    folder = Path(__file__).parent.parent / "fixtures" / "v0_1_0" / "runs" / "finished"
    one = read_run(folder, arm="a", seed=0, lr=1e-3)
    assert one.depth["step"] == 6
    assert len(one.depth["output_norm"]) == 20
