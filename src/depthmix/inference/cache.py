"""Caches of the keys and values of earlier tokens. Values are stored after depth mixing, as attention reads them.

Axes: B batch, K key-value head, T new token, S column (a slot of the cache, for the whole batch), d channel of a head.

Padding occupies a column but no position, and only the padding token itself attends to it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from depthmix.models import DecoderConfig
from depthmix.support.checks import check_memory


class DynamicCache:
    """A cache that grows by concatenation. The first call determines batch size, layers, dtype and device."""

    capacity: int | None = None  # no limit

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all tokens."""
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
                f"the layers of the cache hold {[k.shape[2] for k in self.keys]} columns; expected {self.length} in "
                "each. A forward pass was interrupted, or the previous model had more layers: call reset()"
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

    def put(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first = self.length == self.new
        if first and slot == len(self.keys):
            check_pair(slot, k, v, (self.batch, k.shape[1], self.new, k.shape[3]))
            self.keys.append(k)
            self.values.append(v)
            return k, v
        if slot >= len(self.keys):
            raise ValueError(
                f"attention {slot} writes to a cache of {len(self.keys)} layers; expected a cache filled by this "
                "model, or an empty one: call reset()"
            )
        _, heads, _, width = self.keys[slot].shape
        check_pair(slot, k, v, (self.batch, heads, self.new, width), self.keys[slot], self.values[slot])
        self.keys[slot] = torch.cat([self.keys[slot], k], 2)
        self.values[slot] = torch.cat([self.values[slot], v], 2)
        return self.keys[slot], self.values[slot]


class PreallocatedCache:
    """A cache of `capacity` columns, written in place at an index that is held in a tensor.

    One compiled graph therefore serves all decode steps: under `torch.compile` no Python number changes from step to
    step, and attention runs over all columns with a mask. Without `torch.compile`, attention reads only the filled
    columns.

    Args:
        config: configuration of the model; a looped attention layer has a slot for each execution.
        batch: number of sequences.
        capacity: number of columns, for tokens and their padding.
        dtype: dtype of keys and values, that of the model's parameters.
        device: device of the model.
        kv_heads: key-value heads of this process; None: all.
        slots: executions of attention layers on this process; None: all.
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
    ) -> None:
        for name, value in (("batch", batch), ("capacity", capacity)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}; expected a whole number of at least 1")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype}; expected a floating-point dtype, that of the model")
        self.batch, self.capacity = batch, capacity
        self.shape = (batch, config.num_kv_heads if kv_heads is None else kv_heads, capacity, config.width)
        layers = range(len(config.layer_order) if slots is None else slots)
        size = 2 * len(layers) * math.prod(self.shape) * dtype.itemsize
        check_memory(
            f"keys and values of batch={batch} × capacity={capacity}", size, "Use a smaller batch or fewer tokens"
        )
        self.keys = [torch.zeros(self.shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(self.shape, dtype=dtype, device=device) for _ in layers]
        self.valid = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        self.filled = torch.zeros((), dtype=torch.int64, device=device)  # columns in use
        self.count = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # tokens without padding
        self.columns = torch.zeros(0, dtype=torch.int64, device=device)  # columns of the new tokens
        self.seen = 0  # columns that attention reads
        self.padded = False

    def reset(self) -> None:
        """Remove all tokens; the memory stays allocated."""
        for tensor in (self.valid, self.filled, self.count):
            tensor.zero_()
        self.padded = False

    def rewind(self, length: int) -> None:
        """Keep the first `length` columns and remove the others, for example after rejected speculative tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length={length}; expected 0 to {self.length}, the number of columns in use")
        self.valid[:, length:] = False
        self.filled.fill_(length)
        self.count.copy_(self.valid.sum(1, keepdim=True))

    @property
    def length(self) -> int:
        """Number of columns in use."""
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

    def put(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if slot >= len(self.keys):
            raise ValueError(
                f"attention {slot} writes to a cache of {len(self.keys)} layers; expected a cache made for this model"
            )
        keys, values = self.keys[slot], self.values[slot]
        batch, heads, _, width = self.shape
        check_pair(slot, k, v, (batch, heads, self.columns.shape[0], width), keys, values)
        keys.index_copy_(2, self.columns, k)
        values.index_copy_(2, self.columns, v)
        return keys[:, :, : self.seen], values[:, :, : self.seen]


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


def check_pair(
    slot: int,
    k: Tensor,
    v: Tensor,
    shape: tuple[int | None, ...],
    keys: Tensor | None = None,
    values: Tensor | None = None,
) -> None:
    """Reject keys and values that would be silently broadcast or rounded."""
    for name, tensor, stored in (("keys", k, keys), ("values", v, values)):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"attention {slot}: {name} of shape {list(tensor.shape)}; expected {list(shape)}")
        if stored is not None and (tensor.dtype != stored.dtype or tensor.device != stored.device):
            raise ValueError(
                f"attention {slot}: {name} are {tensor.dtype} on {tensor.device}; the cache holds {stored.dtype} on "
                f"{stored.device}. Create the cache with the model's dtype and device"
            )
