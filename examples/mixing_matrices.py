"""Heat maps of the depth mixing matrix of every mechanism, with random parameters, and its semiseparable rank.

    python examples/mixing_matrices.py [FOLDER]

For each mechanism: build a network around it, move its parameters away from their start, run it once on random input,
save the trace, and draw M from the saved trace. all.png shows them side by side, by family and on one colour scale.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import depthmix as dm
from depthmix.analysis.figures import new_figure, save
from depthmix.analysis.invariants import make_probe

DEPTH, DIM = 16, 32
FAMILIES = [  # each with its column and row of the page
    ("One residual stream", 0, 0, ["residual", "scaled_residual", "highway"]),
    ("Several residual streams", 1, 0, ["hyper_connections", "mhc", "mhc_lite"]),
    ("Linear attention over depth", 0, 1, ["mrla", "ddl", "linear_attention"]),
    ("Softmax attention over depth", 1, 1, ["attnres", "block_attnres", "delta_attnres"]),
    ("Learned average", 0, 2, ["denseformer"]),
    ("Values inside attention", 0, 2, ["depth_attention", "value_residual"]),
]
OPTIONS = {"block_attnres": {"block_sublayers": 4}, "linear_attention": {"rank": 2}, "depth_attention": {"stride": 4}}
SPREAD = {  # noise on the parameters, 0.4 by default; less where rows would explode, more where they would be uniform
    **{"hyper_connections": 0.09, "linear_attention": 0.12, "denseformer": 0.15, "mhc": 0.2, "mhc_lite": 0.3},
    **{"ddl": 0.2, "attnres": 0.8, "block_attnres": 0.6, "delta_attnres": 0.6},
}
LIMIT = 2.0  # end of the common scale; the residual's weight of 1 is halfway
NOTE = f"""\
Row: a reader, sublayer 1 to {DEPTH} and then the head.
Column: a source, the embedding (0) and then the output
of each sublayer. Colour: its weight in what is read.
rank: semiseparable rank of M.

