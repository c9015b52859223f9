"""The figures of docs/figures.md: train small models, survey what they read, cut routes, and draw.

    python examples/figures.py [FOLDER] [--depth 16] [--dim 64] [--tokens 6e5] [--source stdlib]

Trains three models (a few minutes), and writes a PNG of one column's width for each figure to FOLDER/figures. A run
that is there already is read and not trained again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import depthmix as dm
from depthmix.analysis import Ablation, Survey, ablate, survey
from depthmix.analysis.figures import new_figure, save
from depthmix.data import load_tokenizer, validation_batches
from depthmix.training import TrainConfig, load_run, open_corpus, override, read_config, train

MIXERS = ("residual", "block_attnres", "depth_attention")
COLUMN = 3.3  # inches
SEQUENCES, CONTEXT = 16, 64  # of held-out text, for surveys and cuts


def train_runs(folder: Path, depth: int, dim: int, tokens: float, source: str) -> dict[str, Path]:
    runs = {}
    for mixer in MIXERS:
        runs[mixer] = folder / mixer
        config = TrainConfig.from_dial(depth, mixer, folder=str(runs[mixer]), dim=dim, tokens=tokens)
        steps = config.run.steps
        changes = {
            "data.source": source,
            "data.folder": str(folder / "tokens"),
            "run.depth_every": max(1, steps // 24),
            "run.validate_every": max(1, steps // 12),
        }
        for key, value in changes.items():
            config = override(config, key, value)
        print(f"{mixer}: validation loss {train(config).validation_loss:.4f}")
    return runs


def held_out(run: Path) -> torch.Tensor:
    """[SEQUENCES, CONTEXT]"""
    corpus = open_corpus(read_config(run).data)
    (tokens,) = validation_batches(corpus.validation, CONTEXT - 1, SEQUENCES, 1)
    return tokens


def measure(run: Path) -> tuple[Survey, Ablation]:
    model, tokens = load_run(run), held_out(run)
    tokenizer = load_tokenizer(run / "final", model.config.vocab_size)
    return survey(model, [tokens], decode=tokenizer.decode), ablate(model, tokens)


def draw(folder: Path, name: str, height: float, *functions: Callable[[Any], Any]) -> None:
    """Functions side by side, each in a column of its own."""
    figure = new_figure()
    figure.set_size_inches(COLUMN * len(functions), height)
    for function, ax in zip(functions, figure.subplots(1, len(functions), squeeze=False)[0], strict=True):
        function(ax)
    save(figure, folder / f"{name}.png", dpi=150)
    with Image.open(folder / f"{name}.png") as picture:
        small = picture.convert("RGB").quantize(255)
    small.save(folder / f"{name}.png", optimize=True)  # a fraction of the bytes, for the repository


def draw_all(runs: dict[str, Path], folder: Path) -> None:
    plain, block, values = (runs[mixer] for mixer in MIXERS)
    surveys, ablations = {}, {}
    for mixer, run in runs.items():
        surveys[mixer], ablations[mixer] = measure(run)
    found, cuts, plot = surveys["block_attnres"], ablations["block_attnres"], dm.plot
    draw(
        folder,
        "mixing_matrix",
        2.7,
        lambda ax: plot.mixing_matrix(found, ax),
        lambda ax: plot.mixing_matrix(found, ax, quantity="M_std"),
    )
    draw(
        folder,
        "rows",
        2.0,
        lambda ax: plot.mixing_matrix(found, ax, quantity="contribution", rows="attn"),
        lambda ax: plot.mixing_matrix(found, ax, quantity="contribution", rows="mlp"),
    )
    draw(folder, "source_weights", 2.7, lambda ax: plot.source_weights(found, ax))
    draw(folder, "value_matrix", 2.7, lambda ax: plot.value_matrix(surveys["depth_attention"], ax))
    draw(folder, "token_row", 2.2, lambda ax: plot.token_row(found, 40, -1, ax, quantity="weights"))

    def norms(series: str) -> Callable[[Any], None]:
        def draw_both(ax: Any) -> None:
            for mixer in ("residual", "block_attnres"):
                plot.depth_norms(surveys[mixer], ax, series=series, label=mixer)

        return draw_both

    draw(folder, "depth_norms", 2.2, norms("state_norm"), norms("gradient_norm"))
    draw(
        folder,
        "over_training",
        2.3,
        lambda ax: plot.over_training(plain, ax, title="residual"),
        lambda ax: plot.over_training(block, ax, title="block_attnres"),
    )
    draw(
        folder,
        "over_training_lines",
        2.3,
        lambda ax: plot.over_training(block, ax, series="embedding_share", view="lines"),
    )
    draw(folder, "loss_curves", 2.3, lambda ax: plot.loss_curves([plain, block, values], ax))
    draw(folder, "routes", 2.7, lambda ax: plot.routes(found, ax=ax), lambda ax: plot.routes(found, cuts, ax))
    draw(
        folder,
        "importance",
        2.9,
        lambda ax: plot.importance(cuts, found, ax),
        lambda ax: plot.importance(cuts, found, ax, log=True),
    )
    draw(folder, "ranks", 2.0, lambda ax: plot.ranks(surveys, ax))
    print(f"{len([*folder.glob('*.png')])} figures: {folder}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of docs/figures.md.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("out/figures"))
    parser.add_argument("--depth", type=int, default=16, help="number of sublayers")
    parser.add_argument("--dim", type=int, default=64, help="width")
    parser.add_argument("--tokens", type=float, default=6e5, help="tokens of training, for each model")
    parser.add_argument("--source", default="stdlib", help="text to train on")
    given = parser.parse_args(arguments)
    runs = train_runs(given.folder, given.depth, given.dim, given.tokens, given.source)
    draw_all(runs, given.folder / "figures")


if __name__ == "__main__":
    main()
