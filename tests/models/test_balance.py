"""The auxiliary loss of a mixture of experts arrives: over ranks, under activation checkpointing, in one graph."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # here, so that the server of the ranks imports it once for both
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from depthmix.models import Decoder, DecoderConfig, MoEConfig
from depthmix.models.moe import MixtureOfExperts
from depthmix.parallel import ranks
from depthmix.parallel.wrap import shard

RANKS = 2
LONGEST = timedelta(minutes=2)  # that one rank waits for the other
BOUND = {"float32": 1e-5, "float64": 1e-11}
SETTINGS = [*itertools.product(("softmax", "sigmoid"), ("bias", "loss", "none"), (0, 1))]


def make(scoring: Any, balance: Any, shared: int, dtype: str = "float64") -> Decoder:
    """Away from its start: every mixer mixes, and no router is even."""
    torch.manual_seed(0)
    moe = MoEConfig(experts=5, active=2, shared=shared, hidden=6, scoring=scoring, balance=balance, balance_rate=0.3)
    mixer = {"name": "block_attnres", "block_sublayers": 2}
    config = DecoderConfig(vocab_size=19, dim=8, layers=2, heads=2, hidden=6, moe=moe, mixer=mixer)
    model = Decoder(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for tensor in (*model.parameters(), *(m.balance_bias for m in experts_of(model) if m.balance_bias is not None)):
            tensor.add_(torch.randn_like(tensor), alpha=0.3)
    return model


def experts_of(model: Decoder) -> list[MixtureOfExperts]:
    return [m for m in model.modules() if isinstance(m, MixtureOfExperts)]


def rows_of(rank: int) -> Tensor:
    return torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(rank))


def learned(model: Decoder, rows: list[Tensor]) -> dict[str, Tensor]:
    """Loss, gradients and load; of the mean loss over these rows as micro-batches, and over ranks where there are."""
    loss = torch.zeros(())
    for part in rows:
        one = model.loss(part) / len(rows)
        one.backward()
        loss = loss + one.detach()
    loads = {f"load {i}": m.load for i, m in enumerate(experts_of(model)) if m.load is not None}
    if dist.is_initialized():
        for tensor in (loss, *loads.values()):
            dist.all_reduce(tensor)
        loss /= RANKS
    grads = {name: ranks.full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, **grads, **{name: load.double() for name, load in loads.items()}}


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # What one process learns, before there are ranks.
    cases = [*itertools.product(SETTINGS, BOUND)]
    alone = [learned(make(*setting, dtype), [rows_of(r) for r in range(RANKS)]) for setting, dtype in cases]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=LONGEST)
    mesh = init_device_mesh("cpu", (RANKS,))
    found = []
    for ((setting, dtype), expected), every in itertools.product(zip(cases, alone, strict=True), (None, 3)):
        model = make(*setting, dtype)
        shard(model, model, mesh, bfloat16=False)
        model.checkpoint_every = every
        mine = learned(model, [rows_of(rank)])
        wrong = {name: float((mine[name] - x).norm() / x.norm()) for name, x in expected.items()}
        found.append(
            {"setting": (*setting, every), "dtype": dtype, "same names": mine.keys() == expected.keys(), "wrong": wrong}
        )
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def test_two_ranks_learn_what_one_process_learns_from_their_rows(tmp_path: Path) -> None:
    """Under FSDP2 as training shards, with and without activation checkpointing. The rows are micro-batches of the one
    process, since the auxiliary loss is not linear in the batch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.models.test_balance"])
    processes = [context.Process(target=one_rank, args=(rank, str(tmp_path))) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * RANKS
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == 2 * len(SETTINGS) * len(BOUND)
        for case in found:
            assert case["same names"]
            assert max(case["wrong"].values()) <= BOUND[case["dtype"]], case


@pytest.mark.parametrize("every", [1, 3])
def test_a_segment_that_is_made_again_keeps_its_auxiliary_losses(every: int) -> None:
    model = make("softmax", "loss", 1)
    plain = learned(model, [rows_of(0)])
    model.zero_grad()
    model.checkpoint_every = every
    again = learned(model, [rows_of(0)])
    for name, x in plain.items():
        torch.testing.assert_close(again[name], x, rtol=1e-11, atol=1e-13)
    without = learned(make("softmax", "none", 1), [rows_of(0)])
    assert plain["loss"] > without["loss"] + 0.5
    for name in ("sublayers.1.router.weight", "sublayers.3.router.weight"):
        assert (plain[name] - without[name]).norm() > 0.05 * plain[name].norm(), name


@pytest.mark.parametrize("every", [None, 2])
def test_the_loss_of_a_decoder_is_one_graph_with_its_auxiliary_losses(every: int | None) -> None:
    torch._dynamo.reset()
    model = make("sigmoid", "loss", 1)
    plain = learned(model, [rows_of(0)])
    model.zero_grad()
    model.checkpoint_every = every
    torch.compile(model.loss, fullgraph=True, backend="aot_eager")(rows_of(0)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, plain[name], rtol=1e-11, atol=1e-13), name


def test_no_sublayer_leaves_anything_in_the_context() -> None:
    model = make("softmax", "loss", 1)
    seen: list[Any] = []
    for sublayer in model.sublayers:
        sublayer.register_forward_pre_hook(lambda module, given: seen.append(({**vars(given[2])}, given[2])))
        sublayer.register_forward_hook(lambda module, given, found: seen.append(found))
    model.loss(rows_of(0))
    contexts, outputs = seen[::2], seen[1::2]
    assert all({**vars(ctx)} == before == contexts[0][0] for before, ctx in contexts)
    assert [len(found) for found in outputs] == [3] * 4
    assert [found[2] is None for found in outputs] == [True, False] * 2
    assert all(found[2].shape == () for found in outputs[1::2])
