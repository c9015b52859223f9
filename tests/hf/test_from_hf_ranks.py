"""Runs that continue a model of transformers on several processes: FSDP2 follows the curve of one process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.training import load_run, train
from depthmix.training.checkpoint import load_latest
from tests.parallel.test_layout_checkpoints import follow
from tests.runs import lines

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from tests.hf.base_models import continued_run  # noqa: E402

pytestmark = pytest.mark.full
STEPS = {
    "run__steps": 10,
    "run__validate_every": 5,
    "run__checkpoint_every": 2,
    "run__snapshot_every": 0,
    "run__validate_batches": 1,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # mixer, layout, changes
    "residual": ("residual", {"fsdp": 2}, {}),
    "block_attnres, values": ("block_attnres+value_residual", {"fsdp": 2}, {"mixer__num_blocks": 2}),
    "mhc, muon": ("mhc", {"fsdp": 2}, {"optimizer__name": "muon"}),
    "tied": ("attnres", {"fsdp": 2}, {"kind": "llama, tied"}),
    "replicas": ("attnres", {"replicate": 2}, {}),
    "recomputed": ("attnres+depth_attention", {"fsdp": 2}, {"run__recompute": 2}),
    "frozen": ("attnres", {"fsdp": 2}, {"freeze_base": True}),
    "accumulated": ("denseformer", {"fsdp": 2}, {"run__accumulate": 2}),
}


def curves(folder: Path, kind: str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(folder, kind)}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_follow_the_curve_of_one(case: str, tmp_path: Path) -> None:
    mixer, layout, changes = CASES[case]
    train(continued_run(tmp_path / "alone", mixer, **STEPS, **changes))
    follow(continued_run(tmp_path / "run", mixer, **STEPS, **changes), 2, layout, None)
    for kind in ("train", "validation"):
        assert curves(tmp_path / "run", kind) == pytest.approx(curves(tmp_path / "alone", kind), rel=1e-6)
    norms = [[line["grad_norm"] for line in lines(tmp_path / name, "train")] for name in ("alone", "run")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    depth = [lines(tmp_path / name, "depth")[-1]["output_norm"] for name in ("alone", "run")]
    assert depth[1] == pytest.approx(depth[0], rel=1e-4)
    one, other = (load_run(tmp_path / name).state_dict() for name in ("alone", "run"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], atol=1e-4), name
    assert "view tensor" not in Path(f"{tmp_path / 'run'}.log").read_text()


def test_in_double_precision_two_processes_differ_by_rounding_only(tmp_path: Path) -> None:
    changes = {**STEPS, "run__precision": "float64"}
    train(continued_run(tmp_path / "alone", "block_attnres+value_residual", **changes))
    follow(continued_run(tmp_path / "run", "block_attnres+value_residual", **changes), 2, {"fsdp": 2}, None)
    assert curves(tmp_path / "run", "train") == pytest.approx(curves(tmp_path / "alone", "train"), rel=1e-9)


def test_four_processes_shard_within_copies(tmp_path: Path) -> None:
    train(continued_run(tmp_path / "alone", "attnres", **STEPS))
    follow(continued_run(tmp_path / "run", "attnres", **STEPS), 4, {"replicate": 2, "fsdp": 2}, None)
    assert curves(tmp_path / "run", "train") == pytest.approx(curves(tmp_path / "alone", "train"), rel=1e-6)


def test_mixed_precision_learns(tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", "block_attnres+value_residual", **STEPS, run__precision="bfloat16")
    follow(config, 2, {"fsdp": 2}, None)
    losses = [*curves(tmp_path / "run", "train").values()]
    assert losses[-1] < losses[0] - 0.3
    assert all(parameter.dtype == torch.float32 for parameter in load_run(tmp_path / "run").parameters())


@pytest.mark.parametrize("kind", ["qwen3", "llama, tied"])
def test_a_run_moves_from_two_processes_to_one_and_back(kind: str, tmp_path: Path) -> None:
    changes = {**STEPS, "run__steps": 40, "kind": kind}
    train(continued_run(tmp_path / "alone", "block_attnres+depth_attention", **changes))
    config = continued_run(tmp_path / "run", "block_attnres+depth_attention", **changes)
    follow(config, 2, {"fsdp": 2}, (signal.SIGKILL, 10))
    assert load_latest(tmp_path / "run" / "checkpoints") is not None
    follow(config, 1, {}, (signal.SIGTERM, 20))
    assert load_run(tmp_path / "run").config.depthmix["mixer"]["name"] == "block_attnres"
    follow(config, 2, {"fsdp": 2}, None)
    for kind_of_line in ("train", "validation"):
        one, moved = (curves(tmp_path / name, kind_of_line) for name in ("alone", "run"))
        assert moved == pytest.approx(one, rel=1e-5)
