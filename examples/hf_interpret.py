"""What does a retrofitted Hugging Face model read from its depth? M, its strongest routes, and what cutting them costs.

    pip install 'depthmix[hf,bpe,figures]'
    python examples/hf_interpret.py MODEL TEXT [--folder out/interpret] [--tokens 4096]

MODEL is a folder that `save_pretrained` of a wrapped model wrote, with its tokenizer; TEXT is a text file. The figures
are PNG files in the folder, and trace and ablation are saved beside them for `depthmix report`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import depthmix as dm
from depthmix.analysis.figures import new_figure, save

CONTEXT = 128


def rows_of(model: Path, text: Path, tokens: int) -> torch.Tensor:
    """[B, CONTEXT] ids of the beginning of the text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0][:tokens]
    count = len(ids) // CONTEXT
    if count == 0:
        raise SystemExit(f"{text} has {len(ids)} tokens; expected at least {CONTEXT}")
    return ids[: count * CONTEXT].view(count, CONTEXT)


def strongest_routes(weights: torch.Tensor, count: int = 8) -> list[tuple[int, int, float]]:
    """Sublayer to sublayer, by the size of their entry of M over an even share of its row."""
    rows = range(1, len(weights))
    routes = [(i, r + 1, float(weights[r, i])) for r in rows for i in range(1, r + 1)]
    return sorted(routes, key=lambda route: -abs(route[2]))[:count]


def main(folder: Path, path: Path, text: Path, tokens: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    rows = rows_of(path, text, tokens)
    folder.mkdir(parents=True, exist_ok=True)

    trace = dm.trace(model, rows[:1])
    trace.save(folder / "trace")
    weights = trace.M.mean((0, 1))
    while weights.dim() > 2:  # heads
        weights = weights.mean(0)
    print("strongest routes, as entries of M (1 everywhere in the plain residual):")
    for source, reader, value in strongest_routes(weights):
        where = "the head" if reader == len(weights) else f"sublayer {reader}"
        print(f"  sublayer {source} -> {where}: {value:.3f}")
    print(f"semiseparable rank of M: {int(trace.rank().max())} at most")

    ablation = dm.ablate(model, rows)
    ablation.save(folder / "ablation.json")
    effects = sorted((e for e in ablation.effects if e.kind != "control"), key=lambda effect: -effect.loss.mean)
    print(f"loss {ablation.loss:.4f}; the cuts that cost most:")
    for effect in effects[:5]:
        print(f"  {effect.name}: {effect.loss.mean:+.4f}")

    for name, draw, of in (("matrix", dm.plot.mixing_matrix, trace), ("importance", dm.plot.importance, ablation)):
        figure = new_figure()
        draw(of, ax=figure.subplots())
        save(figure, folder / f"{name}.png", dpi=150)
        print(f"figure: {folder / f'{name}.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("out/interpret"))
    parser.add_argument("--tokens", type=int, default=4096)
    chosen = parser.parse_args()
    main(chosen.folder, chosen.model, chosen.text, chosen.tokens)
