"""The document as a whole, its page and its size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from depthmix.report import make_document, open_folders, write_page
from depthmix.report.document import TABLE_BYTES, Opened
from depthmix.report.packed import unpack
from depthmix.report.page import PLACE, fill_page, read_template, to_json
from depthmix.report.reading import SavedRun, SavedTrace, Snapshot

PAGE = f"<!doctype html>\n<title>t</title>\n{PLACE}\n<script>0</script>\n"
MOST_BYTES = 6_000_000
RUN_KEYS = [
    *("name", "mechanism", "options", "kv_mechanism", "depth", "kinds", "dim", "seed", "finished", "facts", "hashes"),
    *("curves", "over_training", "snapshots", "trace", "ablation", "health", "missing"),
]


def document_in(page: str) -> Any:
    """As a browser reads it: the text of the one script, parsed."""
    start = page.index('id="document">') + len('id="document">')
    return json.loads(page[start : page.index("</script>", start)])


def large_run(depth: int, groups: int, tokens: int = 64) -> SavedRun:
    """A long run of `depth` sublayers with weights of their own for each of `groups` heads; all parts are there."""
    chance, n = np.random.default_rng(0), depth + 1
    names = ("output_norm", "contribution", "gradient_norm", "weight_entropy", "embedding_share", "locality")
    rows = {name: chance.random(n).tolist() for name in ("read_norm", *names)}
    rows |= {name: chance.random(depth).tolist() for name in ("output_norm", "contribution", "gradient_norm")}
    state = {"state_norm": [[x] for x in chance.random(depth).tolist()]}
    depths = [{"kind": "depth", "step": s, "tokens": s, **rows, **state} for s in range(500)]
    train = [{"kind": "train", "step": s, "tokens": s, "seconds": s / 3, "loss": s / 7} for s in range(9000)]
    reads = [list(range(r + 1)) for r in range(n)]
    tensors = {
        **{name: chance.random((groups, n, n)) for name in ("M_mean", "M_std", "weights_mean", "weights_std")},
        "M_quantiles": chance.random((5, groups, n, n)),
        "contribution": chance.random((n, n)),
        "share": chance.random((n, n)),
        "table_M": chance.random((tokens, groups, n, n)),
        "table_weights": chance.random((tokens, groups, n, n)),
    }
    content = {
        "depth": depth,
        "source_names": [f"output {i}" for i in range(n)],
        "reads": reads,
        "partial": [False] * n,
        "table": {"ids": [1] * tokens, "tokens": ["a"] * tokens, "loss": [1.0] * tokens},
    }
    snapshots = [Snapshot(step=s, M=chance.random((n, n)), weights=chance.random((n, n))) for s in range(50)]
    return SavedRun(
        folder=Path("run"),
        name="run",
        lines=train + depths,
        snapshots=snapshots,
        trace=SavedTrace(content=content, tensors=tensors),
    )


def test_the_document_has_the_keys_that_the_page_reads(trained: Path) -> None:
    document = make_document(open_folders([trained / "attnres", trained / "residual"]), "depthmix report x")
    assert list(document) == ["format", "kind", "title", "made", "study", "findings", "patterns", "runs"]
    assert (document["format"], document["kind"], document["study"]) == (1, "report", None)
    assert set(document["made"]) == {"command", "depthmix", "torch", "machine", "date"}
    assert document["made"]["command"] == "depthmix report x"
    for run in document["runs"]:
        assert list(run) == RUN_KEYS
        assert set(run["hashes"]) == {"config", "data", "weights"}
        assert all(len(value) == 64 for value in run["hashes"].values())
        assert {"parameters", "tokens", "tokens/s", "peak memory", "FLOPs of the run"} <= dict(run["facts"]).keys()
        assert set(run["over_training"]) == {"tokens", "steps", "series"}


def test_the_document_of_the_published_study_has_its_tables_and_no_nan(study: Path) -> None:
    document = make_document(open_folders([study]), "c")
    constants: list[str] = []
    json.loads(to_json(document), parse_constant=constants.append)
    assert constants == [], "no NaN, no Infinity"
    assert document_in(fill_page(PAGE, document)) == document
    assert {run["mechanism"] for run in document["runs"]} == {
        *("residual", "denseformer", "mhc", "block_attnres", "attnres"),
    }
    assert document["runs"][5]["kv_mechanism"] == "depth_attention"
    assert unpack(document["runs"][5]["snapshots"]["values"]).shape == (3, 12, 12)
    assert set(document["study"]) == {"verdicts", "losses", "cost", "about"}
    assert all(isinstance(value, str) for value in document["study"]["about"].values())


def test_text_in_the_document_cannot_end_its_script_or_begin_another(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!-- & \u2028 \u2029 é \ud800"
    document = {"title": hostile, "runs": []}
    page = fill_page(PAGE, document)
    assert page.count("</script>") == PAGE.count("</script>")
    assert "<!--" not in page
    assert document_in(page) == document
    assert "\\u003c/script>" in page
    assert "&" in page
    assert page.isascii()
    template = tmp_path / "t.html"
    template.write_text(PAGE)
    size = write_page(document, tmp_path / "r.html", template)
    assert size == (tmp_path / "r.html").stat().st_size
    assert (tmp_path / "r.html").read_text() == page


@pytest.mark.parametrize("page", ["", PAGE + PLACE, PAGE.replace("null", "0")])
def test_a_page_without_its_one_place_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="places for a document; expected one line"):
        fill_page(page, {})


def test_the_installed_page_has_one_place_and_is_package_data() -> None:
    assert read_template().count(PLACE) == 1
    assert not any(word in read_template() for word in ('src="http', 'href="http', "url(http"))


def test_six_large_runs_and_the_page_stay_below_six_megabytes() -> None:
    """24 sublayers, 8 heads, thousands of steps, 64 tokens in each trace."""
    run = large_run(24, 8)
    document = make_document(Opened(title="t", runs=[run] * 6, arms=[]), "c")
    size = len(fill_page(read_template(), document))
    assert 3_000_000 < size < MOST_BYTES
    assert "matrices of 16 tokens, the first of 64" in document["runs"][0]["missing"][0]


def test_a_table_of_one_head_is_kept_whole() -> None:
    document = make_document(Opened(title="t", runs=[large_run(24, 1)], arms=[]), "c")
    table = document["runs"][0]["trace"]["table"]
    assert table["M"]["shape"] == [64, 1, 25, 25]
    assert len(table["M"]["data"]) < TABLE_BYTES
    assert not any("matrices of" in line for line in document["runs"][0]["missing"])


def test_a_part_that_cannot_be_shown_is_null_and_named() -> None:
    run = large_run(6, 1)
    assert run.trace is not None
    run.trace.content["table"] = {"tokens": 3}
    run.trace.tensors["table_M"] = np.zeros((3, 1, 7, 7))
    described = make_document(Opened(title="t", runs=[run], arms=[]), "c")["runs"][0]
    assert described["trace"] is None
    assert any(line.startswith("The trace cannot be shown") for line in described["missing"])
    assert described["over_training"] is not None
