"""How large things are over depth, in one pass: what is read, written and kept, and the gradients of both.

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
    """Of one pass through a stack, by execution; numbers are tensors, so that nothing waits for a device.

    reads: ‖h‖ of every site in turn, the head's last.
    outputs: ‖v‖ of every sublayer.
    states: for each tensor of streams that a write made or changed, one norm for each of its streams.
    distances: for each write, how far apart the streams of such a tensor are, over their norm; None: one stream.
    read_gradients, output_gradients: norms of the loss's gradients; a site's own, not that of the stream it reads.
    """

    embedding: Tensor | None = None
    reads: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    distances: list[Tensor | None] = field(default_factory=list)
    read_gradients: dict[int, Tensor] = field(default_factory=dict)
    output_gradients: dict[int, Tensor] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, as a line of metrics holds them."""
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
    """As plain numbers, from the device in one go; None stays."""
    known = iter(torch.stack([v.double() for v in values if v is not None] or [torch.zeros(())]).tolist())
    return [None if v is None else next(known) for v in values]


@contextmanager
def measuring(stack: DepthStack) -> Iterator[Magnitudes]:
    """While open, one pass through the stack is measured, whatever path its mixers take; its backward pass too."""
    found = Magnitudes()
    plain = {id(m): (m.read, m.write) for m in stack.all_mixers()}
    begin = stack.begin

    def measured_begin(x: Tensor) -> State:
        found.embedding = rms_over_tokens(x)
        return begin(x)

    def read(mixer: DepthMixer, state: State) -> tuple[Tensor, Any]:
        h, carry = plain[id(mixer)][0](state)
        h = watched(h, found.read_gradients, len(found.reads))
        found.reads.append(rms_over_tokens(h))
        return h, carry

    def write(mixer: DepthMixer, state: State, carry: Any, y: Tensor) -> State:
        if isinstance(y, Tensor):
            y = watched(y, found.output_gradients, len(found.outputs))
            found.outputs.append(rms_over_tokens(y))
        after = plain[id(mixer)][1](state, carry, y)
        with torch.no_grad():
            kept = mixer.streams(after[: stack.spec(len(found.outputs)).essential])
            made = [t if t.dim() > y.dim() else t.unsqueeze(-2) for t in kept if all(t is not old for old in state)]
            found.states.append([stream_norms(streams) for streams in made])
            apart = [stream_distance(streams) for streams in made if streams.shape[-2] > 1]
            found.distances.append(apart[0] if apart else None)
        return after

    with replaced(stack, measured_begin, read, write):
        yield found


def watched(x: Tensor, gradients: dict[int, Tensor], index: int) -> Tensor:
    """`x` under a name of its own in the graph; the norm of its gradient goes to `gradients[index]`."""
    if not torch.is_grad_enabled():
        return x
    x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
    x.register_hook(lambda g: gradients.update({index: rms_over_tokens(g)}))
    return x


def rms_over_tokens(x: Tensor) -> Tensor:
    """The root of the mean over tokens of the squared norm, of x [..., D]."""
    return ops.wide(x.detach()).norm() / (x.numel() / x.shape[-1]) ** 0.5


def stream_norms(x: Tensor) -> Tensor:
    """[M] of x [..., M, D]."""
    return ops.wide(x).square().sum(-1).reshape(-1, x.shape[-2]).mean(0).sqrt()


def stream_distance(x: Tensor) -> Tensor:
    """‖H_i − H_j‖ over ‖H_i‖, both as root mean squares: over pairs of streams i ≠ j, over streams; and over tokens.

    0 where all streams are equal, √2 where they are orthogonal and of one length. Pairs are summed by way of the mean:
    Σ_{i,j} ‖H_i − H_j‖² = 2m Σ_i ‖H_i − mean‖².
    """
    x, m = ops.wide(x), x.shape[-2]
    apart = (x - x.mean(-2, keepdim=True)).norm()
    return (2 * m / (m - 1)) ** 0.5 * apart / x.norm().clamp(min=torch.finfo(x.dtype).tiny)


def rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
