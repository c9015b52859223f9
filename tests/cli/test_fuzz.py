"""Every command line ends with an exit code and a message, whatever was typed and whatever became of the files.

A line follows from its number: `python -m tests.fuzz NUMBER` runs it again and shows all that it printed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fuzz

BLOCK = 25  # lines of a test
FEW, MANY = 300, 10_000


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    fuzz.make_samples(folder)
    return folder


BLOCKS = [
    pytest.param(first, marks=() if first < FEW else pytest.mark.full, id=f"{first}-{first + BLOCK - 1}")
    for first in range(0, MANY, BLOCK)
]


@pytest.mark.parametrize("first", BLOCKS)
def test_every_line_ends_with_a_code_and_a_message(first: int, samples: Path) -> None:
    problems = [str(outcome) for outcome in fuzz.run_lines(range(first, first + BLOCK), samples) if outcome.problem]
    assert not problems, "\n\n".join(problems)


def test_lines_reach_every_verb_and_every_option() -> None:
    lines = [fuzz.make_line(number) for number in range(2000)]
    for verb, options in fuzz.OPTIONS.items():
        typed = {word for line in lines if line.words[0] == verb for word in line.words}
        assert {option.flag for option in options if option.flag} <= typed, verb


def test_lines_get_to_the_end_of_every_verb(samples: Path) -> None:
    """Else only the parser would be tried: one of the first lines of each verb succeeds."""
    verbs = list(fuzz.OPTIONS)
    for place, verb in enumerate(verbs):
        numbers = range(place, 2 * FEW, len(verbs))
        assert any(outcome.code == 0 for outcome in fuzz.run_lines(numbers, samples)), verb


def test_a_line_is_the_same_every_time() -> None:
    assert [fuzz.make_line(number) for number in range(50)] == [fuzz.make_line(number) for number in range(50)]
