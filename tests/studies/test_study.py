"""Studies: arms from a grid, equal starts, runs that are used again, go on, or fail without taking others along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from depthmix.cli import main
from depthmix.studies import runs
from depthmix.studies.arms import Grid, Size, equal_compute, make_arms, parse_sweep, per_parameter, with_changes
from depthmix.studies.publish import check_target
from depthmix.studies.runs import Child, Pace, Pool, Task, find_result, is_free
from depthmix.studies.study import long_task, run_study
from depthmix.support.terminal import Progress
from depthmix.training.build import initial_model
from depthmix.training.config import TrainConfig
from depthmix.training.flops import flops_per_token

SMALL = {"data.rows": "2", "data.tokens_per_row": "32", "run.validate_batches": "2", "run.steps": "6"}
PUBLISHED = ("config.toml", "metrics.jsonl", "result.json", "snapshots/step-00000006.safetensors")
SIZES = [Size(depth=2, dim=16)]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enough text for a corpus, in a place of its own; children with one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source = tmp_path / "text"
    source.mkdir()
    for k in range(40):
        (source / f"{k}.txt").write_text(f"the file of number {k} says the same as the others. " * 20)
    return source


def grid(*mixers: str, **changes: object) -> Grid:
    return Grid(**{"mixers": mixers, "sizes": SIZES, "settings": SMALL, **changes})  # type: ignore[arg-type]


def arguments(text: Path, *mixers: str, seeds: int = 2) -> list[str]:
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    size = ["--depth", "2", "--dim", "16", "--seeds", str(seeds), "--data", str(text)]
    return ["compare", "--mixers", *mixers, *size, *sets, "--folder", "study"]


def test_an_option_varies_the_arms_that_have_it() -> None:
    arms = make_arms(grid("residual", "block_attnres", sweeps={"mixer.block_sublayers": ["1", "2"]}))
    assert [arm.label for arm in arms] == [
        "residual",
        "block_attnres block_sublayers=1",
        "block_attnres block_sublayers=2",
    ]
    assert [arm.baseline for arm in arms] == [None, "residual", "residual"]
    assert arms[2].config.model.mixer.options["block_sublayers"] == 2
    with pytest.raises(ValueError, match=r"mixer.block_sublayers: none of residual has this option"):
        make_arms(grid("residual", sweeps={"mixer.block_sublayers": ["1"]}))


def test_what_follows_from_the_tokens_is_not_varied() -> None:
    for key in ("run.steps", "run.validate_every", "run.keep"):
        with pytest.raises(ValueError, match=f"{key} cannot be varied between arms; expected it in --set"):
            make_arms(grid("residual", sweeps={key: ["1", "2"]}))


def test_other_keys_vary_every_arm_and_names_that_come_again_are_controls() -> None:
    arms = make_arms(grid("residual", "residual", sweeps={"optimizer.lr": ["1e-3", "2e-3"]}))
    assert [arm.label for arm in arms] == [
        "residual lr=1e-3",
        "residual lr=2e-3",
        "residual lr=1e-3 again",
        "residual lr=2e-3 again",
    ]
    assert arms[1].config.optimizer.lr == 2e-3


def test_a_value_mixer_alone_goes_with_the_residual() -> None:
    alone, both = make_arms(grid("depth_attention", "attnres+value_residual"))
    assert (alone.config.model.mixer.name, alone.config.model.kv_mixer.name) == ("residual", "depth_attention")  # type: ignore[union-attr]
    assert (both.config.model.mixer.name, both.config.model.kv_mixer.name) == ("attnres", "value_residual")  # type: ignore[union-attr]


def test_shapes_get_the_same_compute() -> None:
    sizes = [Size.of("2x64"), Size.of("8x32")]
    arms = make_arms(
        grid("residual", "attnres", sizes=sizes, settings={**SMALL, "run.steps": "1500"}), equal_compute(None)
    )
    spent = [
        flops_per_token(a.config.model, a.config.data.tokens_per_row) * a.config.run.steps * a.config.tokens_per_step
        for a in arms
    ]
    assert spent[2] == pytest.approx(spent[0], rel=0.01)
    assert arms[0].config.run.steps == arms[1].config.run.steps == 1500, "arms of a shape see the same tokens"
    assert arms[2].config.run.steps != arms[0].config.run.steps
    assert [arm.baseline for arm in arms] == [None, "residual 2x64", "residual 2x64", "residual 8x32"]


def test_a_baseline_with_dear_reads_gets_fewer_tokens_for_the_same_compute() -> None:
    steps = {}
    for mixer in ("residual", "attnres"):
        sizes = [Size.of("2x16"), Size.of("24x16")]
        arms = make_arms(grid(mixer, sizes=sizes, settings={**SMALL, "run.steps": "3000"}), equal_compute(None))
        steps[mixer] = [arm.config.run.steps for arm in arms]
    assert steps["attnres"][0] == steps["residual"][0] == 3000
    assert steps["attnres"][1] < 0.9 * steps["residual"][1]


def test_a_length_or_a_size_that_is_none_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for given, words in (
        (["compare", "--depth", "2", "--tokens", "-5"], "-5 tokens for a run; expected a number above 0"),
        (
            ["compare", "--depth", "2", "--tokens", "5", "--set", "run.steps=5"],
            "tokens=5 and run.steps=5; expected only one of them",
        ),
        (["compare", "--shapes", "2x16,2x16"], "sizes 2x16, 2x16; expected each size once"),
        (["scaling", "--sizes", "2", "4", "--set", "run.steps=5"], "run.steps is the same for every size"),
        (["scaling", "--sizes", "2"], "sizes 2; expected at least two"),
    ):
        assert main(given) == 2
        assert words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("steps", "accumulate", "every"), [(1000, 1, 40), (400, 1, 16), (150, 1, 16), (75, 2, 8), (20, 1, 5), (2, 1, 1)]
)
def test_short_runs_are_validated_less_often(steps: int, accumulate: int, every: int) -> None:
    """Validation reads 16 batches: 25 times in 400 steps, then no more tokens than training, and at least 4 times."""
    settings = {"run.steps": str(steps), "run.validate_batches": "16", "run.accumulate": str(accumulate)}
    (arm,) = make_arms(grid("residual", settings=settings))
    assert (arm.config.run.steps, arm.config.run.validate_every) == (steps, every)
    (asked,) = make_arms(grid("residual", settings={**settings, "run.validate_every": "1"}))
    assert asked.config.run.validate_every == 1


def test_scaling_arms_have_tokens_by_their_parameters_and_a_baseline_of_their_own_size() -> None:
    settings = {key: value for key, value in SMALL.items() if key != "run.steps"}
    sizes = [Size.of("2"), Size.of("4")]
    arms = make_arms(grid("residual", "attnres", sizes=sizes, settings=settings), per_parameter(2), across_sizes=False)
    assert [arm.baseline for arm in arms] == [None, "residual 2", None, "residual 4"]
    assert [arm.mixer for arm in arms] == ["residual", "attnres"] * 2
    assert arms[2].config.run.steps > arms[0].config.run.steps


def test_arms_with_one_seed_start_from_the_same_weights_where_shapes_agree() -> None:
    """Also between depths: a parameter is drawn by the seed and its own name."""
    plain, mixed, deep = (
        dict(initial_model(make_arms(grid(name, sizes=[size]))[0].config).named_parameters())
        for name, size in (("residual", SIZES[0]), ("mhc", SIZES[0]), ("residual", Size(depth=6, dim=16)))
    )
    for other in (mixed, deep):
        shared = [name for name, tensor in plain.items() if name in other and other[name].shape == tensor.shape]
        assert set(plain) == set(shared)
        ends = ("o_proj.weight", "down_proj.weight")  # drawn alike, and scaled by the depth
        assert all(
            torch.equal(plain[name], other[name]) for name in shared if other is mixed or not name.endswith(ends)
        )
    ratio = deep["sublayers.0.o_proj.weight"] / plain["sublayers.0.o_proj.weight"]
    assert torch.allclose(ratio, ratio[0, 0].expand_as(ratio))
    config = make_arms(grid("residual"))[0].config
    again = initial_model(with_changes(config, seed=1)).state_dict()
    assert not torch.equal(again["embed.weight"], plain["embed.weight"])


@pytest.mark.parametrize("text_", ["mixer.block_sublayers", "=1,2", "a=1,,2", "a=1,1"])
def test_a_sweep_that_is_none_is_refused(text_: str) -> None:
    with pytest.raises(ValueError, match=r"expected KEY=VALUE|twice"):
        parse_sweep(text_)


def test_a_study_refuses_what_it_could_not_compare(tmp_path: Path) -> None:
    arms = make_arms(grid("residual", sweeps={"data.tokens_per_row": ["16", "32"]}, settings={"run.steps": "2"}))
    with pytest.raises(ValueError, match=r"data.tokens_per_row differs between arms"):
        run_study(arms, seeds=1, folder=tmp_path)
    arms = make_arms(grid("residual", sweeps={"data.rows": ["2", "4"]}, settings={"run.steps": "2"}))
    with pytest.raises(ValueError, match=r"data.rows × run.validate_batches differs between arms \(32, 64\)"):
        run_study(arms, seeds=1, folder=tmp_path)
    for changes, words in (
        ({"seeds": 0}, "seeds=0"),
        ({"jobs": 0}, "jobs=0"),
        ({"lrs": (0.0,)}, "learning rates above 0"),
        ({"lr_share": 2.0}, "lr_share=2.0"),
    ):
        with pytest.raises(ValueError, match=words):
            run_study(make_arms(grid("residual")), **{"seeds": 1, "folder": tmp_path, **changes})  # type: ignore[arg-type]


def test_a_study_is_not_published_into_itself(tmp_path: Path) -> None:
    check_target(None, tmp_path)
    check_target(tmp_path / "docs", tmp_path / "study")
    for target in (tmp_path / "study", tmp_path / "study" / "docs", tmp_path):
        with pytest.raises(ValueError, match="are the same folder, or one contains the other"):
            check_target(target, tmp_path / "study")


def test_the_time_left_follows_the_pace_of_each_arm() -> None:
    pace = Pace()
    assert pace.seconds_for([("a", 1.0)]) is None
    pace.add("a", 10.0, 5.0)
    pace.add("b", 30.0, 5.0)
    assert pace.seconds_for([("a", 5.0), ("b", 5.0), ("c", 5.0)]) == pytest.approx(10 + 30 + 20)


def test_the_flops_of_a_task_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress asks for those of every task at every look, and counting builds a model."""
    counts = []
    monkeypatch.setattr(runs, "flops_per_token", lambda *given: counts.append(given) or 2)
    (arm,) = make_arms(grid("residual"))
    task = Task(arm=arm.label, seed=0, config=arm.config)
    assert task.flops == task.flops == 2 * 6 * arm.config.tokens_per_step
    assert len(counts) == 1


