"""Comparisons with public implementations: collected only where all of them are installed (`make conformance`)."""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

PEERS = ("attnres", "einops", "fla", "hyper_connections", "transformers")
collect_ignore_glob = [] if all(map(find_spec, PEERS)) else ["*.py"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers only lends two modules: nothing may be fetched


@pytest.fixture
def note(request: Any, record_property: Any) -> Any:
    """Keep a figure for the table that is printed at the end."""

    def keep(verdict: str, what: str, figure: float) -> None:
        record_property("conformance", [request.module.PEER, verdict, what, figure])

    return keep


@pytest.fixture
def agree(note: Any) -> Any:
    """Assert that our tensors are theirs and, where `leaves` are given, that gradients with respect to these are."""
    from tests.conformance.networks import difference, gradients

    def check(what: str, ours: Any, theirs: Any, leaves: Any = (), tolerance: float = 1e-12) -> None:
        found = difference(ours, theirs)
        note("agrees", what, found)
        assert found <= tolerance, what
        if leaves:
            # the gradient of a scalar is a sum of many terms, which may cancel: hence the floor
            found = difference(gradients(ours, list(leaves)), gradients(theirs, list(leaves)), floor=0.1)
            note("agrees", f"{what}: gradients", found)
            assert found <= tolerance, f"{what}: gradients"

    return check


@pytest.fixture
def pin(note: Any) -> Any:
    """Assert that a known difference has the size it had: a change on either side shows."""

    def check(what: str, found: float, expected: float, rel: float = 0.05) -> None:
        note("differs", what, found)
        assert found == pytest.approx(expected, rel=rel), what

    return check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    table: dict[str, dict[tuple[str, str], tuple[float, int]]] = {}
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        for name, kept in getattr(report, "user_properties", []) if report.when == "call" else []:
            if name == "conformance":
                peer, verdict, what, figure = kept
                rows = table.setdefault(peer, {})
                largest, count = rows.get((verdict, what), (0.0, 0))
                rows[verdict, what] = (max(largest, figure), count + 1)
    if not table:
        return
    terminalreporter.section("conformance: largest differences, as fractions of the largest entry")
    for peer, rows in sorted(table.items()):
        terminalreporter.write_line(f"{peer} {version(peer)}")
        for (verdict, what), (figure, count) in sorted(rows.items()):
            number = f"{figure:.1e}" if verdict == "agrees" else f"{figure:.3g}"
            cases = f" ({count} cases)" if count > 1 else ""
            terminalreporter.write_line(f"  {verdict:8}{number:>8}  {what}{cases}")
