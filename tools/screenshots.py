"""Pictures of every section of a report and of the explorer, light and dark, for docs/images/report.

    python -m tools.screenshots REPORT.html RUN

RUN is the folder of a trained model for the explorer. Needs chromium, playwright and Pillow.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.checkouts import ROOT
from tools.chromium import launched

TARGET = ROOT / "docs" / "images" / "report"
THEMES = ("light", "dark")
WIDTH, TALLEST = 1120, 1500  # pixels; taller sections are cut
COLOURS = 256
CHOSEN = {"routes": "route-run", "tokens": "token-run", "importance": "importance-run", "training": "training-run"}
PREFERRED = "block_attnres"  # the run that these sections show, if the report has it
TEXT = "def read(self, source):\n    return self.weights[source] * "


def main(report: Path, run: Path) -> None:
    TARGET.mkdir(parents=True, exist_ok=True)
    with launched() as browser:
        for theme in THEMES:
            draw_report(browser, report, theme)
            draw_explorer(browser, run, theme)


def new_page(browser: Any, theme: str, address: str) -> Any:
    page = browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme=theme).new_page()
    page.goto(address)
    page.wait_for_selector("main section")
    return page


def draw_report(browser: Any, report: Path, theme: str) -> None:
    page = new_page(browser, theme, report.resolve().as_uri())
    for test in CHOSEN.values():
        choose(page.locator(f'select[data-test="{test}"]').first)
    for section in page.locator("main section[id]").all():
        save(section, f"{section.get_attribute('id')}-{theme}")
    page.context.close()


def choose(select: Any) -> None:
    if select.count():
        for option in select.locator("option").all():
            if PREFERRED in (option.text_content() or ""):
                select.select_option(option.get_attribute("value"))


def draw_explorer(browser: Any, run: Path, theme: str) -> None:
    """A text is typed, the route from the embedding to sublayer 2 is cut."""
    words = [sys.executable, "-m", "depthmix", "explore", str(run), "--json", "--idle", "60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            page = new_page(browser, theme, json.loads(server.stdout.readline())["address"])
            page.locator('[data-test="explorer-text"]').fill(TEXT)
            page.wait_for_function(
                "(n) => document.querySelectorAll('#explorer [data-test=token]').length === n", arg=len(TEXT)
            )
            page.locator('#explorer [data-test="matrix-cell"][data-row="1"][data-column="0"]').first.click()
            page.locator('[data-test="route-switch"]').first.click()
            page.wait_for_selector('[data-test="loss-change"]')
            page.wait_for_timeout(1000)
            save(page.locator("#explorer"), f"explorer-{theme}")
            page.context.close()
        finally:
            server.terminate()


def save(section: Any, name: str) -> None:
    from PIL import Image

    picture = Image.open(io.BytesIO(section.screenshot()))
    picture = picture.crop((0, 0, picture.width, min(picture.height, TALLEST))).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(TARGET / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
