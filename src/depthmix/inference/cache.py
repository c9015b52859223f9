"""Keys and values of earlier tokens; the values as attention reads them, mixed over depth where the model does so.

Axes: B batch, K key-value head, T new token, S column (a place in the cache; common to the batch), d channel of a head.

Padding takes up a column and no position, and nobody but itself sees it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from depthmix.models import DecoderConfig
from depthmix.support.checks import check_memory


class DynamicCache:
    """A cache that grows with each call, by concatenation. It learns batch, layers, dtype and device from the first."""

    capacity: int | None = None  # no end

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.length = 0
        self.batch: int | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.valid: Tensor | None = None  # [B, S]; None: no padding so far
        self.new = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def place(self, tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        batch, count = tokens.shape
        check_batch(batch, self.batch)
        if any(tensor.shape[2] != self.length for tensor in (*self.keys, *self.values)):
            raise ValueError(
                f"the cache holds {[k.shape[2] for k in self.keys]} columns in its layers; expected {self.length} in "
                "each. A forward pass ended halfway, or the model has fewer layers than the one before: call reset()"
            )
        before, after = self.length, self.length + count
        self.batch, self.length, self.new = batch, after, count
        columns = torch.arange(before, after, device=tokens.device)
        if valid is None and self.valid is None:
            # Causal, or one token that sees all: attention needs no mask.
            mask = None if before == 0 or count == 1 else visible(columns, after, None)
            return columns.expand(batch, count), mask
        known = [
            tokens.new_ones((batch, n), dtype=torch.bool) if part is None else part.bool()
            for part, n in ((self.valid, before), (valid, count))
        ]
        self.valid = torch.cat(known, 1)
        positions = (self.valid.long().cumsum(1) - 1).clamp(min=0)
        return positions[:, before:], visible(columns, after, self.valid)

    def put(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first = self.length == self.new
        if first and slot == len(self.keys):
            check_pair(slot, k, v, (self.batch, k.shape[1], self.new, k.shape[3]))
            self.keys.append(k)
            self.values.append(v)
            return k, v
        if slot >= len(self.keys):
            raise ValueError(
                f"attention {slot} writes to a cache of {len(self.keys)} layers; expected one that this model began, "
                "or an empty one: call reset()"
            )
        _, heads, _, width = self.keys[slot].shape
        check_pair(slot, k, v, (self.batch, heads, self.new, width), self.keys[slot], self.values[slot])
        self.keys[slot] = torch.cat([self.keys[slot], k], 2)
        self.values[slot] = torch.cat([self.values[slot], v], 2)
        return self.keys[slot], self.values[slot]


class PreallocatedCache:
    """A cache of `capacity` columns, written in place at a column that is held in a tensor.

    A decode step is therefore one graph for all steps: under `torch.compile` no number of Python takes part that
    changes from step to step, and attention runs over all columns with a mask. Outside of it, attention reads only the
    columns that are filled.

    Args:
        config: of the model; an attention that is looped has a slot for each execution.
        batch: sequences.
        capacity: columns: tokens with their padding.
        dtype: of keys and values, that is of the model's parameters.
        device: where the model is.
    """

    def __init__(
        self,
        config: DecoderConfig,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("batch", batch), ("capacity", capacity)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}; expected a whole number, at least 1")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype}; expected a floating one, that of the model")
        self.batch, self.capacity = batch, capacity
        self.shape = (batch, config.num_kv_heads, capacity, config.width)
        slots = range(len(config.layer_order))
        size = 2 * len(slots) * math.prod(self.shape) * dtype.itemsize
        check_memory(f"keys and values of batch={batch} × capacity={capacity}", size, "Ask for fewer tokens at once")
        self.keys = [torch.zeros(self.shape, dtype=dtype, device=device) for _ in slots]
        self.values = [torch.zeros(self.shape, dtype=dtype, device=device) for _ in slots]
        self.valid = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        self.filled = torch.zeros((), dtype=torch.int64, device=device)  # columns in use
        self.count = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # tokens without padding
        self.columns = torch.zeros(0, dtype=torch.int64, device=device)  # of the new tokens
        self.seen = 0  # columns that attention reads
        self.padded = False

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        for tensor in (self.valid, self.filled, self.count):
            tensor.zero_()
        self.padded = False

    def rewind(self, length: int) -> None:
        """Keep the first `length` columns and forget the others, as after tokens that were tried and refused."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length={length}; expected 0 to {self.length}, the columns in use")
        self.valid[:, length:] = False
        self.filled.fill_(length)
        self.count.copy_(self.valid.sum(1, keepdim=True))

    @property
    def length(self) -> int:
        """Columns in use."""
        return int(self.filled)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def place(self, tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        batch, count = tokens.shape
        check_batch(batch, self.batch)
        if tokens.device != self.filled.device:
            raise ValueError(f"tokens on {tokens.device} and a cache on {self.filled.device}; expected the same device")
        # A look at the length would bind a compiled step to its value, and makes other devices wait.
        known = not torch.compiler.is_compiling() and (count > 1 or tokens.device.type == "cpu")
        before = self.length if known else 0
        if before + count > self.capacity:
            raise ValueError(
                f"{before} columns in use and {count} new tokens; expected at most {self.capacity}, the capacity of "
                "the cache. Make a larger one, or call reset()"
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

    def put(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if slot >= len(self.keys):
            raise ValueError(
                f"attention {slot} writes to a cache of {len(self.keys)} layers; was it made for this model?"
            )
        keys, values = self.keys[slot], self.values[slot]
        batch, heads, _, width = self.shape
        check_pair(slot, k, v, (batch, heads, self.columns.shape[0], width), keys, values)
        keys.index_copy_(2, self.columns, k)
        values.index_copy_(2, self.columns, v)
        return keys[:, :, : self.seen], values[:, :, : self.seen]


def visible(columns: Tensor, seen: int, valid: Tensor | None) -> Tensor:
    """Who sees what, [B or 1, 1, T, S]: columns up to its own that hold no padding, and always its own."""
    all_columns = torch.arange(seen, device=columns.device)
    sees = (all_columns <= columns[:, None])[None]
    if valid is not None:
        sees = (sees & valid[:, None, :]) | (all_columns == columns[:, None])
    return sees[:, None]


def check_batch(batch: int, expected: int | None) -> None:
    if expected is not None and batch != expected:
        raise ValueError(f"a batch of {batch} and a cache for {expected}; expected the same. Make another cache")


def check_pair(
    slot: int,
    k: Tensor,
    v: Tensor,
    shape: tuple[int | None, ...],
    keys: Tensor | None = None,
    values: Tensor | None = None,
) -> None:
    """Refuse what would broadcast, or be rounded, in silence."""
    for name, tensor, stored in (("keys", k, keys), ("values", v, values)):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"attention {slot}: {name} of shape {list(tensor.shape)}; expected {list(shape)}")
        if stored is not None and (tensor.dtype != stored.dtype or tensor.device != stored.device):
            raise ValueError(
                f"attention {slot}: {name} are {tensor.dtype} on {tensor.device}; the cache holds {stored.dtype} on "
                f"{stored.device}. Make it with the model's dtype and device"
            )
