"""Which process does what: a configuration's numbers of ranks, made definite and checked before they communicate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from depthmix.models import DecoderConfig
from depthmix.parallel.config import ParallelConfig
from depthmix.parallel.decoder_plan import decoder_plan, meta_parts
from depthmix.parallel.plan import Plan
from depthmix.parallel.schedules import RULES, check_schedule

AXES = ("pp", "replicate", "fsdp", "tp")  # the last one changes fastest from rank to rank


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The size of each axis, and the plan of the pipeline."""

    pp: int = 1
    replicate: int = 1
    fsdp: int = 1
    tp: int = 1
    cache: bool = True
    schedule: str = ""
    microbatches: int = 1  # of a step of the pipeline
    plan: Plan | None = None  # None: no pipeline

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.pp * self.replicate * self.fsdp * self.tp

    @property
    def data(self) -> int:
        """The number of parts into which a batch is divided."""
        return self.replicate * self.fsdp

    @property
    def is_whole(self) -> bool:
        """Whether a process's module is the whole decoder, its parameters perhaps sharded by FSDP2."""
        return self.pp == self.tp == 1

    def describe(self) -> str:
        axes = [f"{name} {getattr(self, name)}" for name in AXES if getattr(self, name) > 1]
        words = ", ".join(axes) or "one process"
        if self.plan is None:
            return words
        return f"{words}; {self.plan.count} stages, {self.schedule}, {self.microbatches} micro-batches"


