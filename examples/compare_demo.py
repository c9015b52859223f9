"""Does mixing over depth help a small model on Python's own sources? Three arms, one seed, a few minutes.

    python examples/compare_demo.py [FOLDER]

Trains the plain residual, block_attnres and depth_attention, prints the table and where the page is, and lets the model
of each arm go on writing. One seed of small models at few steps: this shows that it works, not which is better.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import depthmix as dm
from depthmix.cli import main
from depthmix.inference import load_tokenizer

MIXERS = ("residual", "block_attnres", "depth_attention")
SIZE = ("--depth", "12", "--dim", "128", "--tokens", "5e5", "--lrs", "5e-3")
PROMPT = "def __init__(self, "


def demo(folder: Path, *more: str) -> int:
    code = main(["compare", "--mixers", *MIXERS, "--seeds", "1", *SIZE, *more, "--folder", str(folder)])
    found = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    for run in found["runs"]:
        final = Path(run["folder"]) / "final"
        model = dm.load_model(final)
        tokenizer = load_tokenizer(final, model.config.vocab_size)
        prompt = tokenizer.encode(PROMPT)
        (answer,) = dm.generate(model, [prompt], max_new_tokens=120, temperature=0.7, seed=0)
        print(f"\n--- {run['arm']} goes on writing ---\n{PROMPT}{tokenizer.decode(answer)}")
    return code


if __name__ == "__main__":
    sys.exit(demo(Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo"), *sys.argv[2:]))