def test_progress_of_a_study_tells_each_run_and_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (arm,) = make_arms(grid("residual"))
    tasks = [long_task(arm, seed, None, tmp_path, "data") for seed in range(3)]
    pool = Pool(total=3, begun=2)
    pool.pace.add("residual", 60.0, tasks[0].flops)
    process = cast(Any, None)
    child = Child(task=tasks[1], title="[2/3] residual, seed 1", process=process, begun=time.monotonic(), first=0)
    pool.running.append(child)
    tasks[1].folder.mkdir(parents=True)
    (tasks[1].folder / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4')
    pool.pace.add("residual", 30.0, tasks[0].flops / 2)
    pool.show_progress(Progress(3), tasks[2:])
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "about 68 s left: [2/3] residual, seed 1: step 3 of 6"


def test_the_residual_against_itself_is_no_difference(text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Trained twice, in processes of their own, two at once; a second start trains nothing and publishes it."""
    assert main([*arguments(text, "residual", "residual"), "--jobs", "2"]) == 0
    out = capfd.readouterr().out
    assert "no difference from residual; the final losses are bitwise equal in 2 seeds" in " ".join(out.split())
    found = json.loads(Path("study/comparison.json").read_text())
    assert found["rows"][0]["difference"]["values"] == [0.0, 0.0]
    assert len({run["folder"] for run in found["runs"]}) == 4
    page = Path("study/comparison.md").read_text()
    assert "no difference" in page
    assert "runs: 2 at once" in page
    given = [*arguments(text, "residual", "residual"), "--json", "--publish", "docs/first"]
    assert main(given) == 0
    again = capfd.readouterr()
    assert again.err.count("already complete") == 4
    assert json.loads(again.out)["rows"] == found["rows"]
    check_published(Path("docs/first"), Path("study"))


def check_published(target: Path, study: Path) -> None:
    """All that the page rests on, no weights, no path of this machine."""
    files = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    runs = [run["folder"] for run in json.loads((target / "comparison.json").read_text())["runs"]]
    wanted = {"comparison.md", "comparison.json", *(f"{r}/{n}" for r in runs for n in PUBLISHED)}
    assert wanted == {name for name in files if not name.startswith("figures/")}
    assert {name for name in files if name.startswith("figures/")} == {
        path.relative_to(study).as_posix() for path in (study / "figures").iterdir()
    }
    for run in runs:
        text = (target / run / "config.toml").read_text()
        digest = json.loads((target / run / "result.json").read_text())["config_digest"]
        assert TrainConfig.from_toml(text).digest == digest
        assert f'folder = "{run}"' in text


def test_a_planted_difference_in_learning_rate_is_found(text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = [*arguments(text, "residual", seeds=3), "--sweep", "optimizer.lr=1e-5,5e-3"]
    assert main(given) == 0
    (row,) = json.loads(Path("study/comparison.json").read_text())["rows"]
    assert row["difference"]["high"] < 0
    assert "lower than residual lr=1e-5's" in " ".join(capfd.readouterr().out.split())


def test_the_best_learning_rate_of_short_runs_is_taken_and_a_failure_is_told(
    text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rate of 1e30 ends in a bad loss: the run fails, the study does not."""
    assert main([*arguments(text, "residual", seeds=1), "--lrs", "1e-6", "5e-3", "1e30"]) == 1
    found = json.loads(Path("study/comparison.json").read_text())
    assert found["learning_rates"]["residual"]["1e+30"] is None
    assert [run["lr"] for run in found["runs"]] == [5e-3]
    assert "residual, lr 1e+30" in found["about"]["failures"]
    assert "failed: residual, lr 1e+30" in capfd.readouterr().out


def test_a_study_that_was_killed_goes_on_and_finds_the_same(text: Path) -> None:
    """Killed with SIGKILL in the first run, whose process lives on for a while: the second start waits for it."""
    command = [sys.executable, "-m", "depthmix", *arguments(text, "residual", seeds=1)]
    command[command.index("run.steps=6")] = "run.steps=40"
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    for _ in range(600):
        if [*Path("study").glob("runs/*/metrics.jsonl")]:
            break
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = Path("study").glob("runs/*")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["kind"] == "train"] == [*range(1, 41)]


def test_a_study_that_is_interrupted_stops_its_runs_with_checkpoints(text: Path) -> None:
    command = [sys.executable, "-m", "depthmix", *arguments(text, "residual", "attnres", seeds=1), "--jobs", "2"]
    command[command.index("run.steps=6")] = "run.steps=100000"
    study = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    for _ in range(600):
        if len([*Path("study").glob("runs/*/metrics.jsonl")]) == 2:
            break
        time.sleep(0.1)
    study.send_signal(signal.SIGINT)
    assert "the same command resumes from here" in study.communicate()[1]
    assert study.returncode == 130
    for folder in Path("study").glob("runs/*"):
        assert is_free(folder), "nobody trains there any more"
        assert [*folder.glob("checkpoints/step-*")]


def test_a_damaged_result_is_made_again_and_other_data_has_its_own_folder(text: Path, tmp_path: Path) -> None:
    (arm,) = make_arms(grid("residual", data=str(text)))
    (task,) = run_study([arm], seeds=1, folder=tmp_path / "s").tasks
    whole = (task.folder / "result.json").read_text()
    (task.folder / "result.json").write_text(whole[:20])
    assert find_result(task) is None
    (again,) = run_study([arm], seeds=1, folder=tmp_path / "s").tasks
    assert (
        json.loads((again.folder / "result.json").read_text())["validation_loss"]
        == json.loads(whole)["validation_loss"]
    )
    assert long_task(arm, 0, None, tmp_path / "s", "other").folder != task.folder


def test_scaling_fits_a_law_for_each_arm(text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sets = [word for key, value in SMALL.items() if key != "run.steps" for word in ("--set", f"{key}={value}")]
    given = ["scaling", "--mixers", "residual", "attnres", "--sizes", "2x16", "4x32", "--tokens", "640"]
    assert main([*given, *sets, "--data", str(text), "--folder", "study", "--beside", "attnres-paper"]) == 0
    found = json.loads(Path("study/scaling.json").read_text())
    assert set(found["fits"]) == {"residual", "attnres"}
    assert found["beside"]["source"] == "arXiv 2603.15031, Table 2"
    regime = "arXiv 2603.15031, Table 2 has 205; this study has "
    assert regime in Path("study/scaling.md").read_text()
    assert regime in " ".join(capfd.readouterr().out.split())
    assert regime in found["notes"][-1]
    assert len(found["factors"]["attnres"]) == 2
    assert (Path("study") / "figures" / "scaling.png").is_file()
    assert "## Compute-equivalent factor" in Path("study/scaling.md").read_text()


def test_an_arm_can_have_a_learning_rate_of_its_own() -> None:
    arms = make_arms(grid("residual", "block_attnres", "residual", rates={"residual": 1.5e-3}))
    dial = TrainConfig.from_dial(2, "block_attnres", dim=16).optimizer.lr
    assert [arm.config.optimizer.lr for arm in arms] == [1.5e-3, dial, 1.5e-3]
    with pytest.raises(ValueError, match="a learning rate is given for 'highway'; expected one of the arms: residual"):
        make_arms(grid("residual", rates={"highway": 1e-3}))
    with pytest.raises(ValueError, match=r"a learning rate is given for residual, and optimizer.lr for all arms"):
        make_arms(grid("residual", rates={"residual": 1e-3}, sweeps={"optimizer.lr": ["1e-3", "2e-3"]}))


@pytest.mark.parametrize("words", [["residual"], ["residual=0"], ["residual=nan"], ["residual=1e-3", "--lrs", "1e-3"]])
def test_a_rate_of_an_arm_that_is_none_is_refused(
    words: list[str], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(text, "residual"), "--lr-of", *words]) == 2
    assert "lr_of" in capsys.readouterr().err
    assert not Path("study").exists()


def test_two_rates_for_one_arm_are_refused(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = ["--lr-of", "residual=1e-3", "--lr-of", "residual=2e-3"]
    assert main([*arguments(text, "residual"), *twice]) == 2
    assert "residual has two rates, 0.001 and 0.002; expected one --lr-of for each" in capsys.readouterr().err
    assert not Path("study").exists()


def test_the_demo_trains_each_arm_at_its_best_rate_of_the_published_sweep() -> None:
    from examples.compare_demo import RATES

    page = Path(__file__).parents[2] / "docs/results/demo_rates.md"
    cells = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines()]
    table = [row for row in cells if len(row) > 2 and row[0] in ("arm", *RATES)]
    rates = [float(word) for word in table[0][1:]]
    losses = {arm: dict(zip(rates, map(float, row), strict=True)) for arm, *row in table[1:]}
    assert {arm: min(row, key=lambda rate: row[rate]) for arm, row in losses.items()} == RATES
    assert all(min(rates) < rate < max(rates) for rate in RATES.values()), "a best rate must lie inside the sweep"
