"""Pages against the code: options and parameters of every mechanism, the API, and formulas that GitHub renders too."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import pytest

import depthmix as dm
from depthmix.mechanisms import kv_mechanism
from tools.site_requests import foreign_requests

DOCS = Path(__file__).parent.parent / "docs"
NAMES = [*dm.list_mechanisms(), *dm.list_mechanisms(kind="kv")]
MODULES = ("ops", "parallel", "training", "data", "studies", "hf")


def config_of(name: str) -> type:
    kv = name in dm.list_mechanisms(kind="kv")
    return (kv_mechanism if kv else dm.mechanism)(name).Config


def table(page: str, *header: str) -> list[list[str]]:
    """The cells of every table with this header."""
    lines = page.splitlines()
    rows = []
    for start, line in enumerate(lines):
        if line == f"| {' | '.join(header)} |":
            for row in lines[start + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append([cell.strip() for cell in row.strip("|").split("|")])
    assert all(len(row) == len(header) for row in rows), "a | inside a cell"
    return rows


def literals(cell: str) -> list[Any]:
    return [ast.literal_eval(code) for code in re.findall(r"`([^`]*)`", cell)]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_lists_every_option_with_its_values_and_its_default(name: str) -> None:
    rows = table((DOCS / "mechanisms" / f"{name}.md").read_text(), "option", "values", "default", "meaning")
    fields = {field.name: field for field in dataclasses.fields(config_of(name))}
    hints = typing.get_type_hints(config_of(name))
    assert [option.strip("`") for option, *_ in rows] == list(fields)
    for option, values, default, meaning in rows:
        key = option.strip("`")
        assert option == f"`{key}`"
        (stated,) = literals(default)
        assert (stated, type(stated)) == (fields[key].default, type(fields[key].default)), key
        if typing.get_origin(hints[key]) is typing.Literal:
            assert literals(values) == list(typing.get_args(hints[key])), key
        elif hints[key] is bool:
            assert literals(values) == [True, False], key
        else:
            assert (None in literals(values)) == (type(None) in typing.get_args(hints[key])), key
        assert meaning


@pytest.mark.parametrize("name", dm.list_mechanisms())
def test_a_page_lists_every_parameter_and_no_other(name: str) -> None:
    rows = table((DOCS / "mechanisms" / f"{name}.md").read_text(), "parameter", "where", "shape", "start")
    stated = {code for first, *_ in rows for code in re.findall(r"`(\w+)`", first)}
    stacks = [dm.DepthStack(name, dim=8, depth=4, **options) for options in dm.mechanism(name).variants]
    assert stated == {key.rsplit(".", 1)[1] for stack in stacks for key, _ in stack.named_parameters()}


def test_the_api_page_has_every_public_name_once() -> None:
    page = re.findall(r"^::: depthmix\.(.+)$", (DOCS / "api.md").read_text(), re.M)
    wanted = set(dm.__all__) - {"ops"} | {f"{m}.{name}" for m in MODULES for name in getattr(dm, m).__all__}
    wanted |= {f"analysis.plot.{name}" for name in dm.plot.__all__}
    assert sorted(page) == sorted(wanted)


def formulas(text: str) -> list[str]:
    """Formulas with a character on each side, so that their surroundings can be checked too."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
    text = re.sub(r"`[^`\n]*`", "", text)
    shown = re.findall(r"\n\$\$\n.*?\n\$\$\n", text, re.S)
    return [*shown, *re.findall(r"(?:^|.)\$[^$\n]+\$(?:.|$)", re.sub(r"\$\$.*?\$\$", "", text, flags=re.S), re.M)]


WRONG = {
    r"\\operatorname": r"GitHub forbids \operatorname: write \mathrm",
    r"\\[!-/:-@\[\]^_`{|}~]": "GitHub removes a backslash before punctuation: write a command with a name",
    r"\\\\(?!\n)": r"GitHub keeps \\ at the end of a line only",
    r"[|<]": r"write \lvert or \lt: tables end a cell at |, and < can begin a tag",
    r"[})\]]_": "GitHub can take _ after a bracket for emphasis: put the index first",
    r"^[\w-]\$|\$\w$": "GitHub takes $ beside a letter, a digit or - for a dollar",
    r"^.?\$ | \$.?$": "no space inside $…$",
}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_formulas_have_a_form_that_github_renders(page: Path) -> None:
    for formula in formulas(page.read_text()):
        for wrong, remedy in WRONG.items():
            assert not re.search(wrong, formula), f"{formula.strip()}: {remedy}"


@pytest.mark.parametrize("name", NAMES)
def test_a_mechanism_has_its_equations_typeset(name: str) -> None:
    page = (DOCS / "mechanisms" / f"{name}.md").read_text()
    assert any(formula.startswith("\n$$") for formula in formulas(page.split("## Options")[0]))


def test_links_of_the_top_folders_pages_are_rewritten_for_the_site() -> None:
    pytest.importorskip("mkdocs")
    from tools.site_pages import site_links

    assert site_links("[a](docs/a/b.md#c) [L](LOG.md)", "changelog.md") == "[a](a/b.md#c) [L](log.md)"
    assert site_links("[L](../LOG.md#x) [b](b.md)", "a.md") == "[L](log.md#x) [b](b.md)"
    assert site_links("[C](../../CHANGELOG.md)", "results/a.md") == "[C](../changelog.md)"
    kept = "[w](https://example.org/LOG.md) [h](#here)"
    assert site_links(kept, "a.md") == kept


def test_fields_in_docstrings_become_a_list() -> None:
    pytest.importorskip("griffe")
    from tools.docstring_fields import as_list

    assert as_list("What.\n\na: one\n    more\nb: two") == "What.\n\n- `a`: one\n    more\n- `b`: two"
    kept = "What it says: this.\n\nArgs:\n    a: one"
    assert as_list(kept) == kept


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<link rel="stylesheet" href="https://other.org/a.css">'),
        ("a.html", '<img src="//other.org/a.png">'),
        ("a.html", '<img srcset="a.png 1x, https://other.org/a.png 2x">'),
        ("a.html", "<p style=\"background: url('https://other.org/a.png')\">"),
        ("a.html", '<script>fetch("https://other.org/a.json")</script>'),
        ("a.html", "<style>@import 'https://other.org/a.css'</style>"),
        ("a.css", "@font-face { src: url(https://other.org/a.woff2) }"),
        ("a.js", "import(`https://other.org/${name}.js`)"),
        ("a.js", 'new Worker("//other.org/a.js")'),
        ("a.svg", '<svg><image xlink:href="https://other.org/a.png"/></svg>'),
    ],
)
def test_a_request_to_another_host_is_found(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    (request,) = foreign_requests(tmp_path)
    assert request.startswith(f"{name}: ")
    assert "//other.org/" in request


def test_links_and_files_of_the_site_are_no_requests_to_another_host(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://other.org">x</a><img src="a.png"><script src="../a.js"></script>'
    )
    (tmp_path / "a.js").write_text('make("http://www.w3.org/2000/svg"); fetch("a.json")//other')
    assert foreign_requests(tmp_path) == []
