"""Without a usable transformers, depthmix works, and `depthmix.hf` says what to install."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from depthmix.hf.version import check_transformers

REASON = "transformers {} is installed; depthmix.hf needs 5.8.1 or newer, below 6: pip install 'depthmix[hf]'"
CODE = """
import sys
sys.path.insert(0, sys.argv[1])
import depthmix
from transformers.models.auto import configuration_auto
assert configuration_auto.ran
try:
    import depthmix.hf
except ImportError as error:
    print("error:", error)
"""


def test_without_transformers_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match=r"depthmix.hf needs .* transformers: pip install 'depthmix\[hf\]'"):
        check_transformers()


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("4.57.6", False), ("5.8.0", False), ("5.8.1", True), ("5.23.0", True), ("5.30.0.dev0", True), ("6.0.0", False)],
)
def test_versions_are_compared_by_number(version: str, accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    if accepted:
        check_transformers()
    else:
        with pytest.raises(ImportError) as caught:
            check_transformers()
        assert str(caught.value) == REASON.format(version)


def test_another_version_of_transformers_can_be_used_and_is_named(tmp_path: Path) -> None:
    auto = tmp_path / "transformers" / "models" / "auto"
    auto.mkdir(parents=True)
    for folder in (auto, auto.parent, auto.parent.parent):
        (folder / "__init__.py").write_text("__version__ = '4.57.6'\n")
    (auto / "configuration_auto.py").write_text("ran = True\n")
    command = [sys.executable, "-W", "always::ImportWarning", "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"error: {REASON.format('4.57.6')}\n"
    assert f"ImportWarning: models of depthmix are unknown to transformers: {REASON.format('4.57.6')}" in done.stderr
