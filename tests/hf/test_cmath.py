"""How answers to problems of CMath are read."""

from __future__ import annotations

from fractions import Fraction

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from depthmix.hf.tasks.cmath import is_correct, last_number, process_results


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9", 9),
        ("答案是12。", 12),
        ("99-90=9（页）", 9),
        ("5-3", 3),
        ("气温是-3℃", -3),
        ("一共1,200米", 1200),
        ("3，4，5", 5),
        ("4.50元", Fraction(9, 2)),
        ("占3/4", Fraction(3, 4)),
        ("占4分之3", Fraction(3, 4)),
        (r"$\frac{3}{4}$", Fraction(3, 4)),
        ("12.5%", Fraction(1, 8)),
        ("面积是30cm2", 30),
        ("１２", 12),
        ("7.", 7),
    ],
)
def test_the_last_number_of_a_text_counts(text: str, value: Fraction | int) -> None:
    assert last_number(text) == value


@pytest.mark.parametrize("text", ["", "不知道", "1/0", "9" * 5000 + "/" + "0", "cm2"])
def test_a_text_without_a_value_has_none(text: str) -> None:
    assert last_number(text) is None
    assert not is_correct(text, text)


@pytest.mark.parametrize(
    ("golden", "answer", "score"),
    [("9", " 9", 1), ("9", "99-90=9\n", 1), ("4.5", "9/2", 1), ("12", "12%", 0), ("0.12", "12%", 1), ("9", "", 0)],
)
def test_the_score_compares_values(golden: str, answer: str, score: float) -> None:
    assert process_results({"question": "?", "golden": golden}, [answer]) == {"exact_match": score}
