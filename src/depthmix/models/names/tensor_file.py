"""A safetensors file that is written tensor by tensor, so that its content need not be in memory at once."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# The names of the format, in its own order: wide numbers first, so that every tensor is aligned.
CODES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"},
    torch.uint8: "U8",
}


class Entry(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """The header is written at once; `put` fills in the tensors, in any order.

    The bytes are those that safetensors writes for the same tensors.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        if sys.byteorder != "little":
            raise NotImplementedError("safetensors files are little-endian; expected a little-endian machine")
        self.entries, self.offsets, self.written = entries, {}, 0
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ranks = {dtype: rank for rank, dtype in enumerate(CODES)}
        end = 0
        for name in sorted(entries, key=lambda name: (ranks[entries[name].dtype], name)):
            dtype, shape = entries[name]
            self.offsets[name], end = end, end + entries[name].nbytes
            header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": (self.offsets[name], end)}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.start, self.size = 8 + len(text), end
        self.file = path.open("wb")
        self.file.write(len(text).to_bytes(8, "little") + text)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.file.close()
        if kind is None and self.written != self.size:
            raise AssertionError(f"{self.written} of {self.size} bytes were written")

    def put(self, name: str, tensor: Tensor, part: int | None = None) -> None:
        """Write a tensor; with `part`, row `part` of it."""
        dtype, shape = self.entries[name]
        own = shape if part is None else shape[1:]
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, own):
            raise AssertionError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(own)}")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self.file.seek(self.start + self.offsets[name] + (part or 0) * data.nbytes)
        self.file.write(data.data)
        self.written += data.nbytes
