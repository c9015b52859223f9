"""What a model does on a fixed batch: norms over depth, the mixing matrix, the layer with the largest output.

Axes: B batch, T token, D channel, L executions of sublayers, N attention layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.analysis import trace
from depthmix.models import Decoder, DecoderConfig
from depthmix.support.files import replacing
from depthmix.training import ranks
from depthmix.training.build import disk_errors

CHANNELS = 8  # how many are traced of a mechanism whose weights differ by channel


@contextmanager
def evaluation_mode(model: Decoder) -> Iterator[None]:
    """While open, experts do not count tokens."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def recorded_norms(model: Decoder) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """While open, the norms of the sublayers' outputs as they run, and those of their gradients."""
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []

    def record(module: nn.Module, inputs: Any, returned: tuple[Tensor, Any]) -> None:
        y = returned[0]
        outputs.append(rms_over_tokens(y))
        if y.requires_grad:
            y.register_hook(lambda g: gradients.append(rms_over_tokens(g)))

    handles = [sublayer.register_forward_hook(record) for sublayer in model.sublayers]
    try:
        yield outputs, gradients
    finally:
        for handle in handles:
            handle.remove()


def rms_over_tokens(x: Tensor) -> Tensor:
    """The root of the mean over tokens of the squared norm."""
    return x.detach().float().norm() / x[..., 0].numel() ** 0.5


def depth_norms(model: Decoder, loss: Callable[[], Tensor]) -> tuple[list[float], list[float]]:
    """Norms of every execution's output and of its gradient, on a batch that trains nothing."""
    try:
        with evaluation_mode(model), recorded_norms(model) as (outputs, gradients):
            loss().backward()
    finally:
        model.zero_grad(set_to_none=True)
    return torch.stack(outputs).double().tolist(), torch.stack(gradients[::-1]).double().tolist()


@torch.no_grad()
def query_norms(model: Decoder) -> list[float] | None:
    queries = [getattr(mixer, "query", None) for mixer in model.depth.all_mixers()]
    return [float(ranks.full_tensor(q).float().norm()) for q in queries if isinstance(q, Tensor)] or None


def measure_mixing(model: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    """M [L+1, L+1] averaged over tokens, heads and channels; the entropy of each row of it, token by token and then
    averaged; and the value matrix [N, N] where attention mixes values."""
    stride = max(1, model.config.dim // CHANNELS)
    with evaluation_mode(model):
        traced = trace(model, tokens, channels=range(0, model.config.dim, stride))
    M = traced.M.double()
    share = M.abs() / M.abs().sum(-1, keepdim=True).clamp(min=1e-300)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    mixing = {"M": M.flatten(0, -3).mean(0), "entropy": entropy.flatten(0, -2).mean(0)}
    if traced.values is not None:
        mixing["values"] = traced.values.double().flatten(0, -3).mean(0)
    return mixing


def save_snapshot(path: Path, step: int, config: DecoderConfig, mixing: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    metadata = {"step": str(step), "mixer": json.dumps(config.saved()["mixer"])}
    with replacing(path) as part, disk_errors():
        save_file({name: tensor.float().contiguous() for name, tensor in mixing.items()}, part, metadata)


def largest_layer(model: Decoder, loss: Callable[[], Tensor]) -> str:
    """Where a bad loss comes from: the first sublayer whose output is not finite, else the one with the largest."""
    with torch.no_grad(), recorded_norms(model) as (outputs, _):
        loss()
    norms = torch.stack(outputs).double()
    broken = (~norms.isfinite()).nonzero()
    index = int(broken[0]) if len(broken) else int(norms.argmax())
    layer, kind = model.config.layer_order[index // 2], ("attention", "MLP")[index % 2]
    return f"sublayers.{2 * layer + index % 2} ({kind}), output norm {float(norms[index]):.4g}"
