"""The training loop. Whatever stops it, a second start in the same folder ends with the same weights, bit for bit.

A step depends on the weights, the optimiser's state and the place in the data: all three are in a checkpoint. What is
random in a step comes from (seed, step, rank).

Axes: B batch, T token.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from depthmix.data import Batches, Corpus, validation_batches
from depthmix.models import Decoder, count_parameters, update_balance
from depthmix.models.init import seed_of
from depthmix.models.moe import MixtureOfExperts
from depthmix.support.checks import check_device
from depthmix.support.files import FORMAT
from depthmix.training import checkpoint, metrics, ranks
from depthmix.training.build import check_apart, check_tokens, export, initial_model, open_corpus
from depthmix.training.config import TrainConfig
from depthmix.training.flops import flops_per_token
from depthmix.training.folder import CONFIG, Result, check_same, claimed, finished, stopping, write_result
from depthmix.training.optim import Optimizers
from depthmix.training.precision import check_precision, computing
from depthmix.training.schedule import rate

Report = Callable[[Mapping[str, Any]], None]
WINDOW, ENOUGH = 64, 16  # losses of the running median, and how many it needs
SKIPS = 16  # bad losses in a row that end a run which skips them
PROBE = (2, 128)  # rows and tokens of the fixed batch


class BadLoss(RuntimeError):
    """The loss is not finite, or far above what it was."""


class Interrupted(RuntimeError):
    """Somebody asked the run to stop; it can go on."""


@dataclass
class Progress:
    """What a checkpoint holds beside weights, optimiser and the place in the data."""

    step: int = 0  # steps that are done
    seconds: float = 0.0  # of training work, over all starts
    losses: list[float] = field(default_factory=list)  # the last ones, for the running median
    bad: int = 0  # bad ones in a row
    validation: dict[str, float] = field(default_factory=dict)
    memory: int = 0  # the most that any start has held


@dataclass
class Run:
    config: TrainConfig
    corpus: Corpus
    device: torch.device
    model: Decoder
    optimizers: Optimizers
    batches: Batches
    probe: Tensor
    report: Report
    progress: Progress = field(default_factory=Progress)
    pending: Future[None] | None = None
    log: metrics.Metrics | None = None  # on rank 0

    def __post_init__(self) -> None:
        self.folder = Path(self.config.run.folder)
        self.flops = flops_per_token(self.config.model, self.config.data.tokens_per_row)
        self.loss: Callable[[Tensor], Tensor] = self.model.loss
        if self.config.run.compile:
            self.loss = torch.compile(self.model.loss, dynamic=False)


def train(
    config: TrainConfig,
    *,
    resume: bool = True,
    report: Report = lambda event: None,
) -> Result:
    """Train, or go on with what is in the run's folder; a complete run is only read.

    Args:
        config: all that decides the result.
        resume: False begins anew and removes what the folder holds of an earlier run.
        report: is called on rank 0 with each line of metrics.jsonl, and with kinds "begin" and "checkpoint".
    """
    device = check_device(config.run.device)
    check_precision(config.run.precision, device)
    check_apart(config.data, Path(config.run.folder))
    if ranks.expected() > 1:
        open_corpus(config.data)  # one rank at a time, for as long as it takes: a process group would not wait
    with ranks.companions(device), claimed(config, resume):
        if (done := finished(config)) is not None:
            return done
        run = begin(config, device, report)
        try:
            with stopping() as asked:
                while run.progress.step < config.run.steps:
                    step(run)
                    look(run)
                    end = bool(ranks.total(asked()))
                    if end or due(run, config.run.checkpoint_every):
                        save(run)
                    if end and run.progress.step < config.run.steps:
                        wait(run)
                        raise Interrupted(
                            f"stopped after step {run.progress.step} of {config.run.steps}, with a checkpoint"
                        )
            wait(run)
            export(run.model, run.folder / "final", run.corpus.folder / "tokenizer.json")
            return write_result(run.folder, result(run))
        finally:
            close(run)


def begin(config: TrainConfig, device: torch.device, report: Report) -> Run:
    """From the newest whole checkpoint, else from the initial weights."""
    data = config.data
    corpus = ranks.first_then_others(lambda: open_corpus(data))
    if corpus.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size}; expected at least {corpus.vocab_size}, the ids of {data.path}"
        )
    model = ranks.shard(initial_model(config).to(device))
    batches = Batches(
        corpus.train,
        tokens_per_row=data.tokens_per_row,
        rows=data.rows,
        seed=config.run.seed,
        rank=ranks.rank(),
        ranks=ranks.count(),
    )
    rows = next(validation(corpus, config))[: PROBE[0], : PROBE[1]]
    run = Run(config, corpus, device, model, Optimizers(model, config.optimizer), batches, rows.to(device), report)
    found = checkpoint.latest(run.folder / "checkpoints", tensors(run))
    if found is not None:
        restore(run, found[1])
    if ranks.rank() == 0:
        run.log = metrics.Metrics(run.folder / "metrics.jsonl", run.progress.step, config.run.tracker)
        size = {"parameters": count_parameters(config.model).total, "layout": run.model.depth.facts.note}
        report({"kind": "begin", "step": run.progress.step, "steps": config.run.steps, **size})
    return run


def step(run: Run) -> None:
    """One step of the optimiser, or none where the loss is bad and may be skipped."""
    config, progress, begun = run.config, run.progress, time.perf_counter()
    torch.manual_seed(seed_of(config.run.seed, progress.step, ranks.rank()))
    factor = rate(progress.step, config.run.steps, config.schedule)
    loss = gradients(run)
    norm = clip(run.model, config.optimizer.clip)
    problem = judge(loss, norm, progress.losses, config.run.bad_loss_factor)
    if problem is None:
        run.optimizers.step(factor)
        ranks.share_load(run.model)
        update_balance(run.model)
        progress.losses = [*progress.losses, loss][-WINDOW:]
    progress.step += 1
    progress.bad = 0 if problem is None else progress.bad + 1
    if problem is not None:
        forgive(run, problem)
    run.model.zero_grad(set_to_none=True)
    took = time.perf_counter() - begun
    progress.seconds += took
    progress.memory = max(progress.memory, metrics.memory_bytes(run.device))
    about = {
        "loss": loss,
        "lr": factor * config.optimizer.lr,
        "grad_norm": norm,
        "seconds": progress.seconds,
        "tokens_per_second": config.tokens_per_step / took,
        "flops": run.flops * progress.step * config.tokens_per_step,
        "memory_bytes": progress.memory,
    }
    if problem is None:
        tell(run, "train", about)
    else:
        tell(run, "skipped", {**about, "problem": problem})


def gradients(run: Run) -> float:
    """Of the mean loss over the micro-batches of a step and all ranks, which is returned."""
    parts, total = run.config.run.accumulate, torch.zeros((), device=run.device)
    for _ in range(parts):
        tokens = next(run.batches).to(run.device)
        with computing(run.config.run.precision, run.device):
            loss = run.loss(tokens) / parts
        loss.backward()
        total += loss.detach()
    return float(ranks.mean(total))


def clip(model: Decoder, limit: float) -> float:
    """The norm of the whole gradient; where it is above `limit`, the gradient is scaled down to that."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    norm = ranks.whole(torch.nn.utils.get_total_norm(found))
    value = float(norm)
    if limit and value > limit:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return value


