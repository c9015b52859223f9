"""The page of a report: one HTML file that needs nothing else, with the document inside."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from depthmix.support.files import read_text, write_text

PAGE = "page.html"
PLACE = '<script type="application/json" id="document">null</script>'


def write_page(document: dict[str, Any], target: Path, template: Path | None = None) -> int:
    """Write the page with `document` in it; returns its size in bytes. `template` replaces the installed page."""
    page = fill_page(read_template(template), document)
    write_text(target, page)
    return len(page.encode())


def read_template(template: Path | None = None) -> str:
    """The page without a document, built from `web/` into the package."""
    if template is not None:
        return read_text(template, "Choose another page")
    resource = files("depthmix.report").joinpath(PAGE)
    if not resource.is_file():
        raise FileNotFoundError(
            f"this installation has no report/{PAGE}. From a checkout, build it with `npm ci` and `npm run build` in "
            "web/; otherwise install depthmix again"
        )
    return resource.read_text(encoding="utf-8")


def fill_page(page: str, document: dict[str, Any]) -> str:
    if page.count(PLACE) != 1:
        raise ValueError(f"the page has {page.count(PLACE)} places for a document; expected one line {PLACE}")
    return page.replace(PLACE, PLACE.replace("null", to_json(document)))


def to_json(document: dict[str, Any]) -> str:
    """JSON that cannot end the script it stands in: no <, and nothing that is not ASCII as it is."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
