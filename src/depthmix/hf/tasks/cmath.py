"""How an answer to a problem of CMath is read: by the value of its last number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

# 1,200 or -3.5 or 9/2 or 12%; not the 2 of cm2, nor the minus between 5-3.
NUMBER = re.compile(r"(?<![\da-zA-Z])-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")
FRACTIONS = (  # other spellings of 3/4
    (re.compile(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}"), r"\1/\2"),
    (re.compile(r"(\d+)\s*分之\s*(\d+)"), r"\2/\1"),
)


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The score of one problem, as the harness asks for it."""
    return {"exact_match": float(is_correct(str(doc["golden"]), results[0]))}


def is_correct(expected: str, answer: str) -> bool:
    """Whether both end with a number of the same value: 4.5, 4.50 and 9/2 are equal, 12% and 12 are not."""
    value = last_number(expected)
    return value is not None and value == last_number(answer)


def last_number(text: str) -> Fraction | None:
    """The value of the last number in a text; None if there is none, or none that has a value."""
    for spelling, plain in FRACTIONS:
        text = spelling.sub(plain, text)
    words = NUMBER.findall(text)
    if not words:
        return None
    over, _, under = words[-1].replace(",", "").rstrip("%").partition("/")
    try:
        value = Fraction(over) / int(under or 1)
    except (ValueError, ZeroDivisionError):  # thousands of digits, or a division by zero
        return None
    return value / 100 if words[-1].endswith("%") else value
