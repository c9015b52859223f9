"""Read the depth mixing matrix off a running model.

The coefficients of a real forward pass are recorded; the linear maps are then replayed on one-hot sources. The source
axis is put in front of all others, so that a mechanism's own code serves unchanged.

Axes: ... token, D channel, G group of channels with weights of their own (1, heads or D), L sublayers, i source.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.analysis.recording import Record, copy_coefficients, recording, recording_values
from depthmix.analysis.structure import effective_rank, row_sums, semiseparable_rank, sinks
from depthmix.mechanisms import DepthStack, KVMixer, State
from depthmix.support.files import read_tensors, replacing

TraceKind = Literal["scalar", "head", "channel", "operator"]
TENSORS = ("M", "sources", "inputs", "parts", "values")
OPTIONAL = {"parts", "values"}
METADATA = ("kind", "mechanism", "options", "channels")
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
            raise ValueError("this trace holds a few channels of M only; trace without `channels` for contributions")
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

    def sinks(self) -> Tensor:
        return sinks(self.M)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; an older one at `path` stays intact until the new one is complete."""
        from safetensors.torch import save_file

        target = Path(path)
        tensors = {name: t for name in TENSORS if (t := getattr(self, name)) is not None}
        fields = json.dumps({name: getattr(self, name) for name in METADATA})
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
        complete = isinstance(fields, dict) and set(fields) == set(METADATA) and fields["kind"] in SUMMARY
        if not complete or not set(TENSORS) - OPTIONAL <= set(tensors) <= set(TENSORS):
            raise ValueError(f"{path} is a safetensors file but no trace; expected one that Trace.save wrote")
        return cls(**tensors, **fields)


def value_matrix(layers: Sequence[tuple[KVMixer, Any, Tensor]]) -> Tensor | None:
    """[B, T, K, N, N] by replaying the mixers on one-hot values; None where no attention mixes values."""
    if not layers:
        return None
    n, k = len(layers), layers[0][2]
    kv, rows = layers[0][0].begin(), []
    for i, (mixer, c, _) in enumerate(layers):
        v = ops.wide(k).new_zeros((n, *k.shape[:-1], 1))  # [source, B, K, T, 1]
        v[i] = 1
        mixed = mixer.combine(v, kv, c)
        kv = mixer.update(k, v, mixed, kv)
        rows.append(mixed.squeeze(-1))
    return torch.stack(rows).permute(2, 4, 3, 0, 1)  # [B, T, K, row, source]


def replay(
    stack: DepthStack, coefficients: Sequence[Any], sources: Sequence[Tensor]
) -> tuple[list[Tensor], list[State]]:
    """Rows and states that the linear maps give for other sources, under recorded coefficients."""
    assert stack.out is not None
    state = next(iter(stack)).begin(sources[0])
    rows, states = [], [state]
    for mixer, c, source in zip(stack, coefficients[:-1], sources[1:], strict=True):
        rows.append(mixer.combine(state, c))
        state = mixer.update(state, c, source)
        states.append(state)
    rows.append(stack.out.combine(state, coefficients[-1]))
    return rows, states


