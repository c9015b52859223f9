"""How text reaches a terminal: as it is. Names from files and from users may hold what looks like markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def console(*, stderr: bool = False) -> Console:
    """Prints tables, titles and texts without reading markup, emoji codes or highlights into them."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Text of which some parts, given as (text, style), have a style."""
    from rich.text import Text

    return Text.assemble(*parts)
