"""Draw the floors of depthmix into docs: `make house` rewrites docs/images/house.svg and the table of docs/house.md.

The picture is written as text, so that it is the same on every machine and a change of an import shows in a diff.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from html import escape
from pathlib import Path

from tools.import_graph import FLOORS, ROOT, TOP, counts, floor_of, modules, read_imports

PAGE = ROOT / "docs" / "house.md"
PICTURE = ROOT / "docs" / "images" / "house.svg"
BEGIN, END = "<!-- made by `make house` -->", "<!-- end -->"
ROW, GAP, LANE, LEFT, MARGIN = 34, 16, 21, 128, 10  # pixels
COLOURS = ("#4477aa", "#228833", "#aa3377", "#997700", "#cc3311", "#006688", "#774499", "#555555")

Edges = Mapping[tuple[str, str], int]


def describe(source: Path) -> dict[str, str]:
    """Each floor that has a folder, from the top to the bottom, with the first line that its `__init__` says."""
    floors = {}
    for floor in reversed(FLOORS):
        file = source / ("" if floor == TOP else floor) / "__init__.py"
        if file.is_file():
            floors[floor] = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
    return floors


def label(floor: str) -> str:
    return "depthmix" if floor == TOP else f"{floor}/"


def draw(floors: list[str], edges: Edges) -> str:
    """A row for each floor; each arrow has a column of its own, and its number of imported names at its start."""
    ordered = sorted(edges, key=lambda edge: (floors.index(edge[0]), floors.index(edge[1])))
    width = LEFT + LANE * len(ordered) + 2 * MARGIN
    top = {floor: MARGIN + k * (ROW + GAP) for k, floor in enumerate(floors)}
    height = MARGIN + len(floors) * (ROW + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for floor in floors:
        lines += [
            f'<rect x="{MARGIN}" y="{top[floor]}" width="{width - 2 * MARGIN}" height="{ROW}" rx="4" fill="#eef1f4"/>',
            f'<text x="{MARGIN + 10}" y="{top[floor] + 22}" font-size="15" font-weight="bold">{label(floor)}</text>',
        ]
    for k, (importer, target) in enumerate(ordered):
        x, colour = LEFT + LANE // 2 + k * LANE, COLOURS[floors.index(importer) % len(COLOURS)]
        lines += arrow(x, top[importer] + ROW, top[target] + 8, colour)
        title = f"{label(importer)} imports {edges[importer, target]} names from {label(target)}"
        lines.append(
            f'<text x="{x}" y="{top[importer] + 23}" font-size="11" text-anchor="middle" fill="{colour}">'
            f"<title>{escape(title)}</title>{edges[importer, target]}</text>"
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def arrow(x: int, begin: int, end: int, colour: str) -> list[str]:
    return [
        f'<line x1="{x}" y1="{begin - 7}" x2="{x}" y2="{end - 6}" stroke="{colour}" stroke-width="1.5"/>',
        f'<path d="M{x - 4} {end - 7} L{x + 4} {end - 7} L{x} {end} Z" fill="{colour}"/>',
    ]


def table(floors: Mapping[str, str], files: Mapping[str, int], edges: Edges) -> str:
    rows = ["| floor | what it holds | files | imports from |", "|---|---|---:|---|"]
    for floor, line in floors.items():
        targets = [f"{other} {edges[floor, other]}" for other in floors if (floor, other) in edges]
        rows.append(f"| `{label(floor)}` | {line} | {files[floor]} | {', '.join(targets)} |")
    return "\n".join(rows)


def render(page: str) -> dict[Path, str]:
    """The two files as they should be; of the page only what stands between the marks is made here."""
    known = modules()
    floors, edges = describe(ROOT / "src" / "depthmix"), counts(read_imports(), known)
    files = Counter(floor_of(module, known) for module in known)
    before, rest = page.split(BEGIN)
    middle = f"{BEGIN}\n\n{table(floors, files, edges)}\n\n{END}"
    return {PICTURE: draw([*floors], edges), PAGE: before + middle + rest.split(END)[1]}


if __name__ == "__main__":
    for path, text in render(PAGE.read_text()).items():
        path.write_text(text)
        print(path.relative_to(ROOT))
