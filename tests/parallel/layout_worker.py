"""One rank of the processes that tests/parallel/test_layouts.py starts.

python -m tests.parallel.layout_worker FOLDER, in an environment as torchrun sets it; cases in FOLDER/cases.json, what
was measured in FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from depthmix.mechanisms.record import is_record
from depthmix.models import Decoder, DecoderConfig
from depthmix.models.attention import Attention
from depthmix.models.decoder import SublayerLoop
from depthmix.models.mlp import MLP
from depthmix.models.moe import MixtureOfExperts
from depthmix.parallel import model as parallel_model
from depthmix.parallel import ranks, tensor
from depthmix.parallel.config import ParallelConfig
from depthmix.parallel.distributed import DistributedDecoder
from depthmix.parallel.layout import AXES, Layout, make_layout
from depthmix.support.files import seed_of
from depthmix.training.config import OptimizerConfig
from depthmix.training.optim import Optimizers
from tests.decoders import some_tokens, tiny_config

# One to four numbers, each a sum over tokens that cancels: in single precision one process itself is up to 3e-5, 6e-5
# and 5e-6 from the exact gradient.
CANCELLING = ("beta_bias", "s_a", "beta")
CALLS: Counter[str] = Counter()  # of the two functions by which tensor parallelism communicates
LOADS: dict[MixtureOfExperts, list[int]] = {}  # the load from which each module's bias was updated last


class Reference(NamedTuple):
    """What one process computes."""

    start: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step
    state: dict[str, Tensor]  # after the last step
    loads: dict[str, list[int]]
    evaluated: list[float]


@torch.no_grad()
def move(part: SublayerLoop) -> None:
    """Start every parameter by its name, and away from where it begins."""
    part.double()
    part.reset_parameters(3)
    for name, parameter in part.named_parameters():
        generator = torch.Generator().manual_seed(seed_of(1, name))
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)


def config_of(case: Mapping[str, Any]) -> DecoderConfig:
    return tiny_config(case["form"], **case["config"])


def tokens_of(case: Mapping[str, Any]) -> Tensor:
    """Rows of every step: [step, micro-batch, row, token]."""
    return some_tokens(case["steps"], case["accumulate"], case["rows"], case["tokens"])


def probes(case: Mapping[str, Any]) -> list[Tensor]:
    return [some_tokens(rows, case["tokens"] + rows % 2) for rows in case["evaluate"]]


def shares(case: Mapping[str, Any], layout: Layout) -> Tensor:
    """The rows of every step by data-parallel rank: [step, micro-batch, rank, row, token]."""
    return tokens_of(case).unflatten(2, (layout.data, -1))


def microbatches(case: Mapping[str, Any], layout: Layout) -> Tensor:
    """All micro-batches of each step as the layout runs them: [step, micro-batch, row, token]."""
    own = shares(case, layout).movedim(2, 1).flatten(2, 3)  # [step, rank, row, token]
    return own.unflatten(2, (layout.microbatches if layout.plan else case["accumulate"], -1)).flatten(1, 2)


def optimizers(parts: list[SublayerLoop], case: Mapping[str, Any]) -> Optimizers:
    return Optimizers(parts, OptimizerConfig(name=case["optimizer"], lr=1e-2))


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if not is_record(name)}


def reference_of(case: Mapping[str, Any], layout: Layout) -> Reference:
    """An auxiliary loss depends on which rows are one micro-batch; all else does not."""
    names = ("form", "config", "dtype", "steps", "accumulate", "rows", "tokens", "optimizer", "clip", "evaluate")
    config = config_of(case)
    balanced = config.moe is not None and config.moe.balance == "loss"
    batches = microbatches(case, layout) if balanced else tokens_of(case)
    return run_alone(json.dumps({name: case[name] for name in names}), json.dumps(batches.tolist()))


@cache
def run_alone(settings: str, rows: str) -> Reference:
    case, batches = json.loads(settings), torch.tensor(json.loads(rows))
    model = Decoder(config_of(case))
    move(model)
    model.to(getattr(torch, case["dtype"])).train()
    start, gradients, losses, norms = plain_state(model), {}, [], []
    with torch.no_grad():
        evaluated = [model.loss(tokens).item() for tokens in probes(case)]
    optimizer = optimizers([model], case)
    for step in batches:
        parts = [model.loss(tokens) / len(step) for tokens in step]
        torch.stack(parts).sum().backward()
        losses.append(sum(part.item() for part in parts))
        gradients = gradients or {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        }
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), case["clip"]).item())
        optimizer.step(1.0)
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                module.update_balance()
        model.zero_grad()
    return Reference(start, losses, norms, gradients, plain_state(model), loads_of({0: model}), evaluated)


def loads_of(parts: Mapping[int, nn.Module]) -> dict[str, list[int]]:
    found = ((name, LOADS.get(m)) for part in parts.values() for name, m in part.named_modules() if is_mixture(m))
    return {name: load for name, load in found if load is not None}


def is_mixture(module: nn.Module) -> bool:
    return isinstance(module, MixtureOfExperts)


def worst(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor], cancelling: tuple[str, ...] = ()
) -> tuple[float, str]:
    """The largest distance, and whose: relative, absolute where zero is expected; NaN counts as infinitely far.

    Distances of parameters with a `cancelling` last name are relative to all parameters of their module together.
    """
    found = []
    for name, gradient in got.items():
        module, _, leaf = name.rpartition(".")
        compared = [n for n in want if n.rpartition(".")[0] == module] if leaf in cancelling else [name]
        size = math.hypot(*(want[n].double().norm().item() for n in compared))
        difference = want[name].double() - (0.0 if gradient is None else gradient.double())
        off = difference.norm().item() / (size or 1.0)
        found.append((math.inf if math.isnan(off) else off, name))
    return max(found)


def relative(got: list[float], want: list[float]) -> list[float]:
    return [abs(g - w) / abs(w) for g, w in zip(got, want, strict=True)]


def run(case: dict[str, Any]) -> dict[str, Any]:
    config, half = config_of(case), case["bfloat16"]
    layout = make_layout(
        ParallelConfig(**case["parallel"]),
        config,
        processes=dist.get_world_size(),
        rows=case["rows"],
        tokens=case["tokens"],
        accumulate=case["accumulate"],
        dtype=torch.bfloat16 if half else getattr(torch, case["dtype"]),
        compile=case["compile"],
    )
    model = DistributedDecoder(
        config,
        layout,
        torch.device("cpu"),
        prepare=move,
        dtype=getattr(torch, case["dtype"]),
        recompute=case["recompute"],
        compile=case["compile"],
        bfloat16=half,
    )
    want = reference_of(case, layout)
    state = model.whole_state()
    result: dict[str, Any] = {
        "layout": layout.describe(),
        "cuts": [] if layout.plan is None else layout.plan.bounds,
        "start": same(state, want.start),
    }
    CALLS.clear()
    evaluated = [model.evaluate(tokens) for tokens in probes(case)]
    result["calls"] = {"evaluated": dict(CALLS)}
    result["evaluated"] = relative(evaluated, want.evaluated)
    losses, norms = [], []
    optimizer = optimizers([*model.parts.values()], case)
    for number, own in enumerate(shares(case, layout)):
        CALLS.clear()
        with watched(case, number, result):
            losses.append(model.backward([*own[:, model.data_rank]]))
            for name, parameter in model.named_parameters():  # partial sums would be completed again by each operation
                if hasattr(parameter, "placements"):
                    assert parameter.grad.placements == parameter.placements, name
        result["calls"]["step"] = dict(CALLS)
        if number == 0:
            gradients = {name: full(p.grad) for name, p in model.named_parameters()}
            result["gradient"] = worst(gradients, want.gradients, CANCELLING if case["dtype"] == "float32" else ())
            result["cosine"] = cosine(gradients, want.gradients)
        norms.append(model.clip(case["clip"]))
        optimizer.step(1.0)
        model.update_balance()
        model.zero_grad()
    state = model.whole_state()
    result["losses"], result["norms"] = relative(losses, want.losses), relative(norms, want.norms)
    result["clipped"] = all(norm > case["clip"] for norm in norms)
    result["weights"] = None if state is None else worst(state, want.state)
    result["names"] = state is None or state.keys() == want.state.keys()
    result["held"] = sorted(gradients)
    result["all"] = sorted(want.gradients)
    loads = loads_of(model.parts)
    result["loads"] = sorted(name for name, load in loads.items() if load != want.loads[name])
    result["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    result["mixtures"] = [len(loads), sum(map(is_mixture, model.modules()))]
    return result


@contextmanager
def watched(case: Mapping[str, Any], step: int, result: dict[str, Any]) -> Iterator[None]:
    """Later steps of compiled sublayers must find all of them compiled: count those that Python runs itself."""
    if not case["compile"] or step == 0:
        yield
        return
    result["uncompiled"] = 0
    bodies = {layer.forward.__code__ for layer in (Attention, MLP, MixtureOfExperts)}

    def profile(frame: Any, event: str, argument: object) -> None:
        result["uncompiled"] += event == "call" and frame.f_code in bodies

    with torch.compiler.set_stance(case["stance"]):
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)


def same(state: Mapping[str, Tensor] | None, want: Mapping[str, Tensor]) -> bool:
    """Bit for bit, on rank 0, which alone has the state."""
    if dist.get_rank():
        return state is None
    return state is not None and state.keys() == want.keys() and all(torch.equal(state[n], want[n]) for n in want)


def full(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else ranks.full_tensor(gradient)


def cosine(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor]) -> float:
    """Between the gradients of all parameters of this rank."""
    pairs = [(g.flatten(), want[name].flatten()) for name, g in got.items() if g is not None]
    ours, others = (torch.cat(side) for side in zip(*pairs, strict=True))
    return nn.functional.cosine_similarity(ours, others, dim=0).item()


def count_calls() -> None:
    def counted(name: str, call: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            CALLS[name] += 1
            return call(*args, **kwargs)

        return function

    for name in ("all_gather", "reduce_scatter"):
        setattr(tensor, name, counted(name, getattr(tensor, name)))


def keep_loads() -> None:
    update = MixtureOfExperts.update_balance

    def kept(self: MixtureOfExperts) -> None:
        if self.load is not None:
            LOADS[self] = self.load.tolist()
        update(self)

    MixtureOfExperts.update_balance = kept  # type: ignore[method-assign]


def keep_meshes() -> None:
    """Process groups are made once for each shape of the ranks."""
    made, make = {}, parallel_model.make_mesh

    def kept(layout: Layout, device: str) -> Any:
        shape = tuple(getattr(layout, name) for name in AXES)
        if shape not in made:
            made[shape] = make(layout, device)
        return made[shape]

    parallel_model.make_mesh = kept


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    count_calls()
    keep_loads()
    keep_meshes()
    results = []
    for case in json.loads((folder / "cases.json").read_text()):
        LOADS.clear()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        try:
            results.append(run(case))
        except Exception:
            results.append({"error": traceback.format_exc()[-1500:]})
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # without waiting for threads that gloo may still have


if __name__ == "__main__":
    main(Path(sys.argv[1]))
