"""Every name of depthmix that a page mentions is there after `import depthmix as dm`, and nothing more is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"(?<![\w./-])(?:dm|depthmix)((?:\.[A-Za-z_]\w*)+)(?!\w*[/=])")
RESOLVE = """
import functools, os, sys
import depthmix as dm

for name in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:  # a child for each: what one name imports is no help to the next
        try:
            functools.reduce(getattr, name.split("."), dm)
        except AttributeError as error:
            print(f"dm.{name}: {error}", flush=True)
        os._exit(0)
    os.wait()
assert "matplotlib" not in sys.modules
"""


def documented() -> dict[str, str]:
    """Names without their first part, and a page that mentions each."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {match[1][1:]: page.name for page in pages for match in NAME.finditer(page.read_text())}


def test_every_documented_name_resolves() -> None:
    names = documented()
    assert {"analysis.figures.heat_map", "training", "mechanisms.ddl.readout_matrix", "Decoder"} <= names.keys()
    done = subprocess.run([sys.executable, "-c", RESOLVE, *names], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, "trainin", "analysis.figure", "mechanisms.dll", "ops.figures", "training"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        *("dm.trainin", "dm.analysis.figure", "dm.mechanisms.dll", "dm.ops.figures")
    ]
