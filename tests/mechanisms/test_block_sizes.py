"""How block_attnres cuts its sublayers into blocks, and what it says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import depthmix as dm
from depthmix.cli import main
from depthmix.mechanisms.block_attnres import BlockAttnRes, BlockAttnResConfig
from depthmix.models.presets import PRESETS
from tests.runs import tiny_run

ODD = "an odd block size is not a whole number of layers"


def note(config: BlockAttnResConfig, depth: int) -> str:
    return BlockAttnRes.facts(config, dim=4, depth=depth).note


def plainly(depth: int) -> int:
    """Of all even sizes that fit the depth the nearest to depth / 8; of two equally near ones the larger."""
    best = 2
    for size in range(2, depth + 1, 2):
        if abs(size - depth / 8) <= abs(best - depth / 8):
            best = size
    return best if depth > 1 else 1


@settings(max_examples=200, deadline=None)
@given(depth=st.integers(1, 200))
def test_without_options_a_block_has_the_even_size_nearest_to_an_eighth_of_the_depth(depth: int) -> None:
    config = BlockAttnResConfig()
    assert config.size(depth) == plainly(depth)
    assert "odd" not in note(config, depth)


@settings(max_examples=100, deadline=None)
@given(depth=st.integers(1, 200), data=st.data())
def test_a_given_number_of_blocks_or_size_is_kept_and_an_odd_size_is_named(depth: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(1, depth))
    by_number, by_size = BlockAttnResConfig(num_blocks=number), BlockAttnResConfig(block_sublayers=number)
    assert by_number.size(depth) == -(-depth // number)
    assert by_size.size(depth) == number
    for config in (by_number, by_size):
        boundaries = range(0, depth, config.size(depth))
        assert (ODD in note(config, depth)) is any(boundary % 2 for boundary in boundaries)


def test_eight_sublayers_are_no_longer_full_attnres_without_a_word() -> None:
    assert dm.DepthStack("block_attnres", dim=4, depth=8).facts.note == "4 blocks of 2 sublayers"
    asked = dm.DepthStack("block_attnres", dim=4, depth=8, num_blocks=8)
    assert asked.facts.note.startswith("8 blocks of 1 sublayers: full AttnRes; an odd")
    assert dm.DepthStack("block_attnres", dim=4, depth=1).facts.note == "1 blocks of 1 sublayers"


def test_presets_keep_the_papers_eight_blocks() -> None:
    found = {}
    for name in (name for name in PRESETS if name.startswith("attnres-")):
        config = dm.preset(name)
        assert config.mixer.to_dict()["num_blocks"] == 8
        found[name] = BlockAttnResConfig(num_blocks=8).size(2 * config.layers)
    assert list(found.values()) == 2 * [3, 4, 4, 4, 5]  # on the paper's backbone, and with grouped queries


def test_every_place_that_describes_a_stack_names_an_odd_size(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        assert ODD in repr(dm.DepthStack("block_attnres", dim=64, depth=24, num_blocks=8))
    assert main(["show", "block_attnres", "--options", "num_blocks=8", "--depth", "24", "--json"]) == 0
    assert ODD in json.loads(capsys.readouterr().out)["note"]
    assert main(["show", "block_attnres", "--options", "num_blocks=8", "--depth", "24"]) == 0
    assert "is not a whole number" in capsys.readouterr().out
    assert main(["list", "--depth", "24"]) == 0
    assert "block_attnres: 6 blocks of 4 sublayers" in capsys.readouterr().out


def test_the_first_lines_of_training_say_how_blocks_fall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(tiny_run(tmp_path / "run", depth=6, run__steps=1, model__mixer__num_blocks=2).to_toml())
    assert main(["train", "--config", str(file)]) == 0
    assert f" parameters; 2 blocks of 3 sublayers; {ODD}" in capsys.readouterr().err
