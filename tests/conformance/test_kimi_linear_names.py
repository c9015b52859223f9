"""transformers: the files of its Kimi Linear in our decoder, and the files of our decoder in its Kimi Linear."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import depthmix as dm
from depthmix.models.names import convert_checkpoint, write_checkpoint
from tests.conformance import kimi_linear_model as theirs

pytest.importorskip("transformers.models.kimi_linear", reason="transformers 5.22 is the first that has it")

PEER = "transformers"
ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {
    **{"vocab_size": theirs.VOCABULARY, "dim": 24, "layers": 6, "heads": 3, "hidden": 40, "norm_eps": 1e-2},
    "attention": ["kda", "mla", "kda", "kda", "kda", "mla"],
    "kda": {"heads": 2, "head_dim": 7, "conv": 3},
    "mla": {"rank": 10, "nope": 6, "shared": 4, "value": 5},
    "moe": {"experts": 6, "active": 3, "shared": 2, "hidden": 9, "scoring": "sigmoid", "scale": 1.3, "dense_layers": 1},
}


def ours() -> dm.Decoder:
    torch.manual_seed(0)
    model = dm.Decoder(dm.DecoderConfig(**SIZES)).double().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
    return model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi_linear_names")
    write_checkpoint(ours(), folder / "ours", "kimi_linear", shard_size="20KB")
    command = [sys.executable, "-m", "tests.conformance.kimi_linear_files", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def results(folder: Path) -> dict[str, Tensor]:
    found = load_file(folder / "results.safetensors")
    assert all(tensor.dtype == torch.float64 for tensor in found.values())
    return found


@torch.no_grad()
def test_their_files_give_their_logits_in_our_decoder(written: Path, tmp_path: Path, agree: Any) -> None:
    assert len(list((written / "theirs").glob("model-*.safetensors"))) > 1
    converted = convert_checkpoint(written / "theirs", tmp_path, "kimi_linear")
    assert converted.notes == ()
    logits, expected = dm.load_model(tmp_path)(theirs.whole()), results(written)["theirs"]
    assert (logits - expected).abs().max() <= 1e-10
    agree("Kimi Linear, logits of its files", [logits], [expected], tolerance=1e-10)


@torch.no_grad()
def test_our_files_give_our_logits_in_their_model(written: Path, agree: Any) -> None:
    assert len(list((written / "ours").glob("model-*.safetensors"))) > 1
    assert json.loads((written / "loading.json").read_text()) == {}
    logits, expected = ours()(theirs.whole()), results(written)["ours"]
    assert (logits - expected).abs().max() <= 1e-10
    agree("Kimi Linear, logits of our files", [logits], [expected], tolerance=1e-10)