def judge(loss: float, norm: float, before: list[float], factor: float) -> str | None:
    """What is wrong with a loss, if anything."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the gradient's norm is {norm}, at a loss of {loss:.4g}"
    if len(before) >= ENOUGH and loss > factor * (usual := statistics.median(before)):
        return f"the loss is {loss:.4g}, {loss / usual:.1f} times the running median of {usual:.4g}"
    return None


def forgive(run: Run, problem: str) -> None:
    """Go on without this step's gradient, or stop and say all that is known."""
    if run.config.run.on_bad_loss == "skip" and run.progress.bad <= SKIPS:
        for module in run.model.modules():
            if isinstance(module, MixtureOfExperts) and module.load is not None:
                module.load.zero_()
        return
    stop(run, problem + (f" ({run.progress.bad} bad steps in a row)" if run.progress.bad > 1 else ""))


def stop(run: Run, problem: str) -> NoReturn:
    wait(run)
    where = metrics.largest_layer(run.model, lambda: loss_on_probe(run))
    found = checkpoint.checkpoints(run.folder / "checkpoints")
    raise BadLoss(
        f"step {run.progress.step}: {problem}. Largest layer: {where}. Last good checkpoint: "
        f"{found[-1] if found else 'none'}. Lower optimizer.lr (now {run.config.optimizer.lr:g}) in another folder, or "
        "go on in this one with run.on_bad_loss=skip or another run.bad_loss_factor"
    )


def loss_on_probe(run: Run) -> Tensor:
    with computing(run.config.run.precision, run.device):
        return run.model.loss(run.probe)


