"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import depthmix as dm
from depthmix.cli import main


def test_list_names_every_mechanism(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name in dm.list_mechanisms():
        assert name in out
        paper = (dm.mechanism(name).paper or "").removeprefix("arXiv ").split(", ")[0]
        assert paper in out, "80 columns hold the papers at the default size"
    assert "FLOPs    forward pass, per token and sublayer, divided by D" in out
    assert all(len(line) <= 80 for line in out.splitlines()), "fits a plain terminal"


def test_list_as_json_holds_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json", "--dim", "64", "--depth", "6"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {*dm.list_mechanisms(), *dm.list_mechanisms(kind="kv")}
    assert rows["depth_attention"]["kind"] == "kv"
    assert rows["attnres"]["parameters"] == 2 * 6 * 64
    assert rows["attnres"]["two_phase"] is True
    assert (rows["residual"]["flops"], rows["residual"]["forward_flops"]) == (6 * 64, 6 * 64)
    assert rows["attnres"]["forward_flops"] == rows["attnres"]["flops_two_phase"] < rows["attnres"]["flops"]
    assert rows["value_residual"]["flops"] == 3 * 64 * (3 - 1), "three attention layers"
    assert rows["residual"]["preserves_prenorm"] == "exact"
    assert rows["mhc"]["rank"] == 4
    assert rows["ddl"]["rank"] is None
    assert {"paper", "state", "reads", "writes"} <= set(rows["ddl"])


PAPERS_SIZES = ["--depth", "128", "--dim", "1024", "--set", "block_attnres.num_blocks=8", "--set", "mhc.streams=4",
                "-s", "attnres.group_sublayers=16", "-s", "depth_attention.stride=4"]  # fmt: skip


def test_list_gives_the_papers_traffic_when_asked_for_the_papers_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Table 1 of arXiv 2603.15031 at L = 128, N = 8, S = 16, m = 4: 3d, 34d and the streams' matrices, 24d, 5.5d."""
    assert main(["list", "--json", *PAPERS_SIZES]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    widths = {name: (row["reads"] + row["writes"]) / 1024 for name, row in rows.items() if row["kind"] == "depth"}
    assert widths["residual"] == 3
    assert widths["mhc"] == 34 + (2 * 4**2 + 4 * 4) / 1024
    assert widths["attnres"] == 24
    assert widths["block_attnres"] == 5.5
    assert rows["block_attnres"]["options"]["num_blocks"] == 8
    assert rows["depth_attention"]["options"]["stride"] == 4
    assert main(["list", *PAPERS_SIZES]) == 0
    out = capsys.readouterr().out
    traffic = {name: next(line for line in out.splitlines() if line.startswith(f"{name} ")) for name in widths}
    for name, cell in (("attnres", "22+2"), ("block_attnres", "3.5+2"), ("mhc", "21+13")):
        assert f" {cell} " in traffic[name]
    assert "block_attnres.num_blocks=8" in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines()), "fits a plain terminal"


def test_list_takes_the_last_of_two_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json", "-s", "mhc.streams=2", "-s", "mhc.streams=3"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mhc"]["rank"] == 3
    assert rows["hyper_connections"]["rank"] == 4, "nobody set it"


@pytest.mark.parametrize("words", [("list",), ("list", "--dim", "4096", "--depth", "256"),
                                   ("show", "--preset", "all"), ("show", "--preset", "attnres-194m"),
                                   ("show", "attnres"), ("show", "mhc"), ("show", "depth_attention"),
                                   ("verify", "highway", "--checks"), ("verify", "scaled_residual")])  # fmt: skip