def make_layout(
    config: ParallelConfig,
    model: DecoderConfig,
    *,
    processes: int,
    rows: int,
    tokens: int,
    accumulate: int = 1,
    dtype: torch.dtype = torch.float32,
    compile: bool = False,
) -> Layout:
    """The layout of a training run, or an error that says what would work. No process group is needed.

    Args:
        config: the configuration's part [parallel].
        model: the decoder.
        processes: number of processes that torchrun started.
        rows: rows of a micro-batch over all ranks.
        tokens: tokens of a row, as the model sees them.
        accumulate: micro-batches of a step.
        dtype: dtype of the stream.
        compile: whether sublayers are compiled.
    """
    fsdp = count_fsdp(config, processes)
    check_tensor_parallel(model, config.tp, compile)
    check_rows(config, fsdp, rows)
    data = config.replicate * fsdp
    axes: dict[str, Any] = {"pp": config.pp, "replicate": config.replicate, "fsdp": fsdp, "tp": config.tp}
    if config.pp == 1:
        return Layout(**axes)
    schedule = config.schedule or ("1F1B" if config.virtual_stages == 1 else "Interleaved1F1B")
    sizes: dict[str, Any] = {
        "ranks": config.pp,
        "virtual": config.virtual_stages,
        "placement": RULES[schedule].placement,
        "divide": config.divide,
        "tokens": tokens,
        "dtype": dtype,
        "tp": config.tp,
    }
    check_rule(config, schedule, compile)
    check_stages(config, model)
    step_rows = accumulate * rows // data
    microbatches = config.microbatches or count_microbatches(schedule, config, step_rows, accumulate)
    if step_rows % microbatches:
        raise ValueError(
            f"parallel.microbatches={microbatches} for {step_rows} rows of a step on each data-parallel rank; expected "
            f"a divisor of {step_rows}"
        )
    plan = decoder_plan(model, rows=step_rows // microbatches, **sizes)
    check_schedule(schedule, plan, microbatches)
    if data > 1 or dtype == torch.bfloat16:
        check_not_tied(model, plan)
    return Layout(**axes, cache=config.pp_cache, schedule=schedule, microbatches=microbatches, plan=plan)


def whole_layout(config: ParallelConfig, *, processes: int, rows: int) -> Layout:
    """The layout of a model that keeps its own code: FSDP2 shards its layers, and nothing divides them."""
    for name, way in (("tp", "tensor parallelism"), ("pp", "pipelines")):
        if (number := getattr(config, name)) > 1:
            raise ValueError(
                f"parallel.{name}={number} with a model of transformers; expected 1: {way} divide a depthmix decoder "
                f"only, whose code they know. Shard it instead: --fsdp {processes if processes > 1 else number}"
            )
    fsdp = count_fsdp(config, processes)
    check_rows(config, fsdp, rows)
    return Layout(replicate=config.replicate, fsdp=fsdp)


def check_rows(config: ParallelConfig, fsdp: int, rows: int) -> None:
    data = config.replicate * fsdp
    if rows % data:
        raise ValueError(
            f"data.rows={rows} over {data} data-parallel ranks (parallel.replicate={config.replicate} · fsdp={fsdp}); "
            f"expected a multiple, such as {max(1, rows // data) * data}"
        )


def count_fsdp(config: ParallelConfig, processes: int) -> int:
    others = config.pp * config.replicate * config.tp
    given = f"parallel.pp={config.pp} · replicate={config.replicate} · tp={config.tp}"
    wanted = others * (config.fsdp or 1)
    if config.fsdp is not None:
        given += f" · fsdp={config.fsdp}"
    if processes % others == 0 and config.fsdp in (None, processes // others):
        return processes // others
    more = "" if config.fsdp is not None else " or a multiple"
    raise ValueError(
        f"{given} on {processes} process{'es' if processes > 1 else ''}; expected {wanted}{more}. Start that many, "
        f"torchrun --nproc-per-node {wanted} -m depthmix …, or change these numbers"
    )


def check_tensor_parallel(model: DecoderConfig, tp: int, compile: bool = False) -> None:
    if tp == 1:
        return
    if others := sorted({*model.attention_kinds} - {"gqa"}):
        raise ValueError(
            f"parallel.tp={tp} with model.attention {' and '.join(map(repr, others))}; expected tp=1: their heads are "
            "not divided among processes yet. FSDP2 (parallel.fsdp) and pipelines (parallel.pp) work"
        )
    divided = {"model.heads": model.heads, "model.kv_heads": model.num_kv_heads}
    if model.moe is None or model.moe.dense_layers:
        divided["model.hidden"] = model.hidden
    if model.moe is not None:
        divided["model.moe.hidden"] = model.moe.hidden
    for name, count in divided.items():
        if count % tp:
            fits = [n for n in range(2, count + 1) if all(c % n == 0 for c in divided.values())]
            raise ValueError(
                f"parallel.tp={tp} with {name}={count}; expected a number that divides it. For this model: "
                f"{', '.join(map(str, [1, *fits][:8]))}"
            )
    if compile:
        raise ValueError(
            f"run.compile=true with parallel.tp={tp}; expected tp=1: torch.compile works with FSDP2 and with pipelines"
        )


def check_stages(config: ParallelConfig, model: DecoderConfig) -> None:
    count = config.pp * config.virtual_stages
    if count > model.depth:
        raise ValueError(
            f"parallel.pp={config.pp} · virtual_stages={config.virtual_stages} = {count} stages for {model.depth} "
            f"sublayers; expected at most {model.depth} stages: each needs a sublayer"
        )


def check_rule(config: ParallelConfig, schedule: str, compile: bool) -> None:
    rule = RULES[schedule]
    if config.virtual_stages not in rule.virtual:
        least = rule.virtual[0]
        want = f"at least {least}" if len(rule.virtual) > 1 else least
        raise ValueError(
            f"parallel.virtual_stages={config.virtual_stages} with schedule {schedule}; expected {want}. Set "
            f"parallel.virtual_stages={least}, or parallel.schedule={rule.other}"
        )
    if compile and rule.splits_backward:
        fitting = [name for name, other in RULES.items() if not other.splits_backward]
        raise ValueError(
            f"run.compile=true with schedule {schedule}, which splits the backward pass; expected one of "
            f"{', '.join(fitting)}, or run.compile=false"
        )


def count_microbatches(schedule: str, config: ParallelConfig, rows: int, accumulate: int) -> int:
    """The least multiple of `accumulate` that divides the rows, suits the schedule and gives each rank two or more.

    If there are not enough rows for that, the largest that suits the schedule.
    """
    rule, stages = RULES[schedule], config.pp * config.virtual_stages
    least = stages if rule.as_many_as_stages else 1
    fitting = [
        count
        for count in range(accumulate, rows + 1, accumulate)
        if rows % count == 0 and count >= least and not (rule.in_rounds and count % config.pp)
    ]
    if not fitting:
        want = f"at least {stages}" if rule.as_many_as_stages else f"a multiple of {config.pp}"
        raise ValueError(
            f"{rows} rows of a step on each data-parallel rank cannot be divided into {want} equal micro-batches, "
            f"which schedule {schedule} needs. Set data.rows or run.accumulate to a multiple of {stages}, or choose "
            "another parallel.schedule"
        )
    return next((count for count in fitting if count >= 2 * config.pp), fitting[-1])


def check_not_tied(model: DecoderConfig, plan: Plan) -> None:
    """FSDP2 cannot shard a parameter twice, once for each of two stages of a process."""
    held: dict[tuple[int, str], int] = {}
    for s, (rank, part) in enumerate(meta_parts(model, plan)):
        for name, _ in part.named_parameters():
            if (other := held.setdefault((rank, name), s)) != s:
                raise ValueError(
                    f"{name} belongs to stages {other} and {s}, both of rank {rank} of the pipeline; with FSDP2 "
                    "(parallel.fsdp, parallel.replicate or bfloat16) expected each parameter in one stage of a rank. "
                    "Use parallel.virtual_stages=1, or a schedule that is not V-shaped"
                )
