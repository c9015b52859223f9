"""What is missing is measured, saved beside the run and used again; what cannot be measured is said."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from depthmix.analysis import Survey
from depthmix.report import measuring
from depthmix.report.document import describe_run, make_document, open_folders
from depthmix.report.measuring import is_stale, measure_missing
from depthmix.report.packed import unpack
from depthmix.report.reading import SavedRun, read_run_folder


@pytest.fixture(scope="session")
def measured(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of two runs with their trace and ablation."""
    folder = tmp_path_factory.mktemp("measured")
    for mixer in ("block_attnres", "attnres"):
        shutil.copytree(trained / mixer, folder / mixer)
        measure_missing(read_run_folder(folder / mixer), tokens=256)
    return folder


def times(folder: Path) -> list[int]:
    return [(folder / name).stat().st_mtime_ns for name in ("trace.json", "ablation.json")]


def test_a_trace_and_an_ablation_are_saved_beside_the_run(measured: Path) -> None:
    run = read_run_folder(measured / "block_attnres")
    assert run.missing == []
    assert run.trace is not None
    assert run.trace.content["tokens"] == 256
    assert run.trace.content["text"]["context"] == 16
    assert run.trace.content["text"]["source"].startswith("validation data of ")
    assert run.ablation is not None
    assert run.ablation["rows"] == measuring.ABLATION_ROWS
    assert run.ablation["text"]["sha256"] == run.trace.content["text"]["sha256"]
    names = [effect["name"] for effect in run.ablation["effects"]]
    assert "embedding" in names


def test_the_page_gets_the_tensors_of_the_trace(measured: Path) -> None:
    saved = Survey.load(measured / "block_attnres")
    described = describe_run(read_run_folder(measured / "block_attnres"))
    trace = described["trace"]
    assert "table" in trace
    assert np.allclose(unpack(trace["tensors"]["M_mean"]), saved["M_mean"].numpy(), atol=1e-6)
    assert np.allclose(unpack(trace["table"]["weights"]), saved["table_weights"].numpy(), atol=1e-3)
    assert len(trace["table"]["tokens"]) == trace["table"]["M"]["shape"][0] == 64
    assert trace["table"]["M"]["dtype"] == "f16"
    assert trace["table"]["values"] is None
    assert described["missing"] == []
    assert described["ablation"]["effects"]


def test_health_uses_the_trace(measured: Path, trained: Path) -> None:
    def figure(folder: Path) -> str:
        health = describe_run(read_run_folder(folder))["health"]
        return next(str(h["figure"]) for h in health if h["name"] == "spike of an output")

    norms = Survey.load(measured / "attnres").figures["magnitudes"]["output_norm"]
    assert f"{max(norms):.3g} against" in figure(measured / "attnres")


def test_what_is_there_is_not_measured_again(measured: Path) -> None:
    before = times(measured / "attnres")
    measure_missing(read_run_folder(measured / "attnres"))
    assert times(measured / "attnres") == before


def test_only_what_is_missing_is_measured(measured: Path, tmp_path: Path) -> None:
    shutil.copytree(measured / "attnres", tmp_path / "attnres")
    (tmp_path / "attnres" / "ablation.json").unlink()
    before = (tmp_path / "attnres" / "trace.json").read_bytes()
    run = read_run_folder(tmp_path / "attnres")
    measure_missing(run, tokens=128)
    assert run.ablation is not None
    assert (tmp_path / "attnres" / "trace.json").read_bytes() == before


def test_a_damaged_trace_is_measured_again_and_no_longer_missing(measured: Path, tmp_path: Path) -> None:
    shutil.copytree(measured / "attnres", tmp_path / "attnres")
    (tmp_path / "attnres" / "trace.json").write_text("{")
    run = read_run_folder(tmp_path / "attnres")
    assert run.missing
    measure_missing(run, tokens=128)
    assert run.missing == []
    assert run.trace is not None


def test_a_trace_older_than_the_weights_is_made_again(measured: Path, tmp_path: Path) -> None:
    folder = tmp_path / "attnres"
    shutil.copytree(measured / "attnres", folder)
    run = read_run_folder(folder)
    assert not is_stale(run)
    later = (folder / "trace.json").stat().st_mtime + 100
    os.utime(folder / "final" / "model.safetensors", (later, later))
    assert is_stale(run)
    for name in ("trace.json", "ablation.json"):
        (folder / name).touch()
        os.utime(folder / name, (later - 50, later - 50))
    content = json.loads((folder / "trace.json").read_text())
    measure_missing(run, tokens=128)
    assert run.trace is not None
    assert run.trace.content["tokens"] == 128 != content["tokens"]


def test_another_text_is_measured_once(measured: Path, tmp_path: Path) -> None:
    folder = tmp_path / "attnres"
    shutil.copytree(measured / "attnres", folder)
    text = tmp_path / "poem.txt"
    text.write_text("what a layer reads " * 20)
    run = read_run_folder(folder)
    measure_missing(run, text=text, tokens=200)
    assert run.trace is not None
    assert run.trace.content["text"]["source"] == "poem.txt"
    assert run.trace.content["tokens"] == 200, "the last row is shorter"
    assert run.trace.content["table"]["tokens"][:4] == ["w", "h", "a", "t"]
    before = times(folder)
    measure_missing(read_run_folder(folder), text=text, tokens=200)
    assert times(folder) == before


def test_a_text_shorter_than_the_context_is_one_row(measured: Path, tmp_path: Path) -> None:
    folder = tmp_path / "attnres"
    shutil.copytree(measured / "attnres", folder)
    (tmp_path / "short.txt").write_text("a layer")
    run = read_run_folder(folder)
    measure_missing(run, text=tmp_path / "short.txt")
    assert run.trace is not None
    assert run.trace.content["tokens"] == 7
    assert run.ablation is not None
    assert run.ablation["rows"] == 1


def said(run: SavedRun) -> str:
    measure_missing(run)
    return "\n".join(run.missing)


def test_what_cannot_be_measured_is_said_with_its_reason(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs / "attnres" / "config.toml"
    whole = path.read_text()
    path.write_text(whole.replace('name = "attnres"', 'name = "plug_in_of_others"'))
    assert "The run could not be measured: " in said(read_run_folder(runs / "attnres"))
    assert "unknown mechanism 'plug_in_of_others'" in capsys.readouterr().err
    path.write_text(whole.replace('kernel = "elu1"', 'kernel = "some_module:f"'))
    assert "names the function some_module:f" in said(read_run_folder(runs / "attnres"))
    path.write_text(whole)
    weights = runs / "attnres" / "final" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert "has" in said(read_run_folder(runs / "attnres"))
    assert "truncated or from another save" in said(read_run_folder(runs / "attnres"))


def test_without_weights_nothing_is_tried(runs: Path) -> None:
    for name in ("final", "checkpoints"):
        shutil.rmtree(runs / "attnres" / name)
    run = read_run_folder(runs / "attnres")
    measure_missing(run)
    assert run.missing == []
    assert not (runs / "attnres" / "trace.json").exists()


def test_findings_and_patterns_of_single_runs(measured: Path, trained: Path) -> None:
    folders = [measured / "block_attnres", measured / "attnres", trained / "residual"]
    document = make_document(open_folders(folders), "c")
    assert [p["block"] for p in document["patterns"]] == ["block_attnres"]
    claims = {finding["claim"] for finding in document["findings"]}
    assert "Block AttnRes keeps the pattern of Full AttnRes" in claims
    assert all("one seed" in finding["figure"] for finding in document["findings"])
