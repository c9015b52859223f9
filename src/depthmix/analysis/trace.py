"""Measure the depth mixing matrix of a model.

The coefficients of a real forward pass are recorded; the linear maps are then replayed on one-hot sources.

Axes: ... token, D channel, G group of channels with weights of their own (1, heads or D), L sublayers, H head of the
weights, C source that a mechanism names.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthmix.analysis.recording import Record, find_stack, recording, recording_values
from depthmix.analysis.replay import mixing_matrix, operator_parts, value_matrix, weights_over_sources
from depthmix.analysis.structure import (
    effective_rank,
    locality,
    row_entropy,
    row_sums,
    semiseparable_rank,
    shares,
    sinks,
    token_deviation,
)
from depthmix.mechanisms import DepthStack
from depthmix.support.files import read_tensors, replacing

TraceKind = Literal["scalar", "head", "channel", "operator"]
TENSORS = ("M", "sources", "inputs")
OPTIONAL_TENSORS = ("parts", "values", "weights")
METADATA = ("kind", "mechanism", "options", "channels")
OPTIONAL_METADATA = ("source_names", "reads", "partial")  # not in files of 0.1.0
SUMMARY = {
    "scalar": "weight of each source",
    "head": "weight of each source, by head",
    "channel": "weight of each source, by channel",
    "operator": "gain <T w, w>/|w|² of each write: a summary, see `contributions`",
}


@dataclass(repr=False)
class Trace:
    """What a model's rows read.

    M: [..., L+1, L+1], with heads or channel gates [..., G, L+1, L+1]. Row r belongs to sublayer r+1, the last to the
        head; column i to v_i. For an operator-valued mechanism (`kind == "operator"`) it holds the gains of the writes,
        a summary; `contributions` is exact for every kind.
    sources: v_0 … v_L as [L+1, ..., D].
    inputs: h_1 … h_{L+1} as [L+1, ..., D].
    values: [B, T, K, N, N] where attention mixes values over depth: for each token and key-value head, how much of the
        raw value of each of N attention layers (column) is in the value that a layer caches (row).
    weights: α as [..., L+1, C] over C sources, with heads [..., H, L+1, C], 0 where a row does not read; None where the
        mechanism does not weight a list of sources. A block of Block AttnRes is one source here; in M every output of
        the block has its weight.
    source_names: names of the C columns of `weights`.
    reads: the columns of `weights` that each row reads, the newest last; empty where a row has no weights.
    partial: for each row, whether its newest source is still growing: the running sum of a block.
    coefficients: what each site computed, as its mechanism returns it. Not saved.
    """

    M: Tensor
    sources: Tensor
    inputs: Tensor
    kind: TraceKind
    mechanism: str
    options: dict[str, Any]
    channels: list[int] | None = None
    parts: Tensor | None = None  # contributions of an operator-valued mechanism [row, source, ..., D]
    values: Tensor | None = None
    weights: Tensor | None = None
    source_names: list[str] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    partial: list[bool] = field(default_factory=list)
    coefficients: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Trace({self.mechanism}, M {list(self.M.shape)}: {self.label}, sources {list(self.sources.shape)})"

    @property
    def label(self) -> str:
        """What the entries of M are, for a figure's caption."""
        return SUMMARY[self.kind]

    def contributions(self, row: int) -> Tensor:
        """[L+1, ..., D]: what each source adds to h of `row` (from 0); they sum to `inputs[row]`."""
        if self.parts is not None:
            return self.parts[row]
        if self.channels is not None:
            raise ValueError("this trace has only some channels of M; for contributions, trace without `channels`")
        weights = self.M[..., row, :].movedim(-1, 0)  # [L+1, ..., (G)]
        weights = weights.unsqueeze(-1) if self.kind == "scalar" else weights
        return weights.repeat_interleave(self.sources.shape[-1] // weights.shape[-1], -1) * self.sources

    def rank(self, tol: float | None = None) -> Tensor:
        """Semiseparable rank for each token (and head or channel)."""
        self.check_weights()
        default = 1e-9 if self.M.dtype == torch.float64 else 1e-5
        return semiseparable_rank(self.M, default if tol is None else tol)

    def effective_rank(self) -> Tensor:
        self.check_weights()
        return effective_rank(self.M)

    def check_weights(self) -> None:
        if self.kind == "operator":
            raise ValueError(f"{self.mechanism} is operator-valued: its M is a summary and has no rank")

    def row_sums(self) -> Tensor:
        return row_sums(self.M)

    # The methods below use the weights over sources if the mechanism has them, otherwise M.

    @property
    def shares_of(self) -> Literal["weights", "M"]:
        """The tensor that `sinks`, `entropy`, `locality` and `spread` are computed from."""
        return "M" if self.weights is None else "weights"

    @property
    def shares_read(self) -> tuple[Tensor, list[list[int]] | None]:
        """That tensor, and the columns of it that each row reads (None: all up to the diagonal)."""
        return (self.M, None) if self.weights is None else (self.weights, self.reads)

    def sinks(self) -> Tensor:
        """[..., C] or [..., L+1]: each source's mean share in the rows that can read it."""
        return sinks(*self.shares_read)

    def entropy(self) -> Tensor:
        """[..., L+1]: the entropy of each row's shares; 0 for a row that has no weights."""
        return row_entropy(self.shares_read[0])

    def locality(self) -> Tensor:
        """[..., L+1]: the share of each row that its newest source has."""
        return locality(*self.shares_read)

    def embedding_share(self) -> Tensor:
        """[..., L+1]: the share of each row that the embedding has."""
        return shares(self.shares_read[0])[..., 0]

    def deviation(self) -> Tensor:
        """[(H,) L+1, C] or [(G,) L+1, L+1]: standard deviation over tokens of each share."""
        return token_deviation(self.shares_read[0], self.sources.dim() - 2)

    def spread(self) -> Tensor:
        """[(H,) L+1]: how much shares vary over tokens: the root of the sum of a row's variances."""
        return self.deviation().square().sum(-1).sqrt()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; an older one at `path` stays intact until the new one is complete."""
        from safetensors.torch import save_file

        target = Path(path)
        tensors = {name: t for name in TENSORS + OPTIONAL_TENSORS if (t := getattr(self, name)) is not None}
        fields = json.dumps({name: getattr(self, name) for name in METADATA + OPTIONAL_METADATA})
        with replacing(target) as part:
            save_file({k: t.contiguous() for k, t in tensors.items()}, part, {"depthmix.trace": fields})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        if not Path(path).is_file():
            raise FileNotFoundError(f"no trace at {path}; expected a file that Trace.save wrote")
        tensors, metadata = read_tensors(Path(path), "Save the trace again")
        try:
            fields = json.loads(metadata.get("depthmix.trace", "null"))
        except json.JSONDecodeError:
            fields = None
        known = isinstance(fields, dict) and set(METADATA) <= set(fields) <= {*METADATA, *OPTIONAL_METADATA}
        complete = known and set(TENSORS) <= set(tensors) <= {*TENSORS, *OPTIONAL_TENSORS}
        if not complete or fields["kind"] not in SUMMARY:
            raise ValueError(f"{path} is a safetensors file but not a trace; expected one that Trace.save wrote")
        return cls(**tensors, **fields)


@torch.no_grad()
def trace(
    model: nn.Module,
    x: Tensor,
    sublayers: Sequence[Callable[[Tensor], Tensor]] | None = None,
    *,
    channels: Sequence[int] | None = None,
    **inputs: Any,
) -> Trace:
    """Run `model` once and measure its depth mixing matrix.

    Args:
        model: any module that runs the protocol through one `DepthStack`, or a `DepthStack` itself.
        x: the model's input (tokens); for a bare stack the embedding `[..., D]`.
        sublayers: for a bare stack, its sublayers: a list of callables.
        channels: where weights differ by channel, which of them to keep in M (all by default; M has (L+1)² entries for
            each token and channel).
        inputs: further keyword arguments of the model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace got a {type(model).__name__}; expected an nn.Module that runs a DepthStack")
    if sublayers is not None and not isinstance(model, DepthStack):
        raise ValueError(f"sublayers given with a {type(model).__name__}; expected them with a bare DepthStack only")
    with tracing(model) as traced:
        if isinstance(model, DepthStack):
            if sublayers is None or inputs:
                raise ValueError("a bare DepthStack has no sublayers; expected trace(stack, x, sublayers)")
            model(x, sublayers)
        else:
            model(x, **inputs)
    return traced(channels)


@contextmanager
def tracing(model: nn.Module) -> Iterator[Callable[[Sequence[int] | None], Trace]]:
    """While open, one forward pass of `model` is recorded, with its graph if there is one.

    Yields a function that makes the trace afterwards; its argument lists the channels of M to keep (None: all).
    """
    stack = model if isinstance(model, DepthStack) else find_stack(model)

    @torch.no_grad()
    def make(channels: Sequence[int] | None = None) -> Trace:
        traced = assemble(stack, record, channels)
        traced.values = value_matrix(layers)
        return traced

    with recording(stack) as record, recording_values(model) as layers:
        yield make


def groups_of(stack: DepthStack) -> int:
    """The number of groups of channels with weights of their own."""
    return next(iter(stack)).groups


def kind_of(stack: DepthStack) -> TraceKind:
    if next(iter(stack)).operator_valued:
        return "operator"
    groups = groups_of(stack)
    return "scalar" if groups == 1 else "channel" if groups == stack.dim else "head"


def check_complete(stack: DepthStack, record: Record) -> None:
    """Raise an error unless a pass through the whole stack was recorded."""
    missing = [i for i in range(stack.depth + 1) if i not in record.inputs]
    if record.embedding is None or missing:
        raise ValueError(f"sites {missing} of {stack.name} were not read; expected a forward pass through all of them")


def assemble(stack: DepthStack, record: Record, channels: Sequence[int] | None) -> Trace:
    check_complete(stack, record)
    assert record.embedding is not None
    coefficients = [record.coefficients[i] for i in range(stack.depth + 1)]
    kind = kind_of(stack)
    if kind == "operator":
        written = [record.embedding, *(record.written[i] for i in range(stack.depth))]
        parts, M = operator_parts(stack, coefficients, written)
    else:
        parts, M = None, mixing_matrix(stack, coefficients, record.embedding, groups_of(stack), channels)
    sources = weights_over_sources(stack, coefficients, record.embedding)
    named = {} if sources is None else sources._asdict()
    return Trace(
        M=M,
        sources=torch.stack([record.embedding, *(record.outputs[i] for i in range(stack.depth))]),
        inputs=torch.stack([record.inputs[i] for i in range(stack.depth + 1)]),
        kind=kind,
        mechanism=stack.name,
        options=dataclasses.asdict(stack.config),
        channels=None if channels is None or kind != "channel" else list(channels),
        parts=parts,
        coefficients=coefficients,
        **named,
    )
