"""Caches of what attention keeps of earlier tokens, in one slot for each of its executions.

A slot holds columns or a state. Columns are tensors [B, heads, S, width] that grow with the tokens: keys and values
after depth mixing, as attention reads them, or the latents of MLA. A state has a constant size: that of KDA.

Axes: B batch, T new token, S column (a place in the cache, for the whole batch).

Padding occupies a column but no position, and only the padding token itself attends to it; states do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from depthmix.models import DecoderConfig
from depthmix.support.checks import check_memory

Tensors = tuple[Tensor, ...]


class DynamicCache:
    """A cache that grows by concatenation. The first call determines batch size, layers, dtype and device."""

    capacity: int | None = None  # no limit

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all tokens."""
        self.length = 0
        self.batch: int | None = None
        self.slots: list[Tensors] = []
        self.written: list[int] = []  # for each slot, the number of columns when it was written
        self.valid: Tensor | None = None  # [B, S]; None: no padding so far
        self.new = 0

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that is kept."""
        return [tensor for slot in self.slots for tensor in slot]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def place(self, tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        batch, count = tokens.shape
        check_batch(batch, self.batch)
        if any(columns != self.length for columns in self.written):
            raise ValueError(
                f"the layers of the cache hold {self.written} columns; expected {self.length} in each. A forward pass "
                "was interrupted, or the previous model had more layers: call reset()"
            )
        before, after = self.length, self.length + count
        self.batch, self.length, self.new = batch, after, count
        columns = torch.arange(before, after, device=tokens.device)
        if valid is None and self.valid is None:
            # Causal, or one token that attends to all: no mask is needed.
            mask = None if before == 0 or count == 1 else visible(columns, after, None)
            return columns.expand(batch, count), mask
        known = [
            tokens.new_ones((batch, n), dtype=torch.bool) if part is None else part.bool()
            for part, n in ((self.valid, before), (valid, count))
        ]
        self.valid = torch.cat(known, 1)
        positions = (self.valid.long().cumsum(1) - 1).clamp(min=0)
        return positions[:, before:], visible(columns, after, self.valid)

    def put(self, slot: int, *new: Tensor) -> Tensors:
        before = self.state(slot)
        if before is None:
            check_columns(slot, new, [(self.batch, x.shape[1], self.new, x.shape[3]) for x in new])
        else:
            check_columns(slot, new, [(self.batch, x.shape[1], self.new, x.shape[-1]) for x in before], before)
            new = tuple(torch.cat(pair, 2) for pair in zip(before, new, strict=True))
        self.replace(slot, *new)
        return new

    def state(self, slot: int) -> Tensors | None:
        if slot < len(self.slots):
            return self.slots[slot]
        if self.length != self.new or slot > len(self.slots):
            raise ValueError(
                f"attention {slot} writes to a cache of {len(self.slots)} layers; expected a cache filled by this "
                "model, or an empty one: call reset()"
            )
        return None  # the first tokens

    def replace(self, slot: int, *state: Tensor) -> None:
        if slot == len(self.slots):
            self.slots.append(state)
            self.written.append(self.length)
        self.slots[slot], self.written[slot] = state, self.length


class PreallocatedCache:
    """A cache of `capacity` columns, written in place at an index that is held in a tensor; states are too.

    One compiled graph therefore serves all decode steps: under `torch.compile` no Python number changes from step to
    step, and attention runs over all columns with a mask. Without `torch.compile`, attention reads only the filled
    columns.

    Args:
        config: configuration of the model; a looped attention layer has a slot for each execution.
        batch: number of sequences.
        capacity: number of columns, for tokens and their padding.
        dtype: dtype of what is kept, that of the model's parameters; the memory of KDA is float32 at least.
        device: device of the model.
        kv_heads: key-value heads of this process; None: all.
        slots: executions of attention layers on this process; None: all.
        first_slot: the number of executions before these.
    """

    def __init__(
        self,
        config: DecoderConfig,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_heads: int | None = None,
        slots: int | None = None,
        first_slot: int = 0,
    ) -> None:
        for name, value in (("batch", batch), ("capacity", capacity)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}; expected a whole number of at least 1")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype}; expected a floating-point dtype, that of the model")
        self.batch, self.capacity = batch, capacity
        kept = config.kept(kv_heads)[first_slot:][:slots]
        self.grows = [bool(part.columns) for part in kept]  # whether each slot holds columns
        layouts = [part.tensors(batch, capacity, dtype) for part in kept]
        size = sum(math.prod(shape) * kind.itemsize for layout in layouts for shape, kind in layout)
        check_memory(
            f"keys and values of batch={batch} × capacity={capacity}", size, "Use a smaller batch or fewer tokens"
        )
        self.slots = [tuple(torch.zeros(shape, dtype=kind, device=device) for shape, kind in part) for part in layouts]
        self.marked: tuple[int, list[Tensor]] | None = None
        self.valid = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        self.filled = torch.zeros((), dtype=torch.int64, device=device)  # columns in use
        self.count = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # tokens without padding
        self.columns = torch.zeros(0, dtype=torch.int64, device=device)  # columns of the new tokens
        self.seen = 0  # columns that attention reads
        self.padded = False

    def reset(self) -> None:
        """Remove all tokens; the memory stays allocated."""
        for tensor in (self.valid, self.filled, self.count, *self.states):
            tensor.zero_()
        self.padded, self.marked = False, None

    def mark(self) -> None:
        """Copy the states, so that `rewind` can return to the present length. Without states this does nothing."""
        self.marked = self.length, [state.clone() for state in self.states]

    def rewind(self, length: int) -> None:
        """Keep the first `length` columns and remove the others, for example after rejected speculative tokens.

        States contain all tokens so far and cannot give up some of them: with KDA, `length` must be one of 0, the
        present length, and that of the last `mark`.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length={length}; expected 0 to {self.length}, the number of columns in use")
        if self.states and length < self.length:
            self.restore_states(length)
        if self.marked is not None and length < self.marked[0]:
            self.marked = None
        self.valid[:, length:] = False
        self.filled.fill_(length)
        self.count.copy_(self.valid.sum(1, keepdim=True))

    def restore_states(self, length: int) -> None:
        at, copies = self.marked or (0, [])
        if length not in (0, at):
            raise ValueError(
                f"length={length} in a cache with states of KDA, from which tokens cannot be removed; expected "
                f"{' or '.join(map(str, sorted({0, at, self.length})))}. Call mark() at the length to return to"
            )
        for i, state in enumerate(self.states):
            if length == 0:
                state.zero_()
            else:
                state.copy_(copies[i])

    @property
    def length(self) -> int:
        """Number of columns in use."""
        return int(self.filled)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that is kept."""
        return [tensor for slot in self.slots for tensor in slot]

    @property
    def states(self) -> list[Tensor]:
        """Of what is kept, the tensors without an axis of columns."""
        return [tensor for slot, grows in zip(self.slots, self.grows, strict=True) if not grows for tensor in slot]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def place(self, tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        batch, count = tokens.shape
        check_batch(batch, self.batch)
        if tokens.device != self.filled.device:
            raise ValueError(f"tokens on {tokens.device} and a cache on {self.filled.device}; expected the same device")
        # Reading the length would specialise a compiled step to its value and synchronise with the device.
        known = not torch.compiler.is_compiling() and (count > 1 or tokens.device.type == "cpu")
        before = self.length if known else 0
        if before + count > self.capacity:
            raise ValueError(
                f"{before} columns in use and {count} new tokens; expected at most {self.capacity} in total, the "
                "capacity of the cache. Use a larger one, or call reset()"
            )
        self.seen = before + count if known else self.capacity
        self.columns = self.filled + torch.arange(count, device=tokens.device)
        new = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid.bool()
        self.valid.index_copy_(1, self.columns, new)
        positions = (self.count + new.long().cumsum(1) - 1).clamp(min=0)
        self.filled.add_(count)
        self.count.add_(new.sum(1, keepdim=True))
        if valid is not None:
            self.padded = True
        if known and not self.padded and (before == 0 or count == 1):
            return positions, None
        return positions, visible(self.columns, self.seen, self.valid[:, : self.seen])

    def put(self, slot: int, *new: Tensor) -> Tensors:
        stored = self.state(slot)
        shapes = [(self.batch, x.shape[1], self.columns.shape[0], x.shape[-1]) for x in stored]
        check_columns(slot, new, shapes, stored)
        for kept, x in zip(stored, new, strict=True):
            kept.index_copy_(2, self.columns, x)
        return tuple(kept[:, :, : self.seen] for kept in stored)

    def state(self, slot: int) -> Tensors:
        """At the start, zeros."""
        if slot >= len(self.slots):
            raise ValueError(
                f"attention {slot} writes to a cache of {len(self.slots)} layers; expected a cache made for this model"
            )
        return self.slots[slot]

    def replace(self, slot: int, *state: Tensor) -> None:
        stored = self.state(slot)
        check_tensors(slot, ("memory", "history"), state, [x.shape for x in stored], stored)
        for kept, x in zip(stored, state, strict=True):
            kept.copy_(x)


def visible(columns: Tensor, seen: int, valid: Tensor | None) -> Tensor:
    """The attention mask [B or 1, 1, T, S]: columns up to the token's own without padding, and always its own."""
    all_columns = torch.arange(seen, device=columns.device)
    sees = (all_columns <= columns[:, None])[None]
    if valid is not None:
        sees = (sees & valid[:, None, :]) | (all_columns == columns[:, None])
    return sees[:, None]