@torch.no_grad()
def trace(
    model: nn.Module,
    x: Tensor,
    sublayers: Sequence[Callable[[Tensor], Tensor]] | None = None,
    *,
    channels: Sequence[int] | None = None,
    **inputs: Any,
) -> Trace:
    """Run `model` once and read its depth mixing matrix.

    Args:
        model: any module that runs the protocol through one `DepthStack`, or a `DepthStack` itself.
        x: what the model takes (tokens); for a bare stack the embedding `[..., D]`.
        sublayers: for a bare stack, its sublayers: a list of callables.
        channels: where weights differ by channel, which of them to keep in M (all by default; M has (L+1)² entries for
            each token and channel).
        inputs: what else the model takes, by keyword.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace got a {type(model).__name__}; expected an nn.Module that runs a DepthStack")
    if sublayers is not None and not isinstance(model, DepthStack):
        raise ValueError(f"sublayers given with a {type(model).__name__}; expected them with a bare DepthStack only")
    stack = model if isinstance(model, DepthStack) else find_stack(model)
    with recording(stack) as record, recording_values(model) as layers:
        if isinstance(model, DepthStack):
            if sublayers is None or inputs:
                raise ValueError("a bare DepthStack has no sublayers; expected trace(stack, x, sublayers)")
            model(x, sublayers)
        else:
            model(x, **inputs)
    traced = assemble(stack, record, channels)
    traced.values = value_matrix(layers)
    return traced


def find_stack(model: nn.Module) -> DepthStack:
    stacks = {name: m for name, m in model.named_modules() if isinstance(m, DepthStack)}
    if len(stacks) != 1:
        count = f"{len(stacks)} of them ({', '.join(stacks)})" if stacks else "none"
        raise ValueError(f"{type(model).__name__} holds {count}; expected one DepthStack among its modules")
    return next(iter(stacks.values()))


def assemble(stack: DepthStack, record: Record, channels: Sequence[int] | None) -> Trace:
    missing = [i for i in range(stack.depth + 1) if i not in record.inputs]
    if record.embedding is None or missing:
        raise ValueError(f"sites {missing} of {stack.name} were not read; expected a forward pass through all of them")
    coefficients = [copy_coefficients(record.coefficients[i]) for i in range(stack.depth + 1)]
    mixer = next(iter(stack))
    if mixer.operator_valued:
        kind: TraceKind = "operator"
        written = [record.embedding, *(record.written[i] for i in range(stack.depth))]
        parts, M = operator_parts(stack, coefficients, written)
    else:
        kind = "scalar" if mixer.groups == 1 else "channel" if mixer.groups == stack.dim else "head"
        parts, M = None, mixing_matrix(stack, coefficients, record.embedding, mixer.groups, channels)
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
    )


def mixing_matrix(
    stack: DepthStack, coefficients: Sequence[Any], x: Tensor, groups: int, channels: Sequence[int] | None
) -> Tensor:
    if channels is not None and not all(isinstance(k, int) and -stack.dim <= k < stack.dim for k in channels):
        raise ValueError(f"channels={list(channels)}; expected indices below the width, dim={stack.dim}")
    n = stack.depth + 1
    zero = x.new_zeros((n, *x.shape[:-1], groups), dtype=ops.accumulator(x.dtype))
    one_hot = [zero.index_fill(0, torch.tensor([i], device=x.device), 1) for i in range(n)]
    rows, _ = replay(stack, coefficients, one_hot)  # each [i, ..., G]
    if channels is not None and groups == stack.dim:
        rows = [row[..., list(channels)] for row in rows]
    M = torch.stack(rows).movedim((0, 1), (-2, -1))  # [..., G, row, i]
    return M.squeeze(-3) if groups == 1 else M


def operator_parts(stack: DepthStack, coefficients: Sequence[Any], written: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Contributions [row, i, ..., D] of the real writes, and their gains [..., row, i]."""
    n = stack.depth + 1
    isolated = []  # each write, with the others zero
    for i, v in enumerate(written):
        wide = ops.wide(v)
        isolated.append(torch.stack([wide if j == i else torch.zeros_like(wide) for j in range(n)]))
    rows, states = replay(stack, coefficients, isolated)
    streams = [s[0].flatten(-2) for s in states]  # [i, ..., M·D] before each row
    first = torch.stack([streams[i][i] for i in range(n)])  # each write as it entered
    tiny = torch.finfo(first.dtype).tiny
    direction = first / first.abs().amax(-1, keepdim=True).clamp(min=tiny)  # nothing of the writes' size is squared
    scale = (first * direction).sum(-1).clamp(min=tiny)
    gain = torch.stack([(s * direction).sum(-1) / scale for s in streams])  # [row, i, ...]
    causal = torch.ones(n, n, device=gain.device).tril().view(n, n, *[1] * (gain.dim() - 2))
    return torch.stack(rows), (gain * causal.to(gain.dtype)).movedim((0, 1), (-2, -1))
