"""Norms over depth, measured in one pass: of reads, outputs and states, and of the gradients of reads and outputs.

A norm is the root of the mean over tokens of the squared norm over channels.

Axes: ... token, D channel, M stream, L sublayers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from depthmix import ops
from depthmix.analysis.recording import replaced
from depthmix.mechanisms import DepthMixer, DepthStack, State


@dataclass
class Magnitudes:
    """Norms of one pass through a stack, by execution; kept as tensors, so that nothing waits for the device.

    reads: ‖h‖ of every site in order, the head's last.
    outputs: ‖v‖ of every sublayer.
    states: for each tensor of streams that a write made or changed, one norm for each of its streams.
    distances: for each write, the distance between the streams of such a tensor, over their norm; None: one stream.
    read_gradients, output_gradients: norms of the loss's gradients: those of h and v themselves, not of the stream.
    """

    embedding: Tensor | None = None
    reads: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    distances: list[Tensor | None] = field(default_factory=list)
    read_gradients: dict[int, Tensor] = field(default_factory=dict)
    output_gradients: dict[int, Tensor] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers, for a line of metrics.jsonl."""
        outputs = numbers(self.outputs)
        main = numbers([rms(norms[0]) if norms else None for norms in self.states])
        return {
            "embedding_norm": numbers([self.embedding])[0],
            "read_norm": numbers(self.reads),
            "output_norm": outputs,
            "state_norm": [torch.cat(norms).tolist() if norms else [] for norms in self.states],
            "contribution": [None if not s else v / s for v, s in zip(outputs, main, strict=True)],
            "read_gradient_norm": numbers([self.read_gradients.get(i) for i in range(len(self.reads))]),
            "gradient_norm": numbers([self.output_gradients.get(i) for i in range(len(outputs))]),
            "stream_distance": numbers(self.distances) if any(d is not None for d in self.distances) else None,
        }


def numbers(values: list[Tensor | None] | list[Tensor]) -> list[Any]:
    """Plain numbers, copied from the device together; None stays None."""
    known = iter(torch.stack([v.double() for v in values if v is not None] or [torch.zeros(())]).tolist())
    return [None if v is None else next(known) for v in values]


@contextmanager
def measuring(stack: DepthStack) -> Iterator[Magnitudes]:
    """While open, one pass through the stack is measured, whatever path its mixers take; its backward pass too."""
    measured = Magnitudes()
    plain = {id(m): (m.read, m.write) for m in stack.all_mixers()}
    begin = stack.entry.begin

    def measured_begin(x: Tensor) -> State:
        measured.embedding = rms_over_tokens(x)
        return begin(x)

    def read(mixer: DepthMixer, state: State) -> tuple[Tensor, Any]:
        h, carry = plain[id(mixer)][0](state)
        h = with_gradient_norm(h, measured.read_gradients, len(measured.reads))
        measured.reads.append(rms_over_tokens(h))
        return h, carry

    def write(mixer: DepthMixer, state: State, carry: Any, y: Tensor) -> State:
        if isinstance(y, Tensor):
            y = with_gradient_norm(y, measured.output_gradients, len(measured.outputs))
            measured.outputs.append(rms_over_tokens(y))
        after = plain[id(mixer)][1](state, carry, y)
        with torch.no_grad():
            kept = mixer.streams(after[: stack.spec(len(measured.outputs)).essential])
            made = [t if t.dim() > y.dim() else t.unsqueeze(-2) for t in kept if all(t is not old for old in state)]
            measured.states.append([stream_norms(streams) for streams in made])
            distances = [stream_distance(streams) for streams in made if streams.shape[-2] > 1]
            measured.distances.append(distances[0] if distances else None)
        return after

    with replaced(stack, measured_begin, read, write):
        yield measured


def with_gradient_norm(x: Tensor, gradients: dict[int, Tensor], index: int) -> Tensor:
    """`x` as a separate node of the graph; the backward pass puts the norm of its gradient into `gradients[index]`."""
    if not torch.is_grad_enabled():
        return x
    x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
    x.register_hook(lambda g: gradients.update({index: rms_over_tokens(g)}))
    return x


def rms_over_tokens(x: Tensor) -> Tensor:
    """The root of the mean over tokens of the squared norm, of x [..., D]."""
    return ops.wide(x.detach()).norm() / (x.numel() / x.shape[-1]) ** 0.5


def stream_norms(x: Tensor) -> Tensor:
    """[M]: the norm of each stream of x [..., M, D]."""
    return ops.wide(x).square().sum(-1).reshape(-1, x.shape[-2]).mean(0).sqrt()


def stream_distance(x: Tensor) -> Tensor:
    """‖H_i − H_j‖ over ‖H_i‖, both as root mean squares: over pairs of streams i ≠ j, over streams; and over tokens.

    0 if all streams are equal, √2 if they are orthogonal and equally long. The sum over pairs comes from the mean:
    Σ_{i,j} ‖H_i − H_j‖² = 2m Σ_i ‖H_i − mean‖².
    """
    x, m = ops.wide(x), x.shape[-2]
    deviation = (x - x.mean(-2, keepdim=True)).norm()
    return (2 * m / (m - 1)) ** 0.5 * deviation / x.norm().clamp(min=torch.finfo(x.dtype).tiny)


def rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
