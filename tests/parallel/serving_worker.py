"""One process of tests/parallel/test_serving.py: generation and evaluation on several processes, against one."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import depthmix as dm
from depthmix.inference.prefill import prefill
from depthmix.ops.memory import LiveBytes
from depthmix.parallel.distributed import DistributedDecoder
from depthmix.parallel.serving import served, serving_layout

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [4, 3, 2], [9]]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"chunk": 3},
    {"cache": "preallocated", "temperature": 0.7, "top_k": 9, "seed": 3},
    {"prefill_memory": "24KB"},
]


def away_from_start(part: Any) -> None:
    """Every parameter drawn by its name: alike on all processes."""
    part.reset_parameters(seed=0)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.add_(0.3 * noise)


def config_of(case: dict[str, Any]) -> dm.DecoderConfig:
    sizes = {"vocab_size": 29, "dim": 16, "layers": 4, "heads": 4, "hidden": 24}
    return dm.DecoderConfig(**{**sizes, **case["model"]})


def make(case: dict[str, Any], dtype: torch.dtype) -> tuple[dm.Decoder, DistributedDecoder]:
    config = config_of(case)
    alone = dm.Decoder(config)
    away_from_start(alone)
    layout = serving_layout(config, processes=dist.get_world_size(), **case["layout"])
    shared = DistributedDecoder(config, layout, torch.device("cpu"), prepare=away_from_start, dtype=dtype)
    shared.train(False)
    return alone.to(dtype).eval(), shared


@torch.no_grad()
def compare(case: dict[str, Any]) -> dict[str, Any]:
    alone, shared = make(case, torch.float64)
    together = served(shared)
    tokens = torch.arange(1, 15).view(2, 7)
    rows = torch.arange(21).view(3, 7)
    logits = [float((together(tokens, last_only=last) - alone(tokens, last_only=last)).abs().max()) for last in (0, 1)]
    answers = []
    for options in OPTIONS:
        plain = {key: value for key, value in options.items() if key != "prefill_memory"}
        options = {**options, "prefill_memory": case["memory"]} if "memory" in case and plain != options else options
        one, many = (
            dm.generate(model, PROMPTS, max_new_tokens=9, **given)
            for model, given in ((alone, plain), (together, options))
        )
        answers.append(one == many)
    return {"logits": max(logits), "loss": abs(shared.evaluate(rows) - float(alone.loss(rows))), "answers": answers}


class StateBytes:
    """The largest state that a read has seen: its essential tensors (blocks), and what phase 1 has made of them."""

    def __init__(self, stack: dm.DepthStack) -> None:
        self.blocks = self.derived = 0
        for index in range(stack.depth + 1):
            mixer = stack.out if index == stack.depth else stack[index]
            assert mixer is not None
            mixer.read = self.watched(mixer.read, stack.spec(index).essential)  # type: ignore[method-assign]

    def watched(self, read: Any, essential: int) -> Any:
        def reading(state: dm.State) -> Any:
            sizes = [tensor.numel() * tensor.element_size() for tensor in state]
            self.blocks = max(self.blocks, sum(sizes[:essential]))
            self.derived = max(self.derived, sum(sizes[essential:]))
            return read(state)

        return reading


@torch.no_grad()
def measure(case: dict[str, Any]) -> dict[str, Any]:
    """What the prefill of a prompt holds on this process and on one process alone, with and without chunks."""
    alone, shared = make(case, torch.float32)
    together = served(shared)
    prompt = torch.randint(0, 29, (1, case["tokens"]), generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {}
    for name, model in (("alone", alone), ("together", together)):
        seen = StateBytes(model.depth)
        for chunk in (case["tokens"], case["chunk"]):
            seen.blocks = seen.derived = 0
            cache = dm.DynamicCache()
            with LiveBytes() as live:
                logits = prefill(model, prompt, None, cache, chunk)
            found[f"{name} {chunk}"] = {
                "blocks": seen.blocks,
                "derived": seen.derived,
                "peak": live.peak - cache.nbytes,
                "cache": cache.nbytes,
                "logits": logits[0, 0, :5].tolist(),
            }
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = [
        (measure if "tokens" in case else compare)(case) for case in json.loads((folder / "cases.json").read_text())
    ]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # torch sometimes aborts in a thread of gloo when the interpreter ends


if __name__ == "__main__":
    main(Path(sys.argv[1]))