def look(run: Run) -> None:
    """Validation, norms over depth and M, each at its own interval; none of it touches the training."""
    config = run.config.run
    if due(run, config.validate_every):
        run.progress.validation = evaluate(run)
        if not math.isfinite(loss := run.progress.validation["loss"]):  # before a checkpoint could hold such weights
            stop(run, f"the validation loss is {loss}")
        tell(run, "validation", {"seconds": run.progress.seconds, **run.progress.validation})
    depth, snapshot = due(run, config.depth_every), due(run, config.snapshot_every)
    if not depth and not snapshot:
        return
    found = metrics.mixing(run.model, run.probe)
    if depth:
        outputs, grads = metrics.depth_norms(run.model, lambda: loss_on_probe(run))
        about = {"output_norm": outputs, "gradient_norm": grads, "query_norm": metrics.query_norms(run.model)}
        tell(run, "depth", {**about, "weight_entropy": found["entropy"].tolist()})
    if snapshot and ranks.rank() == 0:
        path = run.folder / "snapshots" / f"step-{run.progress.step:08d}.safetensors"
        metrics.save_snapshot(path, run.progress.step, run.config.model, found)


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Loss and bits per byte of the first validation batches; ranks share the rows where these can be shared."""
    run.model.eval()
    total, rows = torch.zeros((), dtype=torch.float64), 0
    for tokens in validation(run.corpus, run.config):
        mine = tokens if len(tokens) % ranks.count() else tokens[ranks.rank() :: ranks.count()]
        with computing(run.config.run.precision, run.device):
            total += len(tokens) * run.model.loss(mine.to(run.device)).double().cpu()
        rows += len(tokens)
    run.model.train()
    loss = float(ranks.mean(total)) / rows
    return {"loss": loss, "bits_per_byte": loss / math.log(2) / run.corpus.bytes_per_token}


def validation(corpus: Corpus, config: TrainConfig) -> Iterator[Tensor]:
    data = config.data
    return validation_batches(corpus.validation, data.tokens_per_row, data.rows, config.run.validate_batches)


def due(run: Run, every: int) -> bool:
    done = run.progress.step
    return done == run.config.run.steps or (every > 0 and done % every == 0)


def tell(run: Run, kind: str, about: Mapping[str, Any]) -> None:
    if run.log is not None:
        done = run.progress.step
        line = {"kind": kind, "step": done, "tokens": done * run.config.tokens_per_step, **about}
        run.log.write(line)
        run.report(line)


def tensors(run: Run) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "optimizer": run.optimizers.state()}


def save(run: Run) -> None:
    wait(run)
    config, progress = run.config.run, run.progress
    if run.log is not None:
        run.log.sync()
    random = {"seed": config.seed, "step": progress.step}  # all that the next step's random numbers come from
    place = {"data": run.batches.state(), "corpus": run.corpus.digest, "random": random, "config": run.config.saved()}
    rest = {"progress": dataclasses.asdict(progress), **place}
    folder = run.folder / "checkpoints"
    run.pending = checkpoint.save(
        folder, progress.step, {**tensors(run), **rest}, keep=config.keep, asynchronous=config.asynchronous
    )
    if run.log is not None:
        run.report({"kind": "checkpoint", "step": progress.step, "path": str(checkpoint.place(folder, progress.step))})


def wait(run: Run) -> None:
    """For a checkpoint that is still being written; what went wrong with it is raised here."""
    pending, run.pending = run.pending, None
    if pending is not None:
        pending.result()


def close(run: Run) -> None:
    """Nothing of a run outlives its claim of the folder, whatever ended it."""
    if run.pending is not None:
        run.pending.exception()
    if run.log is not None:
        run.log.close()


def restore(run: Run, state: Mapping[str, Any]) -> None:
    """The tensors are in place already."""
    altered = f"{run.folder / CONFIG} is not the configuration of the checkpoints beside it"
    check_same(TrainConfig.from_saved(state["config"], run.folder / "checkpoints"), run.config, altered)
    check_tokens(run.corpus, state["corpus"], run.folder)
    run.progress = Progress(**state["progress"])
    run.batches.restore(state["data"])


def result(run: Run) -> Result:
    config, progress = run.config, run.progress
    tokens = config.run.steps * config.tokens_per_step
    return Result(
        steps=config.run.steps,
        tokens=tokens,
        seconds=progress.seconds,
        tokens_per_second=tokens / progress.seconds,
        validation_loss=progress.validation["loss"],
        bits_per_byte=progress.validation["bits_per_byte"],
        peak_memory_bytes=progress.memory,
        flops=run.flops * tokens,
        parameters=count_parameters(config.model).total,
        config_digest=config.digest,
        data_digest=run.corpus.digest,
        mixer=config.model.saved()["mixer"],
        kv_mixer=config.model.saved()["kv_mixer"],
        format=FORMAT,
    )
