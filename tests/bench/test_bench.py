"""The benchmark: its arithmetic, its honesty, its processes and its command."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.bench import (
    CONTROL,
    ChildFailed,
    Job,
    Ratio,
    Report,
    Row,
    Settings,
    Size,
    kept_bytes_per_token,
    measure,
    paired,
    pool,
    ratio_rows,
    run_child,
    run_jobs,
    step,
)
from depthmix.bench.memory import peak_bytes
from depthmix.bench.model import build, tokens_for
from depthmix.bench.page import render
from depthmix.bench.peers import PEERS, installed
from depthmix.bench.read import attend, check_same_work, readers
from depthmix.bench.report import with_verdicts
from depthmix.bench.step import variants
from depthmix.bench.suite import memory_rows, timed_jobs
from depthmix.bench.timing import median_interval
from depthmix.cli import bench, main

PNG = b"\x89PNG\r\n\x1a\n"
SMALL = Size(dim=64, depth=6, hidden=64, tokens=64)


def test_variants_take_turns_in_rotating_order() -> None:
    calls: list[str] = []
    timed = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times = measure(timed, rounds=3, warmup=0)
    assert calls == [*"abc", *"bca", *"cab"]
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_ratios_are_paired_round_by_round() -> None:
    """A slow round slows both: the ratio does not notice."""
    times = {"plain": [1.0, 10.0, 2.0, 5.0], "other": [1.1, 11.0, 2.2, 5.5]}
    assert paired(times, "other", "plain") == pytest.approx([1.1] * 4)
    assert paired(times, "other", "plain", scale=2) == pytest.approx([0.55] * 4)


def test_processes_are_pooled_by_their_medians() -> None:
    """However many rounds a process has, it has one voice; outliers within it have none."""
    found = pool([[1.0, 1.02, 9.0], [1.10, 1.10, 1.10, 1.10], [1.0, 1.05, 1.3]])
    assert found == Ratio(1.05, 1.02, 1.10)


def test_one_process_has_the_confidence_interval_of_its_median() -> None:
    """For 15 values the 4th and the 12th: all 15 but those at most 3 on a side happen in 96.5 % of samples."""
    values = [float(v) for v in range(1, 16)]
    assert pool([values[::-1]]) == Ratio(8.0, 4.0, 12.0)
    assert median_interval([float(v) for v in range(1, 7)]) == (1.0, 6.0)
    assert median_interval([3.0, 1.0]) == (1.0, 3.0), "too few for 95 %: all of them"
    assert median_interval([2.0]) == (2.0, 2.0)


def test_the_confidence_interval_holds_the_median_as_often_as_it_says() -> None:
    draws = torch.rand(2000, 15, generator=torch.Generator().manual_seed(0))
    held = [low <= 0.5 <= high for low, high in (median_interval(each) for each in draws.tolist())]
    assert 0.95 <= sum(held) / len(held) <= 0.98  # exactly 0.9648


@pytest.mark.parametrize("samples", [[], [[]], [[1.0], []]])
def test_nothing_measured_is_nothing_to_pool(samples: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="expected at least 1 of each"):
        pool(samples)


def test_a_figure_whose_interval_straddles_its_bound_is_undecided() -> None:
    assert Ratio(1.04, 1.02, 1.06).verdict(1.05) == "undecided"
    assert Ratio(1.02, 1.01, 1.03).verdict(1.05) == "holds"
    assert Ratio(1.10, 1.08, 1.12).verdict(1.05) == "fails"


@pytest.mark.parametrize(
    ("control", "verdict"),
    [
        ([1.25, 1.24, 1.0], "undecided (control 1.000 – 1.250)"),
        ([1.05, 1.04, 1.0], "holds"),
        ([1.2, 1.01, 0.99], "holds"),
    ],
)
def test_the_pooled_control_decides_whether_anything_is_decided(control: list[float], verdict: str) -> None:
    found = {"mhc": [[1.2], [1.19], [1.21]], "highway": [[1.2]] * 3, CONTROL: [[c] for c in control]}
    rows = {row.what: row for row in ratio_rows("step", found, bounds={"mhc": 1.4})}
    assert rows["mhc"].verdict == verdict
    assert (rows["mhc"].figure, rows["mhc"].low, rows["mhc"].high) == (1.2, 1.19, 1.21)
    assert rows["highway"].verdict == "", "without a bound there is nothing to judge"


def test_a_few_rounds_of_one_process_decide_nothing() -> None:
    def verdict(samples: list[list[float]]) -> str:
        return ratio_rows("step", {"mhc": samples}, bounds={"mhc": 1.4})[0].verdict

    assert verdict([[1.2] * 5]) == "undecided (too few rounds)"
    assert verdict([[1.2] * 6]) == "holds"
    assert verdict([[1.2] * 5, [1.2] * 5]) == "holds"


def test_the_control_is_the_residual_itself_and_all_share_their_sublayers() -> None:
    steps, forwards = variants({"block_attnres": {}, "mhc": {}}, SMALL)
    assert list(steps) == ["residual", "block_attnres", CONTROL, "mhc"], "the control is not its own neighbour"
    assert steps[CONTROL] is steps["residual"]
    assert forwards[CONTROL] is forwards["residual"]
    plain = build("residual", {}, SMALL)
    assert build("mhc", {}, SMALL, plain.sublayers).sublayers is plain.sublayers


def test_a_child_is_another_process_with_as_many_threads() -> None:
    pids = run_jobs([Job(label="pid", target="os:getpid") for _ in range(2)])
    assert len({os.getpid(), *pids}) == 3
    assert run_child(Job(label="threads", target="torch:get_num_threads")) == torch.get_num_threads()


def test_children_run_one_at_a_time_and_what_they_print_is_not_their_answer(tmp_path: Path) -> None:
    folder = tmp_path / "busy"
    statement = (
        f"import os, time; os.mkdir({str(folder)!r}); print('noise'); time.sleep(0.2); os.rmdir({str(folder)!r})"
    )
    jobs = [Job(label="busy", target="timeit:timeit", arguments={"stmt": statement, "number": 1}) for _ in range(2)]
    assert all(seconds >= 0.2 for seconds in run_jobs(jobs))
    folder.mkdir()
    with pytest.raises(ChildFailed, match=r"busy: FileExistsError: .*busy"):
        run_jobs(jobs)


def test_an_interrupted_run_goes_on_from_its_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "speed.partial.jsonl"
    jobs = [Job(label="pid", target="os:getpid") for _ in range(2)]
    first = run_jobs(jobs, journal)
    _, kept, cut = journal.read_text().split("\n")
    journal.write_text(f"\n{kept}\n{cut[:30]}")
    second = run_jobs(jobs, journal)
    assert second[0] == first[0]
    assert second[1] != first[1]
    assert "pid: already measured" in capsys.readouterr().err
    assert run_jobs(jobs, journal) == second
    (other,) = run_jobs([Job(label="pid", target="os:getpid", keep=False)], journal)
    assert other not in second


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL; is there enough memory"),
        ("import os; os._exit(3)", "ended with code 3"),
    ],
)
def test_a_child_that_dies_is_told(statement: str, message: str) -> None:
    with pytest.raises(ChildFailed, match=message):
        run_child(Job(label="doomed", target="timeit:timeit", arguments={"stmt": statement, "number": 1}))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_child_ends_with_a_killed_benchmark(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    job = f"Job(label='x', target='tests.bench.test_bench:sleep', arguments={{'note': {str(note)!r}}})"
    script = f"from depthmix.bench.processes import Job, run_child; run_child({job})"
    with subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2]) as benchmark:
        deadline = time.monotonic() + 60
        while not (note.is_file() and note.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        benchmark.kill()
    pid = int(note.read_text())
    while time.monotonic() < deadline and (Path("/proc") / str(pid)).exists():
        time.sleep(0.05)
    assert not (Path("/proc") / str(pid)).exists()


def sleep(note: str) -> None:
    Path(note).write_text(str(os.getpid()))
    time.sleep(120)


def test_a_failing_child_ends_the_command_with_its_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doomed = [Job(label="step", target="depthmix.bench.step:run", arguments={"mixers": {}, "size": {}, "rounds": -1})]
    monkeypatch.setattr("depthmix.bench.suite.timed_jobs", lambda _: [Job(label="step", target="math:sqroot"), *doomed])
    assert main(["bench", "--quick", "--parts", "step"]) == 1
    captured = capsys.readouterr()
    assert "depthmix: step: AttributeError: module 'math' has no attribute 'sqroot'" in captured.err
    assert captured.out == ""


def test_every_timed_part_is_repeated_in_every_process_and_compiled_only_where_asked() -> None:
    def labels(**options: Any) -> list[str]:
        return [job.label for job in timed_jobs(Settings(mixers=("mhc",), **options))]

    assert labels() == [
        "read",
        "read, freed memory kept",
        "mixing",
        "step",
        "decode",
        "values",
        "loop",
        "pipeline",
        "sources",
        "depth",
        "width",
    ]
    assert labels(parts=("step", "decode"), compiled=True) == ["step", "compiled step", "decode", "compiled decode"]
    assert labels(parts=("memory",)) == []
    with pytest.raises(ValueError, match="expected names other than residual"):
        Settings(mixers=("residual",))
    with pytest.raises(ValueError, match="processes=0; expected 1 to 100"):
        Settings(mixers=("mhc",), processes=0)


def test_block_attnres_keeps_one_vector_a_sublayer_more_than_the_residual() -> None:
    size = Size(dim=64, depth=24, hidden=64, tokens=64)
    extra = kept_bytes_per_token("block_attnres", {"num_blocks": 8}, size) - kept_bytes_per_token("residual", {}, size)
    assert 0 < extra <= (size.depth + 2) * size.dim * 4 + 64 * size.depth


def test_measuring_memory_leaves_none_behind() -> None:
    alive = []
    for _ in range(3):
        kept_bytes_per_token("block_attnres", {}, SMALL)
        gc.collect()
        alive.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    assert alive[1] == alive[2]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from Linux's /proc")
def test_the_peak_of_a_step_is_at_least_what_its_graph_keeps_and_its_gradients() -> None:
    size = Size(dim=128, depth=4, hidden=512, tokens=2048)
    job = Job(
        label="memory",
        target="depthmix.bench.memory:run",
        arguments={"mixer": "residual", "options": {}, "size": vars(size)},
    )
    found = run_child(job)
    needed = found["kept"] * size.tokens + 4 * sum(p.numel() for p in build("residual", {}, size).parameters())
    assert needed * 0.9 < found["peak"] < needed * 3


def test_where_there_is_no_proc_the_peak_is_not_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("depthmix.bench.memory.CLEAR", tmp_path / "nowhere" / "clear_refs")
    assert peak_bytes(build("residual", {}, SMALL), tokens_for(SMALL)) is None
    rows = memory_rows({"residual": {"kept": 1.0, "peak": None}, "mhc": {"kept": 3.0, "peak": None}}, SMALL)
    assert {row.part for row in rows} == {"kept", "peak"}
    assert "not available" in render(report(rows), {}, Path())


def test_peers_that_are_not_installed_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    found, notes = installed()
    assert found == {}
    assert [note.split()[0] for note in notes] == [peer.package for peer in PEERS]
    assert all("depthmix[bench]" in note for note in notes)
    assert set(readers()) == {"ops.attend", "its torch form"}


def test_only_readers_that_do_the_same_work_are_compared() -> None:
    for name, read in readers().items():
        check_same_work(name, read)
    with pytest.raises(ValueError, match="no key weight computes something else"):
        check_same_work("no key weight", lambda values, query, weight: attend(values, query, 1 + 0 * weight))


def report(rows: list[Row]) -> Report:
    size = vars(SMALL)
    sizes = {
        "step": size,
        "read": {"sources": 9, "tokens": 4, "dim": 8},
        "sources": {"counts": [8, 64], "tokens": 4, "dim": 8},
        "decode": {"model": {"layers": 2, "dim": 8, "vocab_size": 9}, "batch": 2, "capacity": 8},
        "values": {"model": {"layers": 2, "dim": 8, "vocab_size": 9}, "tokens": 4},
        "depth": [size],
        "width": [size],
    }
    return Report(
        machine="here",
        reads="torch",
        command="depthmix bench",
        rounds=2,
        processes=2,
        quick=False,
        sizes=sizes,
        rows=rows,
    )


def full_report() -> Report:
    rows = ratio_rows("read", {"ops.attend, forward": [[2.5, 2.6], [2.7, 2.8]]}, unit="passes", bounds=bench.BOUNDS)
    rows += ratio_rows("step", {"attnres": [[1.3], [1.4]], CONTROL: [[1.0], [1.01]]}, bounds=bench.BOUNDS)
    rows += ratio_rows("compiled decode", {"attnres": [[1.03], [1.04]], CONTROL: [[1.0], [1.0]]}, bounds=bench.BOUNDS)
    for n in (8, 64):
        rows += ratio_rows("sources", {f"{n} sources, time of each": [[1.1], [1.2]]}, bounds=bench.BOUNDS, at=n)
        rows += ratio_rows("depth", {"attnres": [[1.1], [1.2]], CONTROL: [[1.0], [1.0]]}, at=n)
    figures = {"residual": {"kept": 9.0, "peak": 1e6}, "block_attnres": {"kept": 99.0, "peak": 2e6}}
    return report(with_verdicts(rows + memory_rows(figures, SMALL)))


def test_a_saved_result_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "speed.json"
    full_report().save(path)
    assert Report.from_json(path.read_text()) == full_report()
    assert [p.name for p in path.parent.iterdir()] == ["speed.json"], "nothing is left beside it"
    assert json.loads(path.read_text())["rows"][0]["samples"] == [[2.5, 2.6], [2.7, 2.8]]


def test_the_page_and_the_figures_are_made_from_a_saved_result_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "run_suite", lambda *_, **__: pytest.fail("measured"))
    saved, page, images = tmp_path / "speed.json", tmp_path / "results" / "speed.md", tmp_path / "images"
    full_report().save(saved)
    command = ["bench", "--from", str(saved), "--figures", str(images), "--markdown", str(page)]
    assert main(command) == 0
    assert {p.name for p in images.iterdir()} == {"read.png", "step.png", "decoder.png", "memory.png", "growth.png"}
    assert all(p.read_bytes().startswith(PNG) for p in images.iterdir())
    text = page.read_text()
    assert "| ops.attend, forward | 2.650 passes | 2.550 – 2.750 | 2 × 2 | 3 | holds |" in text
    assert "| attnres | 1.035 × | 1.030 – 1.040 | 2 × 1 | 1.12 | holds |" in text
    assert "| attnres | 1.350 × | 1.300 – 1.400 | 2 × 1 | 1.12 | fails |" in text
    assert (
        "| 64 sources, time of each | 1.150 × | 1.100 – 1.200 | 2 × 1 | 1.15 | undecided (control 1.100 – 1.200) |"
        in text
    )
    assert "| block_attnres | 90 bytes/token | 2,432 | holds | 0.4 widths D |" in text
    assert "| attnres, depth 64 |" in text
    assert "](../images/growth.png)" in text
    assert "2.650 passes" in capsys.readouterr().out


def test_results_of_several_commands_make_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = full_report()
    step = dataclasses.replace(full, command="first", rows=full.of("step"))
    rest = dataclasses.replace(full, command="second", rows=[r for r in full.rows if r.part != "read"])
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, part in zip(paths, (step, rest), strict=True):
        part.save(path)
    assert main(["bench", "--from", *map(str, paths), "--json"]) == 0
    found = Report.from_json(capsys.readouterr().out)
    assert found.rows == [*step.rows, *(r for r in rest.rows if r.part != "step")]
    assert found.command.split() == ["first", "second"]


def test_a_file_that_is_no_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"rows": []}')
    assert main(["bench", "--from", str(tmp_path / "other.json")]) == 2
    assert "other.json is not a result of this version" in capsys.readouterr().err
    assert main(["bench", "--from", str(tmp_path / "none.json")]) == 2
    assert main(["bench", "--quick", "--output", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_the_command_measures_every_part_and_prints_it_with_its_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "quick.json"
    assert main(["bench", "--quick", "--mixers", "mhc", "--json", "--output", str(output)]) == 0
    printed = capsys.readouterr()
    found = Report.from_json(printed.out)
    assert found == Report.from_json(output.read_text())
    parts = {row.part for row in found.rows}
    assert parts >= {"read", "sources", "mixing", "step", "forward", "kept", "peak", "depth", "width"}
    assert {row.what for row in found.of("value step")} == {"depth_attention", "value_residual", CONTROL}
    for part in ("mixing", "step", "forward", "decode", "depth", "width"):
        assert {row.what for row in found.of(part)} == {"mhc", CONTROL}
    assert {row.at for row in found.of("sources")} == {2, 4}
    assert (found.processes, found.rounds) == (1, 3)
    for row in found.rows:
        if row.part == "kept":
            assert row.figure is not None
        else:
            absent = (row.figure, row.low, row.high, row.bound, row.samples, row.verdict)
            assert absent == (None, None, None, None, [], "runs"), "small sizes say nothing about speed"
    assert found.machine
    assert found.reads
    assert found.quick
    assert re.search("memory of mhc; about .* left in total", printed.err)


def test_a_quick_result_shows_what_runs_and_what_is_kept_and_no_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even of a file that holds some, as earlier versions wrote them."""
    pytest.importorskip("matplotlib")
    saved, page, images = tmp_path / "speed.json", tmp_path / "speed.md", tmp_path / "images"
    dataclasses.replace(full_report(), quick=True).save(saved)
    assert "1.35" in saved.read_text()
    assert main(["bench", "--from", str(saved), "--markdown", str(page), "--figures", str(images)]) == 0
    out = capsys.readouterr().out
    rows = page.read_text().partition("## One read")[2]
    for text in (out, rows):
        assert not re.search(r"\d\.\d+ (×|passes|ms|MB)|fails|undecided|not available", text)
        assert "runs" in text
        assert "90 bytes/token" in text
    assert "Quick sizes show that each part runs." in out
    assert "Quick sizes show that each part runs." in page.read_text()
    assert [path.name for path in images.iterdir()] == ["memory.png"]
    assert main(["bench", "--from", str(saved), "--json"]) == 0
    assert {row.part for row in Report.from_json(capsys.readouterr().out).rows if row.figure is not None} == {"kept"}


