"""Sites, states and their specifications, and checks that a state or an output fits its site.

Axes: ... any leading shape (batch, token), D channel, M stream. A state is a plain tuple of tensors [..., D] or
[..., M, D]; it is immutable, local to a token, and the only thing passed from one sublayer to the next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = tuple[Tensor, ...]
Coeff: TypeAlias = Any  # a tensor, or a (named) tuple of tensors, with the leading shape of the state
Kind: TypeAlias = Literal["attn", "mlp", "out"]


@dataclass(frozen=True)
class Site:
    """A position where a mechanism reads: before sublayer `index` (from 0), or before the head (`index == depth`)."""

    index: int
    depth: int
    dim: int
    kind: Kind
    is_first: bool = dataclasses.field(init=False)  # reads only the embedding: no read-side parameters
    is_out: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Flags instead of comparisons in `forward`: a compiler would guard on the index of every layer.
        object.__setattr__(self, "is_first", self.index == 0)
        object.__setattr__(self, "is_out", self.index == self.depth)


@dataclass(frozen=True)
class StateSpec:
    """The tensors of the state before a site, so that a pipeline can size its buffers and send only what is new.

    shapes: trailing dimensions of each tensor, after the leading axes.
    essential: number of tensors (from the first) that are needed; the others can be recomputed.
    sealed: number of tensors (from the first) that never change again.
    """

    shapes: tuple[tuple[int, ...], ...]
    essential: int
    sealed: int

    def nbytes(self, dtype: torch.dtype, *, essential: bool = False) -> int:
        """Bytes per token of all tensors, or of the essential ones only; derived numbers are at least float32."""
        shapes = self.shapes[: self.essential] if essential else self.shapes
        wide = torch.promote_types(dtype, torch.float32)
        return sum(math.prod(shape) * (dtype if shape else wide).itemsize for shape in shapes)


def state_widths(specs: Iterable[StateSpec], width: int) -> tuple[float, float]:
    """The size of the largest state per token, in vectors of `width` numbers: at a cut (a pipeline or checkpoint
    boundary), which needs only the essential tensors, and between two reads, with the derived tensors."""
    float32 = torch.float32  # so that every number counts the same
    sizes = [(spec.nbytes(float32, essential=True), spec.nbytes(float32)) for spec in specs]
    at_cut, in_read = (max(column) / (width * float32.itemsize) for column in zip(*sizes, strict=True))
    return at_cut, in_read


class SourceWeights(NamedTuple):
    """The weights of one read over a list of sources, for traces.

    weights: α [..., H, S] of H groups of channels, in the order of the names, or any shape that broadcasts to it.
    names: names of the sources, oldest first, the same in all rows: "embedding", "output 3", "block 2".
    partial: whether the last source is still growing (the running sum of a block).
    """

    weights: Tensor
    names: tuple[str, ...]
    partial: bool = False


def output_names(first: int, last: int) -> tuple[str, ...]:
    """The embedding and the outputs of sublayers `first` to `last`, counted from 1."""
    return ("embedding", *(f"output {i}" for i in range(first, last + 1)))


def check_state(site: Site, expects: StateSpec, state: State) -> None:
    """Reject the state of another site and tensors whose shapes differ: sums would broadcast silently."""
    check_length(site, expects, state)
    first, want = state[0], expects.shapes
    lead = first.shape[: max(0, first.dim() - len(want[0]))]
    for i, (tensor, shape) in enumerate(zip(state, want, strict=False)):
        # A derived number per token, such as a log-sum-exp, has the accumulator's dtype.
        dtype = first.dtype if shape else torch.promote_types(first.dtype, torch.float32)
        if tensor.shape != lead + shape or tensor.dtype != dtype or tensor.device != first.device:
            raise ValueError(
                f"site {site.index} got a state with tensor {i} {tensor.dtype} of shape {list(tensor.shape)} "
                f"on {tensor.device}; expected {dtype} of shape {[*lead, *shape]} on {first.device}, "
                "to match tensor 0"
            )


def check_length(site: Site, expects: StateSpec, state: State) -> None:
    if not isinstance(state, tuple):
        got = type(state).__name__
        raise TypeError(f"site {site.index} got a {got}; expected the tuple that `begin` or `write` returned")
    if not expects.essential <= len(state) <= len(expects.shapes):
        raise ValueError(
            f"site {site.index} got a state of {len(state)} tensors; expected {len(expects.shapes)}. "
            "Read and write the sites in order; in your own mechanism, `spec` must match the state"
        )


def checked_output(site: Site, expects: StateSpec, state: State, y: Tensor) -> Tensor:
    """The sublayer's output in the stream's dtype, or an error if it would broadcast."""
    check_length(site, expects, state)
    stream = state[0]
    shape = stream.shape[: stream.dim() - len(expects.shapes[0])] + (site.dim,)  # noqa: RUF005
    if not isinstance(y, Tensor):
        raise TypeError(
            f"sublayer {site.index} returned a {type(y).__name__}; expected a floating-point tensor "
            f"of shape {list(shape)}: select the tensor from what the module returns"
        )
    if y.shape != shape or not y.is_floating_point() or y.device != stream.device:
        raise ValueError(
            f"sublayer {site.index} returned {y.dtype} of shape {list(y.shape)} on {y.device}; "
            f"expected a floating-point tensor of shape {list(shape)} on {stream.device}, like its input"
        )
    return y.to(stream.dtype)
