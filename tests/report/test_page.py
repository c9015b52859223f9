"""The page of a report and the explorer, driven in Chromium with the network off: what a person sees and can do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import depthmix as dm
from depthmix.cli.explore import explorer_document, load_run
from depthmix.cli.report import run as report
from depthmix.report.answers import answer_with
from depthmix.report.page import fill_page, read_template, write_page
from depthmix.report.server import ExplorerServer
from depthmix.training import train
from tests.report.browser import Watched, check_installed
from tests.runs import tiny_run
from tools.chromium import launched

HOSTILE = "<script>pwned=1</script>\"'&amp; \u202eטקסט\u202c 🦊 \x1b[31mred"
TEXT = "x = \"<script>pwned=1<\" + '🦊' # שלום \x1b[31m"
SURE = 40.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    check_installed()
    with launched() as started:
        yield started


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on two tiny runs; a name and the text are hostile."""
    folder = tmp_path_factory.mktemp("report")
    runs = []
    for mixer, name in (("block_attnres", HOSTILE.replace("/", "∕")), ("attnres", "attnres")):
        config = tiny_run(folder / "runs" / name, mixer, depth=6, run__steps=8, run__snapshot_every=2)
        train(config)
        runs.append(folder / "runs" / name)
    text = folder / "text.txt"
    text.write_text(TEXT * 20, encoding="utf-8")
    target = folder / "report.html"
    assert report(tuple(runs), output=target, text=text, json=True) == 0
    return target


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with a planted model (sublayer 7 reads only source 2) and another one."""
    folder = tmp_path_factory.mktemp("explorer")
    torch.manual_seed(0)
    for name, layers in (("planted", 4), ("other", 2)):
        size = {"vocab_size": 256, "dim": 16, "layers": layers, "heads": 2, "hidden": 24}
        model = dm.Decoder(dm.DecoderConfig(**size, mixer={"name": "attnres", "mixing": "static"}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            if name == "planted":
                model.depth[6].logits.zero_()
                model.depth[6].logits[2] = SURE
        dm.save_model(model, folder / name)
    folders = [folder / "planted", folder / "other"]
    runs = [load_run(each, each.name, "cpu", False) for each in folders]
    page = fill_page(read_template(), explorer_document(folders, runs))
    server = ExplorerServer(page, partial(answer_with, runs))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server.address
    finally:
        server.shutdown()
        thread.join(10)


def test_the_page_opens_from_a_file_without_a_request_or_an_error(browser: Any, page_file: Path) -> None:
    with Watched(browser, page_file.as_uri()) as shown:
        shown.page.wait_for_timeout(300)
        assert shown.errors == []
        assert shown.requests == [page_file.as_uri()]
        ids = shown.page.evaluate("() => [...document.querySelectorAll('main section')].map((s) => s.id)")
        assert {"verdict", "loss", "matrix", "tokens", "routes", "depth", "training", "importance"} <= set(ids)
        assert {"rank", "health", "cost", "about"} <= set(ids)


def test_hostile_names_and_texts_are_shown_as_text(browser: Any, page_file: Path) -> None:
    with Watched(browser, page_file.as_uri()) as shown:
        text = shown.page.locator("body").inner_text()
        assert "<script>pwned=1" in text
        assert "🦊" in text
        assert "\x1b" not in text
        assert shown.page.evaluate("() => typeof pwned") == "undefined"
        assert shown.page.evaluate("() => document.querySelectorAll('script').length") == 2  # its own, and the document
        chips = shown.all("token").all_inner_texts()
        assert "<" in "".join(chips)
        assert shown.errors == []


def test_pointing_at_a_cell_and_arrow_keys_change_the_readout(browser: Any, page_file: Path) -> None:
    with Watched(browser, page_file.as_uri()) as shown:
        readout = shown.page.locator("#matrix").locator('[data-test="matrix-readout"]').first
        before = readout.inner_text()
        cell = shown.page.locator('#matrix [data-test="matrix-cell"][data-row="4"][data-column="2"]').first
        cell.hover()
        hovered = readout.inner_text()
        assert hovered != before
        assert "2" in hovered
        assert "5" in hovered  # row 4 belongs to sublayer 5
        grid = shown.page.locator('#matrix [role="grid"]').first
        grid.focus()
        shown.page.keyboard.press("ArrowDown")
        first = readout.inner_text()
        shown.page.keyboard.press("ArrowDown")
        assert readout.inner_text() != first


def test_the_scrubber_shows_earlier_matrices(browser: Any, page_file: Path) -> None:
    with Watched(browser, page_file.as_uri()) as shown:
        cells = shown.page.locator('#matrix [data-test="matrix-cell"]')

        def colours() -> list[str]:
            return cells.evaluate_all("(nodes) => nodes.map((n) => getComputedStyle(n).fill)")

        end = colours()
        scrubber = shown.all("training-scrubber").first
        scrubber.focus()
        shown.page.keyboard.press("Home")
        shown.page.wait_for_timeout(200)
        assert colours() != end
        shown.page.keyboard.press("End")
        shown.page.wait_for_timeout(200)
        assert colours() == end


def test_the_quantity_changes_what_the_matrices_show(browser: Any, page_file: Path) -> None:
    with Watched(browser, page_file.as_uri()) as shown:
        choice = shown.all("quantity").first
        options = choice.locator("option").evaluate_all("(nodes) => nodes.map((n) => [n.value, n.textContent])")
        assert len(options) >= 5
        seen = set()
        for value, _ in options:
            choice.select_option(value)
            shown.page.wait_for_timeout(50)
            cells = shown.page.locator('#matrix [data-test="matrix-cell"]')
            fills = cells.evaluate_all("(nodes) => nodes.map((n) => getComputedStyle(n).fill).join()")
            seen.add(fills)
        assert len(seen) >= 4
        assert shown.errors == []


def test_a_chosen_token_and_row_change_the_bars(browser: Any, page_file: Path) -> None:
    with Watched(browser, page_file.as_uri()) as shown:
        figure = shown.page.locator("#tokens")

        def drawn() -> str:
            return figure.evaluate("(node) => [...node.querySelectorAll('svg')].map((s) => s.outerHTML).join()")

        before = drawn()
        shown.all("token").nth(5).click()
        shown.page.wait_for_timeout(100)
        chosen = drawn()
        assert chosen != before
        picker = shown.all("row-picker").first
        values = picker.locator("option").evaluate_all("(nodes) => nodes.map((n) => n.value)")
        picker.select_option(values[1] if picker.input_value() != values[1] else values[2])
        shown.page.wait_for_timeout(100)
        assert drawn() != chosen


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_no_serious_problem_in_the_report(browser: Any, page_file: Path, dark: bool) -> None:
    with Watched(browser, page_file.as_uri(), dark=dark) as shown:
        assert shown.violations() == []


def test_every_control_of_the_report_is_reached_by_the_keyboard(browser: Any, page_file: Path) -> None:
    with Watched(browser, page_file.as_uri()) as shown:
        expected = shown.controls()
        assert len(expected) > 30
        assert expected - shown.reached_by_tab() == set()


def test_on_a_phone_the_page_does_not_scroll_sideways(browser: Any, page_file: Path) -> None:
    with Watched(browser, page_file.as_uri(), width=360) as shown:
        assert shown.page.evaluate("() => document.scrollingElement.scrollWidth") <= 360


def test_the_theme_can_be_switched(browser: Any, page_file: Path) -> None:
    with Watched(browser, page_file.as_uri()) as shown:
        colour = "() => getComputedStyle(document.body).backgroundColor"
        before = shown.page.evaluate(colour)
        shown.all("theme").first.click()
        assert shown.page.evaluate(colour) != before


def test_figures_can_be_saved_as_svg_and_png(browser: Any, page_file: Path, tmp_path: Path) -> None:
    with Watched(browser, page_file.as_uri()) as shown:
        for kind, magic in (("svg", b"<"), ("png", b"\x89PNG")):
            with shown.page.expect_download() as waiting:
                shown.all(f"download-{kind}").first.click()
            target = tmp_path / f"figure.{kind}"
            waiting.value.save_as(target)
            assert target.read_bytes().startswith(magic)
            assert len(target.read_bytes()) > 1000
        assert "<script" not in (tmp_path / "figure.svg").read_text(encoding="utf-8")


def test_a_page_without_data_says_so(browser: Any, tmp_path: Path) -> None:
    target = tmp_path / "empty.html"
    target.write_text(read_template(), encoding="utf-8")
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto(target.as_uri())
    page.wait_for_timeout(200)
    assert "no data" in page.locator("body").inner_text().lower() or "contains no" in page.locator("body").inner_text()
    context.close()


def test_runs_with_nothing_recorded_still_make_a_page(browser: Any, page_file: Path, tmp_path: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    start = text.index('id="document">') + len('id="document">')
    document = json.loads(text[start : text.index("</script>", start)])
    for run in document["runs"]:
        run.update(trace=None, ablation=None, snapshots=None, over_training=None, missing=["Nothing was recorded."])
        run["curves"] = {name: {"tokens": [], "seconds": [], "loss": []} for name in ("train", "validation")}
    target = tmp_path / "bare.html"
    write_page(document, target)
    with Watched(browser, target.as_uri()) as shown:
        assert shown.errors == []
        assert "Nothing was recorded." in shown.page.locator("main").inner_text()


# The explorer.


def ask(shown: Watched, text: str) -> None:
    """Type a text of bytes, each a token, and wait for its answer."""
    shown.all("explorer-text").fill(text)
    count = len(text.encode())
    shown.page.wait_for_function(
        "(n) => document.querySelectorAll('#explorer [data-test=token]').length === n", arg=count
    )


def predictions(shown: Watched) -> list[list[str]]:
    """Of each likely next token its text and its probabilities: before the edits and, if there are any, after them."""
    return shown.all("next-token").evaluate_all(
        "(nodes) => nodes.map((n) => "
        "[n.dataset.text, ...[...n.querySelectorAll('.next-value')].map((v) => v.textContent)])"
    )


def test_cutting_the_planted_route_changes_the_next_token_and_another_one_does_not(browser: Any, explorer: str) -> None:
    with Watched(browser, explorer, offline=False) as shown:
        ask(shown, "cut a route")
        assert all(len(row) == 2 for row in predictions(shown))
        for source, changes in ((3, False), (2, True)):
            cell = f'#explorer [data-test="matrix-cell"][data-row="6"][data-column="{source}"]'
            shown.page.locator(cell).first.click()
            shown.all("route-switch").first.click()
            shown.page.wait_for_function(
                "() => document.querySelectorAll('[data-test=next-token] .next-value').length > "
                "document.querySelectorAll('[data-test=next-token]').length"
            )
            assert shown.all("edit").count() == 1
            assert any(before != after for _, before, after in predictions(shown)) == changes
            assert "nothing was renormalised" in shown.all("how").first.inner_text()
            shown.all("edit").locator("button").first.click()
            shown.page.wait_for_function(
                "() => document.querySelectorAll('[data-test=next-token] .next-value').length === "
                "document.querySelectorAll('[data-test=next-token]').length"
            )
        assert shown.errors == []
        assert all(url.startswith(explorer) for url in shown.requests)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_no_serious_problem_in_the_explorer(browser: Any, explorer: str, dark: bool) -> None:
    with Watched(browser, explorer, dark=dark, offline=False) as shown:
        ask(shown, "what is read")
        assert shown.violations() == []


def test_every_control_of_the_explorer_is_reached_by_the_keyboard(browser: Any, explorer: str) -> None:
    with Watched(browser, explorer, offline=False) as shown:
        ask(shown, "tab")
        assert shown.controls() - shown.reached_by_tab() == set()


def test_hostile_input_is_shown_as_text(browser: Any, explorer: str) -> None:
    with Watched(browser, explorer, offline=False) as shown:
        ask(shown, TEXT)
        assert shown.page.evaluate("() => typeof pwned") == "undefined"
        assert shown.errors == []


def test_two_runs_answer_the_same_text_side_by_side(browser: Any, explorer: str) -> None:
    with Watched(browser, explorer, offline=False) as shown:
        ask(shown, "side by side")
        assert shown.page.locator(".explorer-column").count() == 1
        other = shown.all("explorer-compare").locator("option").evaluate_all("(nodes) => nodes.map((n) => n.value)")
        shown.all("explorer-compare").select_option(other[-1])
        shown.page.wait_for_function(
            "() => document.querySelectorAll('.explorer-column [data-test=loss-before]').length === 2"
        )
        shown.page.wait_for_function("() => !document.querySelector('[data-test=loss-before]:empty')")
        losses = shown.all("loss-before").all_inner_texts()
        assert len(set(losses)) == 2
        assert shown.errors == []


def test_a_file_can_be_picked_and_rows_renormalised(browser: Any, explorer: str, tmp_path: Path) -> None:
    text = tmp_path / "poem.txt"
    text.write_text("what a layer reads", encoding="utf-8")
    with Watched(browser, explorer, offline=False) as shown:
        shown.all("explorer-file").set_input_files(str(text))
        shown.page.wait_for_function(
            "(n) => document.querySelectorAll('#explorer [data-test=token]').length === n", arg=len(text.read_text())
        )
        shown.page.locator('#explorer [data-test="matrix-cell"][data-row="5"][data-column="1"]').first.click()
        shown.all("route-switch").first.click()
        shown.page.wait_for_function("() => document.querySelector('[data-test=how]').textContent.includes('nothing')")
        shown.all("renormalise").check()
        shown.page.wait_for_function("() => document.querySelector('[data-test=how]').textContent.includes('softmax')")
        assert shown.errors == []