def test_networks_are_compiled_one_at_a_time_and_the_residual_only_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real graphs, whole; without Inductor, whose kernels take minutes to compile."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    size = vars(Size(dim=32, depth=2, hidden=32, tokens=8))
    found = step.run(mixers={"attnres": {}}, size=size, rounds=2, compiled=True)
    assert set(found) == {"compiled step", "compiled forward"}
    assert all(set(each) == {"attnres", CONTROL} for each in found.values())
    lines = [line.split(" in ")[0].strip() for line in capsys.readouterr().err.splitlines()]
    assert lines == ["compiling residual …", "compiled residual", "compiling attnres …", "compiled attnres"]


def test_no_figure_while_a_mechanism_is_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from depthmix.analysis.invariants import Check

    def red(name: str, *_: Any, **__: Any) -> list[Check]:
        return [Check("h equals the sum of M v in every row", 1.0 if name == "mhc" else 0.0, 1e-12)]

    monkeypatch.setattr(bench, "verify", red)
    assert main(["bench", "--quick", "--mixers", "mhc"]) == 2
    captured = capsys.readouterr()
    assert "mhc fails checks, so it is not measured: h equals the sum of M v in every row" in captured.err
    assert "`depthmix verify mhc`" in captured.err
    assert captured.out == ""


def test_an_unknown_mechanism_is_told_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--mixers", "mch"]) == 2
    assert "Did you mean" in capsys.readouterr().err
