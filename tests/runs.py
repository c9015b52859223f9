"""Tiny runs of training, in this process and in others that can be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.hf_storage  # here, so that not every process that is killed imports it again

from depthmix.training import TrainConfig, override, read_metrics, train

# One thread, as in the tests themselves: bits depend on the number.
CHILD = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL = {
    "data.tokens_per_row": 16,
    "data.rows": 4,
    "run.steps": 12,
    "run.validate_every": 6,
    "run.validate_batches": 2,
    "run.checkpoint_every": 4,
    "run.depth_every": 6,
    "run.snapshot_every": 6,
}


def tiny_run(folder: Path, mixer: str = "block_attnres", *, depth: int = 4, **changes: Any) -> TrainConfig:
    """Fields by their dotted keys, with two underscores for each dot: optimizer__lr=1."""
    text = folder.parent / "text"
    if not text.is_dir():
        text.mkdir(parents=True)
        words = random.Random(0)
        for i in range(12):
            line = " ".join(words.choice(["depth", "mixes", "what", "a", "layer", "reads"]) for _ in range(300))
            (text / f"{i}.txt").write_text(line)
    config = TrainConfig.from_dial(depth, mixer, folder=str(folder), dim=16, heads=2, hidden=24)
    where = {"data.source": str(text), "data.folder": str(folder.parent / "tokens"), "data.validation": 0.2}
    for key, value in {**where, **SMALL, **{k.replace("__", "."): v for k, v in changes.items()}}.items():
        config = override(config, key, value)
    return config


def weights(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == kind]


def work(toml: str) -> None:
    torch.set_num_threads(1)
    train(TrainConfig.from_toml(toml))


def start(config: TrainConfig) -> Any:
    """A process of its own, from a server that has imported everything and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runs"])
    process = context.Process(target=work, args=(config.to_toml(),))
    process.start()
    return process


def steps_done(folder: Path) -> int:
    try:
        text = (folder / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in text if line.endswith("}")), default=0)
    except FileNotFoundError:
        return 0
