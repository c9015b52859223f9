"""An extension of griffe: paragraphs of `name: meaning` lines in a docstring, as dataclasses have them, as lists."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

FIELD = re.compile(r"^(\w+): ", re.M)


def as_list(docstring: str) -> str:
    """Only paragraphs that begin in the first column: sections such as Args are indented and have their own form."""
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(
        FIELD.sub(r"- `\1`: ", text)
        if all(FIELD.match(line) or line.startswith("    ") for line in text.splitlines())
        else text
        for text in paragraphs
    )


class Fields(Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_list(obj.docstring.value)
