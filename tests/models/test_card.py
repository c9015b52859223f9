"""The card beside a trained model says what its files hold, in words."""

from __future__ import annotations

from pathlib import Path

import depthmix as dm
from depthmix.models.card import MARK, decoder_card, write_card
from depthmix.training import TrainConfig, override, train
from tests.decoders import tiny


def test_a_decoders_card_names_mechanism_units_size_and_training() -> None:
    model = tiny("moe", mixer={"name": "block_attnres", "num_blocks": 3}, kv_mixer="depth_attention")
    text = decoder_card(model, Path("runs/final"), {"seed": "3", "tokens": 12345, "left out": None})
    for words in (
        "- block_attnres\n- depth_attention\n",
        "# A decoder with block_attnres and depth_attention\n",
        "3 blocks of 2 sublayers",
        "`num_blocks=3`",
        f"| parameters | {sum(p.numel() for p in model.parameters()):,} |",
        "| of which a token uses |",
        "| seed | 3 |",
        "| tokens | 12,345 |",
        'dm.load_model("final")',
    ):
        assert words in text, words
    assert "left out" not in text
    assert "None |" not in text


def test_a_run_leaves_a_card_with_its_seeds_tokens_and_data(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("what should a layer read? " * 200)
    config = TrainConfig.from_dial(2, "attnres", dim=32, folder=str(tmp_path / "run"))
    changes = {
        **{"data.source": str(tmp_path / "text.txt"), "data.folder": str(tmp_path / "tokens"), "data.rows": 2},
        **{"data.tokens_per_row": 16, "run.steps": 2, "run.seed": 7, "run.validate_batches": 1},
    }
    for key, value in changes.items():
        config = override(config, key, value)
    train(config)
    text = (tmp_path / "run" / "final" / "README.md").read_text()
    for words in ("| mechanism | attnres |", "| tokens | 64 |", "| seed | 7 |", "text.txt |", "| optimiser | muon, "):
        assert words in text, words
    dm.load_model(tmp_path / "run" / "final")


def test_a_readme_of_ones_own_is_kept(tmp_path: Path) -> None:
    write_card(tmp_path, f"{MARK}\none\n")
    write_card(tmp_path, f"{MARK}\ntwo\n")
    assert "two" in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("mine\n")
    write_card(tmp_path, f"{MARK}\nthree\n")
    assert (tmp_path / "README.md").read_text() == "mine\n"
