"""What is random in a step and what it reads: decided by (seed, step, rank), the same again after a restart."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.parallel import ranks
from depthmix.parallel.distributed import DistributedDecoder
from depthmix.parallel.layout import Layout
from depthmix.support.files import seed_of
from depthmix.training import TrainConfig, checkpoint, loop, override, resume
from depthmix.training.build import initial_model
from depthmix.training.manifest import path_of
from depthmix.training.run import Run
from tests.runs import tiny_run

Seen = list[tuple[int, float, Tensor]]


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "run").mkdir()
    return tiny_run(tmp_path / "run", run__accumulate=2, run__seed=3)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    def become(rank: int, count: int) -> None:
        monkeypatch.setattr(ranks, "rank", lambda: rank)
        monkeypatch.setattr(DistributedDecoder, "data_rank", rank)
        monkeypatch.setattr(Layout, "data", count)

    return become


def begin(config: TrainConfig) -> tuple[Run, Seen]:
    """A run, and of each micro-batch the seed of its step, a random number and the rows."""
    run = loop.begin(config, Layout(), torch.device("cpu"), lambda event: None)
    plain, seen = run.model.loss_of, []

    def loss(tokens: Tensor) -> Tensor:
        seen.append((torch.initial_seed(), float(torch.rand(())), tokens))
        return plain(tokens)

    run.model.loss_of = loss
    return run, seen


def steps(config: TrainConfig, count: int) -> Seen:
    run, seen = begin(config)
    for _ in range(count):
        loop.step(run)
    run.close()
    return seen


def same(one: Seen, two: Seen) -> bool:
    return len(one) == len(two) and all(
        a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(one, two, strict=True)
    )


def test_a_seed_is_the_one_that_earlier_runs_had() -> None:
    """Initial weights come from it: another formula would be another run under the same seed."""
    assert seed_of(0, "embed.weight") == 23100167615886480
    digest = hashlib.sha256(b"3/17/embed.weight").digest()
    assert seed_of(3, 17, "embed.weight") == int.from_bytes(digest[:7], "big") < 2**63
    assert seed_of(1, 23) != seed_of(12, 3)


def test_every_step_has_the_seed_of_its_number(config: TrainConfig) -> None:
    seeds = [seed for seed, _, _ in steps(config, 4)]
    assert seeds == [seed_of(3, step, 0) for step in range(4) for _ in range(2)]
    assert len({*seeds}) == 4


def test_every_rank_has_seeds_of_its_own(config: TrainConfig, as_rank: Any) -> None:
    seen = []
    for rank in range(2):
        as_rank(rank, 2)
        seen += steps(config, 3)
    assert len({seed for seed, _, _ in seen}) == 6
    assert {seed for seed, _, _ in seen} == {seed_of(3, step, rank) for step in range(3) for rank in range(2)}


def test_another_seed_of_the_run_gives_other_numbers_and_other_rows(config: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one = steps(config, 2)
    two = steps(tiny_run(tmp_path / "other", run__accumulate=2, run__seed=4), 2)
    assert not {seed for seed, _, _ in one} & {seed for seed, _, _ in two}
    assert not {number for _, number, _ in one} & {number for _, number, _ in two}
    assert not any(torch.equal(a[2], b[2]) for a, b in zip(one, two, strict=True))


def test_every_micro_batch_has_numbers_and_rows_of_its_own(config: TrainConfig) -> None:
    seen = steps(config, 4)
    assert len({number for _, number, _ in seen}) == 8
    rows = [tuple(row.tolist()) for _, _, tokens in seen for row in tokens]
    assert len({*rows}) == len(rows) == 8 * 4


def test_the_ranks_read_the_rows_of_one_process_between_them(config: TrainConfig, as_rank: Any) -> None:
    whole = [tokens for _, _, tokens in steps(config, 3)]
    shares = []
    for rank in range(2):
        as_rank(rank, 2)
        shares.append([tokens for _, _, tokens in steps(config, 3)])
    assert all(torch.equal(torch.cat(parts), rows) for *parts, rows in zip(*shares, whole, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_restart_has_the_numbers_and_rows_that_were_to_come(config: TrainConfig, as_rank: Any, rank: int) -> None:
    as_rank(rank, 2)
    alone = steps(config, 5)
    as_rank(0, 2)  # which writes for all
    run, _ = begin(config)
    for _ in range(2):
        loop.step(run)
    resume.save_checkpoint(run)
    run.close()
    as_rank(rank, 2)
    run, seen = begin(config)
    if rank:  # without companions there is nobody to tell it of the checkpoint
        path = path_of(run.folder / "checkpoints", 2)
        resume.restore(run, checkpoint.read(path, resume.state_tensors(run)))
    assert run.progress.step == 2
    for _ in range(3):
        loop.step(run)
    run.close()
    assert same(seen, alone[2 * 2 :])
    assert not same(seen, alone[: 3 * 2])


def test_another_seed_of_weights_keeps_the_order_of_the_data(config: TrainConfig) -> None:
    other = override(config, "run.weights_seed", 1)
    assert same(steps(config, 3), steps(other, 3))
    start, anew = (dict(initial_model(c).named_parameters()) for c in (config, other))
    assert not torch.equal(start["embed.weight"], anew["embed.weight"])
    assert config.digest != other.digest
    assert config.digest == override(other, "run.weights_seed", 0).digest


def test_a_seed_of_weights_is_not_a_seed_of_the_run(config: TrainConfig) -> None:
    """Weights of (seed, weights_seed) belong to no other pair: a control never repeats another run."""
    drawn = [
        initial_model(override(override(config, "run.seed", seed), "run.weights_seed", draw)).embed.weight
        for seed in range(3)
        for draw in range(3)
    ]
    assert len({weight[0, 0].item() for weight in drawn}) == 9
