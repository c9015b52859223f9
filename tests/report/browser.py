"""Chromium for the tests of pages: Debian's, driven by playwright, without a network; and rules of accessibility."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.chromium import find_chromium

AXE = Path(__file__).parent.parent / "browser" / "node_modules" / "axe-core" / "axe.min.js"


def check_installed() -> None:
    """Skip the test, with what to install, where pages cannot be opened."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: tests of pages were left out")
    if find_chromium() is None:
        pytest.skip("no chromium: tests of pages were left out; on Debian: apt-get install chromium")


class Watched:
    """A page, with everything that it asked for and complained about."""

    def __init__(
        self, browser: Any, address: str, *, width: int = 1280, dark: bool = False, offline: bool = True
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            offline=offline,
            bypass_csp=True,  # for axe-core, which the page itself would refuse
            accept_downloads=True,
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("main section")

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()

    def all(self, test: str) -> Any:
        return self.page.locator(f'[data-test="{test}"]')

    def violations(self) -> list[str]:
        """Serious and critical violations that axe-core finds."""
        if not AXE.is_file():
            pytest.skip("axe-core is not installed: tests of accessibility were left out; run `make browser`")
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate("() => axe.run({resultTypes: ['violations']})")["violations"]
        return [
            f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:160]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]

    def reached_by_tab(self, most: int = 400) -> set[str]:
        """Press Tab until the focus comes round; the keys of the controls that had it."""
        self.page.evaluate(NAME_CONTROLS)
        reached: set[str] = set()
        for _ in range(most):
            self.page.keyboard.press("Tab")
            key = self.page.evaluate("() => document.activeElement?.dataset?.control ?? ''")
            if key and key in reached and len(reached) > 3 and key == "0":
                break
            if key:
                reached.add(key)
        return reached

    def controls(self) -> set[str]:
        """The keys of all controls that can be seen; of a group of radio buttons or chips, one is enough."""
        self.page.evaluate(NAME_CONTROLS)
        return set(self.page.evaluate(SEEN_CONTROLS))


NAME_CONTROLS = """() => {
  const all = document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex]');
  all.forEach((node, index) => { node.dataset.control ??= String(index); });
}"""
SEEN_CONTROLS = """() => {
  const all = [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex]')];
  const groups = new Set();
  return all.filter((node) => {
    if (node.disabled || node.tabIndex < 0 || !node.checkVisibility({visibilityProperty: true})) return false;
    if (node.type === 'radio' && !node.checked) return false;
    return true;
  }).map((node) => node.dataset.control);
}"""
