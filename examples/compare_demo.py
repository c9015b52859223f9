"""Does mixing over depth help a small model on Python's own sources? Three arms, one seed, a few minutes.

    python examples/compare_demo.py [FOLDER]

Trains the plain residual, block_attnres and depth_attention, prints the table, how the model of each arm continues a
prompt, and at the end the path of a report: one page that shows what the models do with their depth. Each arm has the
learning rate that was best for it in a sweep (docs/results/demo_rates.md). One seed of small models at few steps shows
that it works, not which arm is better.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import depthmix as dm
from depthmix.data import load_tokenizer

RATES = {"residual": 1e-2, "block_attnres": 5e-3, "depth_attention": 2e-2}  # from docs/results/demo_rates.md
SIZE = ("--depth", "12", "--dim", "96", "--tokens", "6e5", "--tokenizer", "bpe:1024", "--set", "data.rows=4")
MORE = ("--jobs", "3", "--set", "run.snapshot_every=100")  # of M: what the report can scrub through
PROMPT = "def __init__(self, "


def demo(folder: Path, *more: str) -> int:
    command = [sys.executable, "-m", "depthmix", "compare", "--mixers", *RATES, "--seeds", "1", *SIZE, *MORE]
    command += [word for mixer, rate in RATES.items() for word in ("--lr-of", f"{mixer}={rate}")]
    code = subprocess.run([*command, *more, "--folder", str(folder)], check=False).returncode
    if code not in (0, 1):  # 1: some of the runs failed
        return code
    found = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    for run in found["runs"]:
        final = folder / run["folder"] / "final"
        model = dm.load_model(final)
        tokenizer = load_tokenizer(final, model.config.vocab_size)
        prompt = tokenizer.encode(PROMPT)
        (answer,) = dm.generate(model, [prompt], max_new_tokens=100, temperature=0.7, seed=0)
        print(f"\n--- {run['arm']} continues the prompt ---\n{PROMPT}{tokenizer.decode(answer).rstrip()}")
    print("\nWhat the models do with their depth, as a page to open in a browser:", flush=True)
    report = subprocess.run([sys.executable, "-m", "depthmix", "report", str(folder)], check=False).returncode
    return code or report


if __name__ == "__main__":
    sys.exit(demo(Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo"), *sys.argv[2:]))
