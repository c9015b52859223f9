"""`python -m tests.golden --renew WHY` rewrites the golden files that have changed."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.golden import CONFIGURATIONS, FOLDER, RUNS, as_text, far, losses, read


def renew(why: str) -> None:
    for name, resolve in CONFIGURATIONS.items():
        write(f"{name}.json", as_text(resolve()))
    kept = read("losses")["runs"] if (FOLDER / "losses.json").is_file() else {}
    runs = {}
    for name, (mixer, changes) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = losses(Path(folder), mixer, changes)
        runs[name] = kept[name] if name in kept and far(found, kept[name]) is None else found
    if runs != kept:
        write("losses.json", as_text({"why": why, "runs": runs}))


def write(name: str, text: str) -> None:
    path = FOLDER / name
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
        print(f"renewed {path.relative_to(FOLDER.parent.parent)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--renew", metavar="WHY", required=True, help="the reason, in one sentence")
    renew(parser.parse_args().renew)
