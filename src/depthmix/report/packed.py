"""Plain JSON values, and arrays as base64 inside JSON: what the page of a report holds.

A packed array is {"shape", "dtype": "f32" | "f16" | "u8", "data": base64, little-endian}. NaN in it means "no value".
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

Dtype = Literal["f32", "f16", "u8"]
Packed = dict[str, Any]
NUMPY: dict[str, str] = {"f32": "<f4", "f16": "<f2", "u8": "u1"}
LARGEST_HALF = 6e4  # float16 ends at 65504


def pack(values: Any, dtype: Dtype = "f32") -> Packed:
    """An array for the page; one whose values do not fit float16 is stored as float32. Infinity becomes NaN."""
    array = np.asarray(values)
    if dtype != "u8":
        array = array.astype(np.float64)
        array = np.where(np.abs(array) <= np.finfo(np.float32).max, array, np.nan)
        if dtype == "f16" and np.abs(np.nan_to_num(array)).max(initial=0.0) > LARGEST_HALF:
            dtype = "f32"
    content = np.ascontiguousarray(array.astype(NUMPY[dtype]))
    return {"shape": list(array.shape), "dtype": dtype, "data": base64.b64encode(content.tobytes()).decode("ascii")}


def unpack(packed: Mapping[str, Any]) -> np.ndarray:
    """The array that `pack` stored, as float64."""
    data = base64.b64decode(packed["data"])
    return np.frombuffer(data, NUMPY[packed["dtype"]]).astype(np.float64).reshape(packed["shape"])


def plain(value: Any) -> Any:
    """Only what JSON can hold: a number that is not finite becomes None, anything unknown its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return str(value)


def thinned(count: int, most: int) -> list[int]:
    """At most `most` evenly spaced indices below `count`, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})


def mean(values: Sequence[float]) -> float:
    """Of the finite ones; NaN where there are none."""
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan
