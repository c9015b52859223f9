"""Arrays and plain values inside JSON: what the page shows is kept, and what JSON cannot hold does not get in."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from depthmix.report.packed import mean, pack, plain, thinned, unpack


@pytest.mark.parametrize(("dtype", "error"), [("f32", 1e-7), ("f16", 1e-3)])
def test_an_array_comes_back_with_its_shape_and_its_gaps(dtype: str, error: float) -> None:
    values = np.linspace(-3, 3, 24).reshape(2, 3, 4)
    values[0, 1, 2] = np.nan
    packed = json.loads(json.dumps(pack(values, dtype)))  # type: ignore[arg-type]
    assert packed["shape"] == [2, 3, 4]
    assert packed["dtype"] == dtype
    back = unpack(packed)
    assert np.isnan(back).sum() == 1
    assert np.allclose(back, values, rtol=error, atol=error, equal_nan=True)


def test_bytes_are_little_endian_whatever_the_array_was() -> None:
    assert pack(np.array([1.0], ">f8"))["data"] == "AACAPw=="  # 00 00 80 3f
    assert unpack(pack([[0, 255]], "u8")).tolist() == [[0.0, 255.0]]


def test_numbers_too_large_for_float16_are_kept_as_float32() -> None:
    assert pack([1e5, math.nan], "f16")["dtype"] == "f32"
    assert unpack(pack([1e5], "f16")).tolist() == [1e5]


def test_infinity_becomes_no_value() -> None:
    assert np.isnan(unpack(pack([math.inf, -math.inf, 1e300]))).all()
    assert pack([math.inf], "f16")["dtype"] == "f16"


def test_an_empty_array_keeps_its_shape() -> None:
    assert unpack(pack(np.zeros((0, 3, 3)), "f16")).shape == (0, 3, 3)


def test_plain_values_are_valid_json_without_nan() -> None:
    found = plain({"a": [math.nan, math.inf, 1.5], 2: (np.float32(3.0), np.int64(4), None), "p": {"x": True}})
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "a": [None, None, 1.5],
        "2": [3.0, 4, None],
        "p": {"x": True},
    }


def test_thinning_keeps_the_ends_and_even_steps() -> None:
    assert thinned(5, 9) == [0, 1, 2, 3, 4]
    kept = thinned(1000, 64)
    assert (kept[0], kept[-1], len(kept)) == (0, 999, 64)
    assert set(np.diff(kept)) <= {15, 16}


def test_a_mean_leaves_gaps_out() -> None:
    assert mean([1.0, math.nan, 3.0]) == 2.0
    assert math.isnan(mean([]))