def check_batch(batch: int, expected: int | None) -> None:
    if expected is not None and batch != expected:
        raise ValueError(f"batch size {batch}, but the cache is for {expected}. Use a cache for this batch size")


def check_columns(
    slot: int, new: Tensors, shapes: Sequence[tuple[int | None, ...]], stored: Tensors | None = None
) -> None:
    check_tensors(slot, ("latents",) if len(new) == 1 else ("keys", "values"), new, shapes, stored)


def check_tensors(
    slot: int,
    names: tuple[str, ...],
    new: Tensors,
    shapes: Sequence[tuple[int | None, ...]],
    stored: Tensors | None = None,
) -> None:
    """Reject tensors that would be silently broadcast or rounded."""
    if len(new) != len(shapes):
        raise ValueError(
            f"attention {slot} writes {' and '.join(names)}; the cache holds {len(shapes)} tensors for it. Use a cache "
            "made for this model, or an empty one: call reset()"
        )
    for i, (name, tensor, shape) in enumerate(zip(names, new, shapes, strict=True)):
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"attention {slot}: {name} of shape {list(tensor.shape)}; expected {list(shape)}")
        if stored is not None and (tensor.dtype != stored[i].dtype or tensor.device != stored[i].device):
            raise ValueError(
                f"attention {slot}: {name} are {tensor.dtype} on {tensor.device}; the cache holds {stored[i].dtype} on "
                f"{stored[i].device}. Create the cache with the model's dtype and device"
            )
