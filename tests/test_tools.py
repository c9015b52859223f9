"""The scripts under tools/: what they compare, and that they see a difference."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from depthmix.mechanisms import registry
from depthmix.training import TrainConfig
from depthmix.training.dial import split_mixer
from tools import path_lengths, same_results, web_sources
from tools.checkouts import ROOT


def test_the_compared_runs_reach_every_mechanism_and_are_configurations_of_this_version() -> None:
    runs = same_results.runs_of([same_results.ROOT, same_results.ROOT])
    assert {name for mixer, _ in runs.values() for name in mixer.split("+")} == set(registry.DEPTH | registry.KV)
    for name, (mixer, changes) in runs.items():
        config = TrainConfig.from_toml(same_results.configuration(changes))
        assert split_mixer(mixer)
        assert (config.optimizer.name == "muon") == ("Muon" in name)
        assert (config.run.precision == "bfloat16") == ("bfloat16" in name)
        assert (config.model.moe is not None) == ("experts" in name)
        assert (config.model.loop is not None) == ("loop" in name)


def test_one_bit_of_one_weight_is_seen_and_metadata_is_not(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    other = weight.clone()
    other.view(torch.int32)[1, 2] ^= 1
    save_file({"a": weight}, tmp_path / "x.safetensors")
    before = same_results.tensors_digest([tmp_path / "x.safetensors"])
    save_file({"a": weight}, tmp_path / "x.safetensors", metadata={"version": "2"})
    assert same_results.tensors_digest([tmp_path / "x.safetensors"]) == before
    save_file({"a": other}, tmp_path / "x.safetensors")
    assert same_results.tensors_digest([tmp_path / "x.safetensors"]) != before
    save_file({"a": weight, "b": other}, tmp_path / "x.safetensors")
    assert same_results.tensors_digest([tmp_path / "x.safetensors"], only="a") == before


def test_a_difference_is_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    one = {"residual": {"weights": "a" * 64, "losses": "b" * 64}}
    two = {"residual": {"weights": "a" * 64, "losses": "c" * 64}}
    assert same_results.print_table(one, one) == 0
    assert same_results.print_table(one, two) == 1
    assert "| residual | aaaaaaaaaaaa | bbbbbbbbbbbb → cccccccccccc | DIFFERENT |" in capsys.readouterr().out


def test_calls_are_counted_chains_measured_and_upward_calls_named(tmp_path: Path) -> None:
    (tmp_path / "low").mkdir()
    (tmp_path / "high").mkdir()
    files = {
        "low/a.py": "def down(n, back):\n    return down(n - 1, back) if n else back()",
        "high/b.py": "def up():\n    return 1\ndef begin(down):\n    return down(3, up)",
    }
    scope: dict = {}
    for name, text in files.items():
        exec(compile(text, str(tmp_path / name), "exec"), scope)
    calls = path_lengths.Calls(str(tmp_path), ["low", "high"])
    before = sys.getprofile()
    with calls.watching():
        scope["begin"](scope["down"])
    sys.setprofile(before)
    assert json.loads(json.dumps(calls.found())) == {
        "functions": 3,
        "chain": ["high/b.py:begin", "low/a.py:down", "high/b.py:up"],
        "upward": ["low/a.py:down → high/b.py:up"],
    }


def test_the_order_of_the_floors_is_read_from_the_checkout() -> None:
    floors = path_lengths.floors_of(Path(path_lengths.ROOT))
    assert floors[0] == "support"
    assert floors[-1] == "cli"


def test_the_page_was_built_from_the_sources_beside_it(tmp_path: Path) -> None:
    assert web_sources.bundle_digest(web_sources.PAGE) == web_sources.sources_digest(web_sources.WEB), "run `make web`"
    copy = tmp_path / "web"
    shutil.copytree(web_sources.WEB, copy, ignore=shutil.ignore_patterns("node_modules"))
    assert web_sources.sources_digest(copy) == web_sources.sources_digest(web_sources.WEB)
    (copy / "src" / "main.ts").write_text("// another\n")
    assert web_sources.sources_digest(copy) != web_sources.sources_digest(web_sources.WEB)


def test_no_lockfile_names_an_address() -> None:
    for lockfile in (web_sources.WEB / "package-lock.json", ROOT / "tests" / "browser" / "package-lock.json"):
        assert "http" not in lockfile.read_text(encoding="utf-8"), lockfile
