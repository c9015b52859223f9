"""Reading what runs left: whole where it can be, and a sentence for everything that cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from depthmix.report.document import describe_run, make_document, open_folders
from depthmix.report.page import to_json
from depthmix.report.reading import read_run_folder, unique_names
from depthmix.training import Interrupted, train
from tests.runs import tiny_run


def missing(folder: Path) -> str:
    """What a report says is missing; the rest of the run is still described, as valid JSON."""
    described = describe_run(read_run_folder(folder))
    assert to_json(make_document(open_folders([folder]), "c"))
    return "\n".join(described["missing"])


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_whole_run_is_read_with_all_its_figures(trained: Path) -> None:
    run = read_run_folder(trained / "block_attnres")
    assert (run.mechanism, run.kv_mechanism, run.depth, run.dim, run.seed) == ("block_attnres", None, 6, 16, 0)
    assert run.kinds == ["attn", "mlp"] * 3
    assert [s.step for s in run.snapshots] == [6, 12]
    assert run.snapshots[-1].source_names[0] == "embedding"
    assert len(run.snapshots[-1].reads) == 7
    assert any(run.snapshots[-1].partial)
    assert run.result is not None
    assert run.weights is not None
    assert run.missing == []


def test_a_folder_that_is_neither_run_nor_study_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"neither a run nor a study; expected the folder of a `depthmix train`"
    ):
        open_folders([tmp_path])
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_folders([tmp_path / "none"])
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileNotFoundError, match="is a file"):
        open_folders([tmp_path / "file"])
    (tmp_path / "scaling.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="scaling study: give the folders of its runs"):
        open_folders([tmp_path])
    with pytest.raises(ValueError, match="no folder is given"):
        open_folders([])


def test_a_study_is_not_mixed_with_runs(study: Path, trained: Path) -> None:
    with pytest.raises(ValueError, match="is a study and not the only folder"):
        open_folders([trained / "attnres", study])


def test_an_unfinished_run_is_shown_up_to_where_it_is(runs: Path, tmp_path: Path) -> None:
    def stop(event: object) -> None:
        if isinstance(event, dict) and event.get("kind") == "validation" and event["step"] == 6:
            raise Interrupted("stop")

    folder = tmp_path / "half" / "run"
    with pytest.raises(Interrupted):
        train(tiny_run(folder, "attnres"), report=stop)
    described = describe_run(read_run_folder(folder))
    assert not described["finished"]
    assert described["curves"]["validation"]["tokens"] == [6 * 64]
    assert any("not finished" in line for line in described["missing"])
    assert described["hashes"]["config"] is not None, "computed from the configuration"
    assert described["hashes"]["data"] is not None, "from the checkpoint"
    assert described["hashes"]["weights"] is None


def test_a_run_without_metrics_shows_its_snapshots(runs: Path) -> None:
    (runs / "attnres" / "metrics.jsonl").unlink()
    described = describe_run(read_run_folder(runs / "attnres"))
    assert described["depth"] == 6
    assert described["snapshots"]["steps"] == [6, 12]
    assert described["over_training"] is None
    assert "metrics.jsonl is missing or empty" in missing(runs / "attnres")
    assert {health["level"] for health in described["health"]} == {"unknown"}


def test_a_line_that_was_cut_or_holds_nonsense_does_not_hide_the_others(runs: Path) -> None:
    path = runs / "attnres" / "metrics.jsonl"
    whole = path.read_text()
    nonsense = '{"kind": "depth", "step": "x"}\n{"kind": "train", "step": 5, "tokens": [], "loss": {}}\n[1]\n"a"\n'
    path.write_text(nonsense + whole + '{"kind": "depth", "st')
    described = describe_run(read_run_folder(runs / "attnres"))
    assert described["over_training"]["steps"] == [6, 12]
    assert len(described["curves"]["train"]["loss"]) == 12


def test_a_truncated_snapshot_is_left_out_and_named(runs: Path) -> None:
    path = runs / "attnres" / "snapshots" / "step-00000006.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert "The snapshot step-00000006.safetensors is left out" in missing(runs / "attnres")
    assert [s.step for s in read_run_folder(runs / "attnres").snapshots] == [12]


def test_weights_that_are_not_those_that_were_saved_are_named(runs: Path) -> None:
    path = runs / "attnres" / "final" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "its SHA-256 is not the recorded one" in missing(runs / "attnres")


def test_a_run_without_weights_says_why_it_has_no_trace(runs: Path) -> None:
    for name in ("final", "checkpoints"):
        shutil.rmtree(runs / "attnres" / name)
    said = missing(runs / "attnres")
    assert "There is no trace of a longer text" in said
    assert said.count("this folder has no weights to measure with") == 2


def test_a_mechanism_that_is_not_installed_is_shown_from_what_was_recorded(runs: Path) -> None:
    path = runs / "attnres" / "config.toml"
    path.write_text(path.read_text().replace('name = "attnres"', 'name = "plug_in_of_others"'))
    described = describe_run(read_run_folder(runs / "attnres"))
    assert described["mechanism"] == "plug_in_of_others"
    assert described["depth"] == 6
    assert described["over_training"] is not None
    assert {health["name"] for health in described["health"]} >= {"uniform reading", "dead queries"}


def test_a_damaged_configuration_and_result_are_named_and_the_rest_is_shown(runs: Path) -> None:
    (runs / "attnres" / "config.toml").write_text("[model\n")
    (runs / "attnres" / "result.json").write_text("{")
    said = missing(runs / "attnres")
    assert "config.toml is damaged: it is not valid TOML" in said
    assert "result.json is damaged" in said
    assert describe_run(read_run_folder(runs / "attnres"))["snapshots"] is not None


def test_a_configuration_that_names_a_function_is_read_without_importing_it(runs: Path) -> None:
    path = runs / "attnres" / "config.toml"
    path.write_text(path.read_text().replace('kernel = "elu1"', 'kernel = "module_that_is_not_there:f"'))
    (runs / "attnres" / "result.json").unlink()
    described = describe_run(read_run_folder(runs / "attnres"))
    assert described["options"]["kernel"] == "module_that_is_not_there:f"
    assert described["hashes"]["config"] is None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("trace.json", "{", "The trace cannot be shown: "),
        ("trace.json", "{}", "The trace cannot be shown: "),
        ("ablation.json", "[]", "The ablation cannot be shown: "),
        ("ablation.json", '{"format": 9, "mechanism": "a", "effects": [], "loss": 1}', "has format 9"),
        (
            "ablation.json",
            '{"format": 1, "mechanism": "a", "effects": [{}], "loss": 1}',
            "The ablation cannot be shown",
        ),
        ("ablation.json", '{"format": 1, "mechanism": "a", "effects": 3, "loss": 1}', "The ablation cannot be shown"),
    ],
)
def test_damaged_measurements_are_named(name: str, content: str, said: str, runs: Path) -> None:
    (runs / "attnres" / name).write_text(content)
    assert said in missing(runs / "attnres")


def test_runs_of_the_same_name_are_told_apart() -> None:
    assert unique_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert unique_names([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]
    assert len(set(unique_names([Path("/a/x"), Path("/a/x")]))) == 2


def test_the_published_study_is_read_with_one_run_for_each_arm_and_all_seeds(study: Path) -> None:
    opened = open_folders([study])
    assert opened.study is not None
    assert [run.name for run in opened.runs][:2] == ["residual (seed 0)", "denseformer (seed 0)"]
    assert {len(arm.observations) for arm in opened.arms} == {5}
    assert len(opened.study.content["verdicts"]) == 7
    assert opened.study.content["losses"]["cells"][3][0] == "block_attnres"
    assert opened.study.content["about"]["seeds"] == "5"


def test_the_seed_with_most_data_stands_for_its_arm(study: Path, tmp_path: Path) -> None:
    copy = tmp_path / "study"
    shutil.copytree(study, copy)
    (folder,) = copy.glob("runs/attnres_seed_0_*")
    shutil.rmtree(folder / "snapshots")
    for name in ("trace.json", "trace.safetensors", "ablation.json"):
        (folder / name).unlink()
    opened = open_folders([copy])
    assert "attnres (seed 1)" in [run.name for run in opened.runs]
    document = make_document(opened, "c")
    assert "attnres (seed 1)" in document["study"]["about"]["runs shown"]


def test_a_study_whose_runs_are_gone_shows_what_it_has_itself(study: Path, tmp_path: Path) -> None:
    shutil.copy(study / "comparison.json", tmp_path)
    document = make_document(open_folders([tmp_path]), "c")
    assert len(document["runs"]) == 6
    assert all("run's folder is not there" in run["missing"][0] for run in document["runs"])
    assert len(document["runs"][0]["curves"]["validation"]["loss"]) == 5
    assert document["runs"][0]["depth"] == 24


@pytest.mark.parametrize("outside", ["../attnres", "/"])
def test_a_study_reads_no_folder_outside_its_own(outside: str, runs: Path) -> None:
    run = {"arm": "a", "seed": 0, "tokens": [1.0], "seconds": [1.0], "losses": [1.0], "flops": 1.0, "lr": 1e-3}
    run |= {"tokens_per_second": 1.0, "memory_bytes": 1.0, "parameters": 1}
    (runs / "study").mkdir()
    folder = outside if outside != "/" else str(runs / "attnres")
    content = {"about": {}, "runs": [{**run, "folder": folder}], "rows": []}
    (runs / "study" / "comparison.json").write_text(json.dumps(content))
    (shown,) = open_folders([runs / "study"]).runs
    assert shown.snapshots == []
    assert "The run's folder is not there" in shown.missing[0]
    assert not shown.has_weights


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"about": {}, "runs": [], "rows": []}', '{"about": {}, "runs": [{"arm": 1}], "rows": []}'],
)
def test_a_damaged_study_is_an_error_that_names_its_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text(content)
    with pytest.raises(ValueError, match=r"comparison.json is damaged.*`depthmix compare`"):
        open_folders([tmp_path])
