"""Read the depth mixing matrix off a running model.

The coefficients of a real forward pass are recorded; the linear maps are then replayed on one-hot sources. The source
axis is put in front of all others, so that a mechanism's own code serves unchanged.

Axes: ... token, D channel, G group of channels with weights of their own (1, heads or D), L sublayers, i source.
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

from depthmix import ops
from depthmix.analysis.structure import effective_rank, row_sums, semiseparable_rank, sinks
from depthmix.mechanisms import DepthMixer, DepthStack, KVMixer, State
from depthmix.support.files import read_tensors, replacing

TraceKind = Literal["scalar", "head", "channel", "operator"]
TENSORS = ("M", "sources", "inputs", "parts", "values")
OPTIONAL = {"parts", "values"}
ABOUT = ("kind", "mechanism", "options", "channels")
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
        """Write a safetensors file; an older one at `path` stays whole until the new one is complete."""
        from safetensors.torch import save_file

        target = Path(path)
        tensors = {name: t for name in TENSORS if (t := getattr(self, name)) is not None}
        about = json.dumps({field: getattr(self, field) for field in ABOUT})
        with replacing(target) as part:
            save_file({k: t.contiguous() for k, t in tensors.items()}, part, {"depthmix.trace": about})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        if not Path(path).is_file():
            raise FileNotFoundError(f"no trace at {path}; expected a file that Trace.save wrote")
        tensors, metadata = read_tensors(Path(path), "Save the trace again")
        try:
            about = json.loads(metadata.get("depthmix.trace", "null"))
        except json.JSONDecodeError:
            about = None
        complete = isinstance(about, dict) and set(about) == set(ABOUT) and about["kind"] in SUMMARY
        if not complete or not set(TENSORS) - OPTIONAL <= set(tensors) <= set(TENSORS):
            raise ValueError(f"{path} is a safetensors file but no trace; expected one that Trace.save wrote")
        return cls(**tensors, **about)


@dataclass
class Record:
    """One forward pass of a stack."""

    embedding: Tensor | None = None
    inputs: dict[int, Tensor] = field(default_factory=dict)
    coefficients: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)  # y, in the stream's dtype
    written: dict[int, Tensor] = field(default_factory=dict)  # what `value` makes of it


@contextmanager
def recording(stack: DepthStack) -> Iterator[Record]:
    """While open, the stack's mixers run coeff → combine → value → update, never a fast path, and are recorded."""
    record = Record()

    def begin(x: Tensor) -> State:
        if record.embedding is not None:
            raise ValueError("begin was called twice; trace one forward pass")
        record.embedding = x.clone()
        return type(stack).begin(stack, x)

    def read(mixer: DepthMixer, state: State) -> tuple[Tensor, Any]:
        site = mixer.site.index
        if site in record.inputs:
            raise ValueError(f"site {site} was read twice; trace one forward pass, with a mixer for each execution")
        if record.embedding is None:
            raise ValueError(f"{stack.name}: begin of the stack was not called; expected it before site {site} is read")
        if site != len(record.inputs):
            raise ValueError(
                f"site {site} was read after {len(record.inputs)} others; expected the sites in their order"
            )
        if len(record.written) < site:
            raise ValueError(f"site {site - 1} was not written; expected a write after each read, before site {site}")
        mixer.check_state(state)
        essential = state[: mixer.expects.essential]
        c = mixer.coeff(essential)
        h = mixer.combine(essential, c)
        record.coefficients[site], record.inputs[site] = c, h.clone()  # a sublayer may work on h in place
        return h, c

    def write(mixer: DepthMixer, state: State, c: Any, y: Tensor) -> State:
        site = mixer.site.index
        if site in record.written:
            raise ValueError(f"site {site} was written twice; trace one forward pass")
        essential = state[: mixer.expects.essential]
        y = mixer.checked_output(essential, y)
        c, v = mixer.value(essential, c, y)
        record.outputs[site], record.coefficients[site], record.written[site] = y.clone(), c, v.clone()
        return mixer.update(essential, c, v)

    patched: list[tuple[nn.Module, str]] = []

    def patch(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        setattr(module, name, function)  # an instance attribute: it hides the method until it is deleted
        patched.append((module, name))

    try:
        patch(stack, "begin", begin)
        for mixer in stack.all_mixers():
            patch(mixer, "read", lambda state, m=mixer: read(m, state))
            patch(mixer, "write", lambda state, c, y, m=mixer: write(m, state, c, y))
        yield record
    finally:
        for module, name in patched:
            delattr(module, name)


@contextmanager
def recording_values(model: nn.Module) -> Iterator[list[tuple[KVMixer, Any, Tensor]]]:
    """While open, each run of a value mixer is recorded: the mixer, its coefficients and the key beside the value."""
    layers: list[tuple[KVMixer, Any, Tensor]] = []

    def recorded(mixer: KVMixer) -> Callable[[Tensor, Tensor, State], Any]:
        def coeff(q: Tensor, k: Tensor, kv: State) -> Any:
            c = type(mixer).coeff(mixer, q, k, kv)
            layers.append((mixer, snapshot(c), k))
            return c

        return coeff

    mixers = [m for m in model.modules() if isinstance(m, KVMixer)]
    try:
        for mixer in mixers:
            mixer.coeff = recorded(mixer)  # type: ignore[method-assign, assignment]
        yield layers
    finally:
        for mixer in mixers:
            mixer.__dict__.pop("coeff", None)


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
    found = assemble(stack, record, channels)
    found.values = value_matrix(layers)
    return found


def find_stack(model: nn.Module) -> DepthStack:
    stacks = {name: m for name, m in model.named_modules() if isinstance(m, DepthStack)}
    if len(stacks) != 1:
        found = f"{len(stacks)} of them ({', '.join(stacks)})" if stacks else "none"
        raise ValueError(f"{type(model).__name__} holds {found}; expected one DepthStack among its modules")
    return next(iter(stacks.values()))


def assemble(stack: DepthStack, record: Record, channels: Sequence[int] | None) -> Trace:
    missing = [i for i in range(stack.depth + 1) if i not in record.inputs]
    if record.embedding is None or missing:
        raise ValueError(f"sites {missing} of {stack.name} were not read; expected a forward pass through all of them")
    coefficients = [snapshot(record.coefficients[i]) for i in range(stack.depth + 1)]
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


def snapshot(c: Any) -> Any:
    """Coefficients as they were: some are parameters, which the next optimiser step changes."""
    if isinstance(c, Tensor):
        return c.detach().clone()
    if isinstance(c, tuple):
        parts = [snapshot(part) for part in c]
        return type(c)(*parts) if hasattr(c, "_fields") else tuple(parts)
    return c


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
    alone = []
    for i, v in enumerate(written):
        wide = ops.wide(v)
        alone.append(torch.stack([wide if j == i else torch.zeros_like(wide) for j in range(n)]))
    rows, states = replay(stack, coefficients, alone)
    held = [s[0].flatten(-2) for s in states]  # [i, ..., M·D] before each row
    first = torch.stack([held[i][i] for i in range(n)])  # each write as it entered
    tiny = torch.finfo(first.dtype).tiny
    direction = first / first.abs().amax(-1, keepdim=True).clamp(min=tiny)  # nothing of the writes' size is squared
    size = (first * direction).sum(-1).clamp(min=tiny)
    gain = torch.stack([(s * direction).sum(-1) / size for s in held])  # [row, i, ...]
    causal = torch.ones(n, n, device=gain.device).tril().view(n, n, *[1] * (gain.dim() - 2))
    return torch.stack(rows), (gain * causal.to(gain.dtype)).movedim((0, 1), (-2, -1))
