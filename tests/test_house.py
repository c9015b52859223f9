"""The house: floors import from floors below them only, importing is light, pages and examples are true."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import depthmix as dm
from depthmix.cli.show import equations
from depthmix.mechanisms import kv_mechanism
from tools import draw_house, import_graph
from tools.site_requests import foreign_requests

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "depthmix"
KNOWN = import_graph.modules()
IMPORTS = import_graph.read_imports()


def test_a_floor_imports_from_the_floors_below_it_only() -> None:
    assert len(IMPORTS) > 500
    assert [str(i) for i in import_graph.upward(IMPORTS, KNOWN)] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert import_graph.cycles(IMPORTS) == []


def test_public_names_of_a_floor_are_imported_from_the_floor() -> None:
    assert [str(i) for i in import_graph.crossings(IMPORTS, KNOWN)] == []


def test_every_folder_is_a_floor() -> None:
    folders = {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= set(import_graph.FLOORS)


def test_the_picture_of_the_house_is_up_to_date() -> None:
    for path, text in draw_house.render(draw_house.PAGE.read_text()).items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} is out of date: run `make house`"


def house_of(folder: Path, files: dict[str, str]) -> tuple[list[import_graph.Import], dict[str, Path]]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return import_graph.read_imports(folder), import_graph.modules(folder)


def test_broken_rules_are_found_inside_functions_and_texts_too(tmp_path: Path) -> None:
    imports, known = house_of(
        tmp_path,
        {
            "__init__.py": "from depthmix import ops",
            "ops/__init__.py": "from depthmix.ops.sums import total\n__all__ = ['total']",
            "ops/sums.py": "def total():\n    from depthmix.models import decoder",
            "ops/names.py": "HOME = 'depthmix.ops.other:Other'",
            "ops/other.py": "from depthmix.ops import names",
            "models/__init__.py": "",
            "models/decoder.py": "from depthmix.ops.sums import total\nimport depthmix",
            "models/types.py": "if TYPE_CHECKING:\n    from depthmix.models.checked import Checked",
            "models/checked.py": "from depthmix.models import types",
        },
    )
    assert [(i.importer, i.target) for i in import_graph.upward(imports, known)] == [
        ("depthmix.models.decoder", "depthmix"),
        ("depthmix.ops.sums", "depthmix.models.decoder"),
    ]
    assert [(i.importer, i.name) for i in import_graph.crossings(imports, known)] == [
        ("depthmix.models.decoder", "total")
    ]
    assert import_graph.cycles(imports) == [
        ["depthmix", "depthmix.models.decoder", "depthmix.ops", "depthmix.ops.sums"],
        ["depthmix.ops.names", "depthmix.ops.other"],
    ]


def test_importing_depthmix_imports_nothing_beyond_torch() -> None:
    code = "import torch, sys; before = set(sys.modules); import depthmix; print(*sorted(set(sys.modules) - before))"
    added = run(code).split()
    outside = {name.split(".")[0] for name in added} - {"depthmix"} - set(sys.stdlib_module_names)
    assert outside <= {"torch"}
    assert "depthmix.mechanisms.attnres" not in added, "mechanisms are imported when they are asked for"


def test_importing_depthmix_adds_at_most_a_tenth_to_torch() -> None:
    # With bytecode, as pip installs it: the first run writes what is missing, and compiling takes as long as importing.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-X", "importtime", "-c", "import depthmix"]
    shares = []
    for _ in range(3):
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stderr
        times = {m[2]: int(m[1]) for m in re.finditer(r"import time:\s*\d+ \|\s*(\d+) \| +(\S+)", out)}
        shares.append((times["depthmix"] - times["torch"]) / times["torch"])
    assert min(shares) <= 0.10, f"adds {min(shares):.0%}"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", dm.list_mechanisms())
def test_every_mechanism_has_its_page_its_reference_and_its_equations(name: str) -> None:
    assert (ROOT / "docs" / "mechanisms" / f"{name}.md").is_file()
    assert (ROOT / "tests" / "reference" / f"{name}.py").is_file()
    assert f"({name}.md)" in (ROOT / "docs" / "mechanisms" / "index.md").read_text()
    forms = {dm.mechanism(name).resolve(dm.mechanism(name).Config(**o)) for o in dm.mechanism(name).variants}
    for cls in forms:
        found = equations(cls)
        assert found
        for row in found:
            assert row["code"], f"{cls.__name__}: equation ({row['mark']}) has no line of code"
        assert cls.paper
        assert cls.holds
        assert cls.rank_formula
        assert cls.parameters_formula


@pytest.mark.parametrize("name", dm.list_mechanisms())
def test_a_page_names_every_option_and_parameter(name: str) -> None:
    pages = ROOT / "docs" / "mechanisms"
    page = (pages / f"{name}.md").read_text()
    for options in dm.mechanism(name).variants:
        stack = dm.DepthStack(name, dim=8, depth=4, **options)
        words = {n.rsplit(".", 1)[1] for n, _ in stack.named_parameters()} | set(vars(stack.config))
        for word in words:
            assert f"`{word}`" in page, f"{name}.md does not name `{word}`"


@pytest.mark.parametrize("name", dm.list_mechanisms())
def test_variants_reach_every_choice_of_every_option(name: str) -> None:
    """What the class names as its variants is what all tests run over: it must leave nothing out."""
    import typing

    cls = dm.mechanism(name)
    hints = typing.get_type_hints(cls.Config)
    for field in dataclasses.fields(cls.Config):
        seen = {v.get(field.name, field.default) for v in cls.variants}
        hint = hints[field.name]
        if typing.get_origin(hint) is typing.Literal:
            assert seen == set(typing.get_args(hint)), field.name
        elif hint is bool:
            assert seen == {True, False}, field.name
        elif hint is not float and "eps" not in field.name:
            assert len(seen) > 1, field.name


@pytest.mark.parametrize("name", dm.list_mechanisms(kind="kv"))
def test_every_value_mixer_has_its_page_its_reference_and_its_equations(name: str) -> None:
    cls = kv_mechanism(name)
    page = (ROOT / "docs" / "mechanisms" / f"{name}.md").read_text()
    assert (ROOT / "tests" / "reference" / f"{name}.py").is_file()
    assert f"({name}.md)" in (ROOT / "docs" / "mechanisms" / "index.md").read_text()
    assert equations(cls)
    assert all(row["code"] for row in equations(cls))
    assert cls.paper
    assert cls.holds
    for field in dataclasses.fields(cls.Config):
        assert f"`{field.name}`" in page, field.name


def test_files_stay_about_one_screen() -> None:
    for file in SOURCE.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 400, file
    for file in (SOURCE / "mechanisms").glob("*.py"):
        if file.stem in dm.list_mechanisms():
            assert len(file.read_text().splitlines()) <= 260, file


def test_public_functions_say_what_they_do() -> None:
    for name in dm.__all__:
        thing = getattr(dm, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert inspect.getdoc(thing) or name == "State", name


def test_the_pages_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout + done.stderr == ""
    assert 'class="arithmatex"' in (site / "mechanisms" / "attnres" / "index.html").read_text()
    assert "<h1" in (site / "changelog" / "index.html").read_text()
    api = (site / "api" / "index.html").read_text()
    for name in set(dm.__all__) - {"ops"}:
        assert f'id="depthmix.{name}"' in api, name
    assert len(list(site.rglob("*.js"))) > 3
    assert foreign_requests(site) == []


def test_the_demo_draws_a_picture_of_every_mechanism(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "mixing_matrices.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in [*dm.list_mechanisms(), *dm.list_mechanisms(kind="kv")]:
        picture = (tmp_path / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 5000
        assert re.search(rf"^{name} +(\d+|operator) ", done.stdout, re.M)
        trace = dm.Trace.load(tmp_path / f"{name}.safetensors")
        assert trace.mechanism == name or trace.values is not None
    assert (tmp_path / "all.png").read_bytes()[16:20] == (1800).to_bytes(4, "big"), "twice the width of a README"
    assert not list(tmp_path.glob(".*"))
    assert not list(tmp_path.glob("*.part"))


def test_the_picture_of_all_mechanisms_leaves_none_out() -> None:
    from examples.mixing_matrices import FAMILIES

    drawn = [name for *_, names in FAMILIES for name in names]
    assert sorted(drawn) == sorted(dm.list_mechanisms() + dm.list_mechanisms(kind="kv"))


def test_the_version_is_in_the_changelog() -> None:
    assert f"## {dm.__version__}" in (ROOT / "CHANGELOG.md").read_text()
