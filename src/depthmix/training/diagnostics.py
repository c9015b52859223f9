"""Diagnostics on a fixed batch: norms over depth, what layers read, the layer with the largest output.

Axes: B batch, T token, D channel, L executions of sublayers, N attention layers, C source that a mechanism names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.analysis import Magnitudes, Trace, effective_rank, measuring, tracing
from depthmix.analysis.passes import without_recomputation
from depthmix.analysis.recording import find_stack
from depthmix.models import Decoder
from depthmix.parallel import ranks
from depthmix.support.files import replacing
from depthmix.training.build import disk_errors
from depthmix.training.retrofit import ModelConfig

PROBE = (2, 64)  # rows and tokens of the fixed batch
SPACING = 400  # training tokens per token of the fixed batch: recording then takes less than 1 % of the work
CHANNELS = 8  # number of channels traced if a mechanism's weights differ by channel
RANKED = 8  # number of matrices whose effective rank is measured


def least_interval(tokens_per_step: int) -> int:
    """The smallest number of steps between recordings that keeps them below 1 % of the work.

    It depends on counts, not on measured time: a run that is resumed, or repeated on another machine, records at the
    same steps.
    """
    return max(1, math.ceil(SPACING * math.prod(PROBE) / tokens_per_step))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """While open, experts do not count tokens, and the backward pass recomputes no sublayer."""
    training = model.training
    model.eval()
    try:
        with without_recomputation(model):
            yield
    finally:
        model.train(training)


def measure(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Magnitudes, Trace]:
    """One forward and backward pass, without an optimiser step: all that the diagnostics need."""
    stack = find_stack(model)
    try:
        with evaluation_mode(model), tracing(model) as make_trace, measuring(stack) as magnitudes:
            loss().backward()
    finally:
        model.zero_grad(set_to_none=True)
    return magnitudes, make_trace(range(0, stack.dim, max(1, stack.dim // CHANNELS)))


@torch.no_grad()
def query_norms(model: nn.Module) -> list[float] | None:
    queries = [getattr(mixer, "query", None) for mixer in find_stack(model).all_mixers()]
    return [float(ranks.full_tensor(q).float().norm()) for q in queries if isinstance(q, Tensor)] or None


def read_statistics(trace: Trace) -> dict[str, Any]:
    """What rows read, averaged over tokens, heads and channels; None for a row that weights no sources."""
    rows = {
        "weight_entropy": trace.entropy(),
        "locality": trace.locality(),
        "embedding_share": trace.embedding_share(),
        "weight_spread": trace.spread(),
    }
    empty = [not row for row in trace.reads] or [False] * trace.M.shape[-1]
    averages = {name: mean_over_tokens(values, 1).tolist() for name, values in rows.items()}
    return {
        "shares_of": trace.shares_of,
        **{name: [None if e else x for e, x in zip(empty, xs, strict=True)] for name, xs in averages.items()},
        "sinks": mean_over_tokens(trace.sinks(), 1).tolist(),
        "effective_rank": None if trace.kind == "operator" else float(effective_rank(sample(trace.M)).mean()),
    }


def sample(M: Tensor) -> Tensor:
    """A few of the matrices, evenly spaced over tokens, heads and channels: singular values are slow to compute."""
    every = M.flatten(0, -3)
    return every[[(k + 1) * len(every) // (RANKED + 1) for k in range(RANKED)]]


def mean_over_tokens(values: Tensor, kept: int) -> Tensor:
    """The mean over all but the last `kept` axes."""
    return values.double().reshape(-1, *values.shape[values.dim() - kept :]).mean(0)


def save_snapshot(path: Path, step: int, config: ModelConfig, trace: Trace) -> None:
    """Save M and the weights over sources, averaged over tokens, heads and channels."""
    from safetensors.torch import save_file

    tensors = {"M": trace.M, "weights": trace.weights, "deviation": trace.deviation(), "values": trace.values}
    averages = {name: mean_over_tokens(t, 2) for name, t in tensors.items() if t is not None}
    averages["entropy"] = mean_over_tokens(trace.entropy(), 1)
    metadata = {"step": str(step), "mixer": json.dumps(config.saved()["mixer"]), "shares_of": trace.shares_of}
    if trace.weights is not None:
        metadata["sources"] = json.dumps({n: getattr(trace, n) for n in ("source_names", "reads", "partial")})
    with replacing(path) as part, disk_errors():
        save_file({name: tensor.float().contiguous() for name, tensor in averages.items()}, part, metadata)


def largest_layer(model: nn.Module, loss: Callable[[], Tensor]) -> str:
    """The likely source of a bad loss: the first sublayer with a non-finite output, else the one with the largest."""
    stack = find_stack(model)
    with torch.no_grad(), measuring(stack) as magnitudes:
        loss()
    norms = torch.stack(magnitudes.outputs).double()
    broken = (~norms.isfinite()).nonzero()
    index = int(broken[0]) if len(broken) else int(norms.argmax())
    kind = {"attn": "attention", "mlp": "MLP"}[stack[index].site.kind]
    name = f"sublayer {index + 1}"
    if isinstance(model, Decoder):
        name = f"sublayers.{2 * model.config.layer_order[index // 2] + index % 2}"
    return f"{name} ({kind}), output norm {float(norms[index]):.4g}"
