"""The versions of transformers that the floor is written for."""

from __future__ import annotations

import re

from depthmix.support.checks import import_package

LEAST, BELOW = (5, 8, 1), (6,)
INSTALL = "'depthmix[hf]'"


def check_transformers() -> None:
    """Raise an error that names the extra if transformers is missing or has another version."""
    found = import_package("transformers", "depthmix.hf", INSTALL).__version__
    if not LEAST <= tuple(int(number) for number in re.findall(r"\d+", found)[:3]) < BELOW:
        raise ImportError(
            f"transformers {found} is installed; depthmix.hf needs 5.8.1 or newer, below 6: pip install {INSTALL}"
        )