def test_nothing_breaks_inside_a_word_at_80_columns(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for columns in ("300", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(list(words)) == 0
        texts.append(capsys.readouterr().out)
    wide, narrow = ({w for w in re.findall(r"[^\s│┃]+", text) if re.search(r"\w", w)} for text in texts)
    assert narrow - wide == set(), "a word is broken"
    assert max(map(len, texts[1].splitlines())) <= 80


@pytest.mark.parametrize("name", [*dm.list_mechanisms(), *dm.list_mechanisms(kind="kv")])
def test_show_sets_equations_against_code(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", name]) == 0
    out = capsys.readouterr().out
    assert name in out
    assert ".py:" in out
    assert "parameters" in out
    assert "FLOPs per token, forward" in out


def test_show_takes_options_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["show", "block_attnres", "--options", "block_sublayers=4", "mixing=sigmoid", "--dim", "64", "--json"]
    assert main(arguments) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["options"]["mixing"] == "sigmoid"
    assert page["note"] == "6 blocks of 4 sublayers"
    assert page["cost"]["state_in_read_bytes_per_token"] == 7 * 64 * 2
    assert {row["option"] for row in page["option_table"]} >= {"heads", "num_blocks", "scale_by_count"}
    assert all(row["meaning"] for row in page["option_table"])
    assert all(row["code"] for row in page["equations"])


def test_verify_prints_a_table_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "residual", "highway"]) == 0
    out = capsys.readouterr().out
    assert "72 of 72 checks hold" in out


def test_verify_as_json_names_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "scaled_residual", "--json", "--dtype", "float32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "float32" in report["where"]
    assert all(row["holds"] for row in report["checks"])
    assert {row["mechanism"] for row in report["checks"]} == {"scaled_residual"}


def test_verify_fails_where_a_mechanism_is_broken(tmp_path: Path) -> None:
    """A package that registers a mechanism which is not what it says: exit code 1 and the check by name."""
    (tmp_path / "broken_mixer.py").write_text(
        "from depthmix.mechanisms.residual import Residual\n"
        "class Broken(Residual):\n"
        "    def update(self, state, c, v):\n"
        "        return (0.5 * state[0] + v,)\n"
    )
    info = tmp_path / "broken_mixer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-mixer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[depthmix.mechanisms]\nbroken = broken_mixer:Broken\n")
    done = subprocess.run(
        [sys.executable, "-m", "depthmix", "verify", "broken"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "FAILS" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "atnres"], ["unknown mechanism 'atnres'", "Did you mean 'attnres'"]),
        (["show", "attnres", "--options", "heads"], ["'heads'", "KEY=VALUE"]),
        (["show", "attnres", "--options", "heads=5"], ["heads=5", "dim=768"]),
        (["show", "attnres", "--dtype", "int8"], ["'int8'", "floating"]),
        (["show", "mhc", "--dtype", "float8_e4m3fn"], ["'float8_e4m3fn'", "such as bfloat16"]),
        (["verify", "nothing"], ["unknown mechanism 'nothing'"]),
        (["verify", "residual", "--device", "nowhere"], ["'nowhere'", "try cpu"]),
        (["verify", "residual", "--device", "meta"], ["'meta'", "try cpu"]),
        (["verify", "--dim", "7"], ["dim=7", "multiple of 8"]),
        (["list", "--depth", "0"], ["depth=0"]),
        (["list", "--set", "num_blocks=8"], ["'num_blocks=8'", "NAME.OPTION=VALUE", "block_attnres.num_blocks=8"]),
        (["list", "--set", "mhc.streams"], ["'mhc.streams'", "expected KEY=VALUE"]),
        (["list", "--set", "blok_attnres.num_blocks=8"], ["unknown mechanism 'blok_attnres'", "'block_attnres'?"]),
        (["list", "--set", "block_attnres.num_block=8"], ["no option 'num_block'", "Did you mean 'num_blocks'"]),
        (["list", "--set", "depth_attention.strid=8"], ["no option 'strid'", "Did you mean 'stride'"]),
        (["list", "--set", "mhc.streams=1"], ["streams=1", "One stream is the mechanism 'residual'"]),
    ],
)
def test_wrong_input_ends_with_its_message(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    for word in words:
        assert word in captured.err
    assert "Traceback" not in captured.err


WITHOUT = "import sys; sys.modules['matplotlib'] = None; from depthmix.cli import main; sys.exit(main(sys.argv[1:]))"
TINY = ["data.rows=2", "data.tokens_per_row=16", "run.validate_batches=1"]


@pytest.mark.parametrize("verb", ["compare", "scaling"])
def test_without_matplotlib_a_study_runs_and_leaves_its_figures_out(verb: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for k in range(20):
        (tmp_path / "text" / f"{k}.txt").write_text(f"the file of number {k} says the same as the others. " * 20)
    sizes = {"compare": ["--depth", "2", "--dim", "16", "--seeds", "1"], "scaling": ["--sizes", "2x8", "2x16"]}[verb]
    given = [verb, "--mixers", "residual", *sizes, "--tokens", "160", "--data", "text", "--folder", "study"]
    for setting in TINY:
        given += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT, *given]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    hints = [line for line in done.stderr.splitlines() if "depthmix[" in line]
    assert hints == [
        "matplotlib is not installed, so figures are left out; add them with: pip install 'depthmix[figures]'"
    ]
    page = tmp_path / "study" / ("comparison.md" if verb == "compare" else "scaling.md")
    assert "residual" in page.read_text()
    assert "![" not in page.read_text()
    assert not [*tmp_path.rglob("*.png")]


def test_figures_that_were_asked_for_are_an_error_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["bench", "--quick", "--figures", str(tmp_path / "figures")]) == 2
    assert "pip install 'depthmix[figures]'" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from depthmix.analysis import figures

    for module in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r"depthmix\[figures\]"):
        figures.new_figure()
