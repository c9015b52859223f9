"""What a built site would load from other hosts when it is viewed: `python -m tools.site_requests site` must find none.

Links that a reader may click do not count. In scripts every absolute address in quotes counts, whatever its use.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

CLICKED = {"a", "area"}
LOADED = {"background", "data", "href", "poster", "src", "srcset", "xlink:href"}
ADDRESS = re.compile(r"(?:[a-z]+:)?//[^\s,]+", re.I)
STYLE = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^\s"')]+)""", re.I)
# A quote can also end before a comment, so an address without a scheme needs a dot. w3.org: names of XML dialects.
SCRIPT = re.compile(r"""["'`]((?:(?:https?|wss?)://(?!www\.w3\.org/)|//[\w-]+\.)[^\s"'`]+)""", re.I)


class Page(HTMLParser):
    """Addresses that HTML or SVG loads, with its inline styles and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        values = {name: value or "" for name, value in attrs}
        self.found += STYLE.findall(values.get("style", ""))
        if tag not in CLICKED and values.get("rel") != "canonical":
            self.found += [a for name in LOADED & values.keys() for a in ADDRESS.findall(values[name])]

    def handle_data(self, data: str) -> None:
        if self.inside in ("script", "style"):
            self.found += (SCRIPT if self.inside == "script" else STYLE).findall(data)

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""


READERS = {
    ".html": lambda text: Page(text).found,
    ".svg": lambda text: Page(text).found,
    ".css": STYLE.findall,
    ".js": SCRIPT.findall,
}


def foreign_requests(site: Path) -> list[str]:
    """`file: address` for each."""
    files = sorted(path for path in site.rglob("*") if path.suffix in READERS)
    return [f"{path.relative_to(site)}: {a}" for path in files for a in READERS[path.suffix](path.read_text())]


if __name__ == "__main__":
    if requests := foreign_requests(Path(sys.argv[1])):
        sys.exit("the site loads from other hosts:\n" + "\n".join(requests))
