"""The examples for Hugging Face run, small, and leave what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import depthmix as dm
from depthmix.data import ByteTokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from depthmix.hf.tokenizer import from_tokenizer  # noqa: E402
from tests.hf.family_models import move_mixers, tiny_model  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_interpreting_a_retrofitted_model_names_routes_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    model = move_mixers(dm.wrap(tiny_model("llama", vocab_size=256), "block_attnres", num_blocks=4))
    model.save_pretrained(tmp_path / "model")
    from_tokenizer(ByteTokenizer()).save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("what should a layer read? " * 20)
    out = run("hf_interpret.py", tmp_path / "model", text, "--folder", tmp_path / "out", "--tokens", 384)
    assert "strongest routes" in out
    assert "semiseparable rank of M: 4 at most" in out
    assert {"matrix.png", "importance.png", "ablation.json"} <= {p.name for p in (tmp_path / "out").iterdir()}


def test_training_from_scratch_with_trainer_resumes_and_writes_a_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    out = run("hf_trainer.py", tmp_path, "--steps", 4)
    losses = [float(line.split()[-1]) for line in out.splitlines() if "validation loss" in line]
    assert losses[1] < losses[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("def")["input_ids"] == list(b"def")
    with torch.no_grad():
        assert model(torch.tensor([list(b"def")])).logits.shape == (1, 3, 256)
    out = run("hf_trainer.py", tmp_path, "--steps", 6)  # resumes after step 4
    assert "after 6 steps" in out
    assert (tmp_path / "checkpoints" / "checkpoint-6").is_dir()


@pytest.mark.full
def test_a_retrofit_is_compared_with_going_on_without(tmp_path: Path) -> None:
    out = run("hf_retrofit.py", tmp_path, "--steps", 3)
    assert "a model to begin with: loss" in out
    assert "block_attnres" in out
    assert "away from the plain residual's 1" in out
    (final,) = tmp_path.glob("comparison/runs/block_attnres*/final")
    assert "with block_attnres" in (final / "README.md").read_text()
    assert dm.trace(transformers.AutoModelForCausalLM.from_pretrained(final), torch.tensor([[1, 2]])).M.shape[-1] == 17