Parameters are random, of a scale that shows the form
which a mechanism gives to M, not what training finds.
One token; mrla: one channel. ddl mixes by operators: gains
of its writes, without a rank. Inside attention, readers and
sources are {DEPTH + 1} attention layers, and M mixes their values.
"""


def trace_depth(name: str) -> dm.Trace:
    options = OPTIONS.get(name, {})
    probe = make_probe(name, options, dim=DIM, depth=DEPTH, tokens=(1,), spread=SPREAD.get(name, 0.4))
    return dm.trace(probe.stack, probe.x, probe.sublayers)


def trace_values(name: str) -> dm.Trace:
    """The trace of a decoder with as many attention layers as M of the others has rows."""
    mixer = {"name": name, **OPTIONS.get(name, {})}
    model = dm.Decoder(
        dm.DecoderConfig(vocab_size=64, dim=DIM, layers=DEPTH + 1, heads=1, hidden=DIM, kv_mixer=mixer)
    ).double()
    model.reset_parameters(seed=0)
    with torch.no_grad():
        for parameter in model.kv_mixers.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
        for key, parameter in model.named_parameters():
            if key.endswith("q_norm.weight"):
                parameter.mul_(3)  # otherwise the softmax is nearly uniform
    return dm.trace(model, torch.tensor([[7]]))


def rank_of(trace: dm.Trace) -> str:
    if trace.kind == "operator":
        return "operator"
    ranks = trace.rank() if trace.values is None else dm.semiseparable_rank(trace.values, 1e-9)
    return str(int(ranks.max()))


def draw(trace: dm.Trace, ax: Any, **options: Any) -> Any:
    return (dm.plot.mixing_matrix if trace.values is None else dm.plot.value_matrix)(trace, ax, **options)


def draw_all(traces: dict[str, dm.Trace]) -> Any:
    """Panels at measured places, in inches of a page that is 9 wide."""
    width, margin, gap, left, top, bottom = 9.0, 0.08, 0.09, 0.43, 0.47, 0.38
    half = (width - 3 * margin) / 2
    side = (half - left) / 3 - gap
    box = top + side + bottom
    height = 3 * box + 4 * margin
    figure = new_figure()
    figure.set_layout_engine("none")
    figure.set_size_inches(width, height)

    def place(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
        """A rectangle from the top left, in parts of the page."""
        return x / width, 1 - (y + h) / height, w / width, h / height

    start, used = [margin, half + 2 * margin], {}
    for family, column, row, names in FAMILIES:
        x, y = used.get((column, row), start[column]), margin + row * (box + margin)
        w = left + len(names) * (side + gap)
        used[column, row] = x + w + margin
        background = figure.add_axes(place(x, y, w, box), facecolor="#f5f6f8", xticks=[], yticks=[])
        background.spines[:].set_visible(False)
        figure.text((x + 0.1) / width, 1 - (y + 0.19) / height, family, fontsize=9, fontweight="bold", color="0.15")
        for k, name in enumerate(names):
            ax = figure.add_axes(place(x + left + k * (side + gap), y + top, side, side))
            image = draw(traces[name], ax, limit=LIMIT, colorbar=False).images[0]
            ax.set_title(name, fontsize=8, family="monospace", pad=3.5)
            ax.set_xlabel("source", fontsize=7.5, labelpad=1.5)
            ax.set_ylabel("reader" if k == 0 else "", fontsize=7.5, labelpad=0)
            labels = [t.get_text() for t in (*ax.get_xticklabels(), *ax.get_yticklabels())]
            shown, n = [0, DEPTH // 2, DEPTH], len(labels) // 2
            ax.set_xticks(shown, [labels[0], labels[n // 2], labels[n - 1]])
            ax.set_yticks(shown, [labels[n], labels[n + n // 2], labels[-1]] if k == 0 else [""] * 3)
            ax.tick_params(labelsize=6.5, length=2, pad=1.5, color="0.4", width=0.6)
            ax.spines[:].set(color="0.55", linewidth=0.6)
            rank = rank_of(traces[name])
            words = "operator" if rank == "operator" else f"rank {rank}"
            ax.text(0.96, 0.95, words, ha="right", va="top", fontsize=7.5, color="0.2", transform=ax.transAxes)
    x, y = used[0, 2] + 0.12, margin + 2 * (box + margin)
    figure.text(x / width, 1 - (y + 0.19) / height, "How to read them", fontsize=9, fontweight="bold", color="0.15")
    figure.text(x / width, 1 - (y + 0.3) / height, NOTE, fontsize=7.3, va="top", linespacing=1.25, color="0.25")
    cax = figure.add_axes(place(x, y + box - 0.42, width - x - 0.2, 0.11))
    entries = [image.get_array() for ax in figure.axes for image in ax.images]
    below, above = any(e.min() < -LIMIT for e in entries), any(e.max() > LIMIT for e in entries)
    extend = "both" if below and above else "min" if below else "max" if above else "neither"
    bar = figure.colorbar(image, cax=cax, orientation="horizontal", extend=extend, ticks=[-2, -1, 0, 1, 2])
    bar.ax.tick_params(labelsize=7, length=2, pad=2)
    bar.outline.set(linewidth=0.6, edgecolor="0.55")
    bar.set_label(f"entry of M (colours are clipped at ±{LIMIT:g})", fontsize=7.3, labelpad=1.5)
    return figure


def main(folder: Path) -> None:
    traces = {}
    print(f"{'mechanism':18} {'semiseparable rank':>18}   M with random parameters, {DEPTH} sublayers")
    for name in [*dm.list_mechanisms(), *dm.list_mechanisms(kind="kv")]:
        made = trace_values(name) if name in dm.list_mechanisms(kind="kv") else trace_depth(name)
        made.save(folder / f"{name}.safetensors")
        traces[name] = dm.Trace.load(folder / f"{name}.safetensors")
        rank = rank_of(traces[name])
        figure = new_figure()
        figure.set_size_inches(4.6, 4.65)
        draw(traces[name], figure.subplots(), title=name if rank == "operator" else f"{name}, rank {rank}")
        save(figure, folder / f"{name}.png")
        print(f"{name:18} {rank:>18}   {folder / name}.png")
    save(draw_all(traces), folder / "all.png", dpi=200)
    print(f"\nside by side: {folder / 'all.png'}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/mixing_matrices"))
