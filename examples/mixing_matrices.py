"""Heat maps of the depth mixing matrix of every mechanism, with random parameters, and its rank.

    python examples/mixing_matrices.py [FOLDER]

For each mechanism: build a stack, move its parameters off their start, run it once on a random token through random
sublayers, save the trace, and draw M from the saved trace.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import depthmix as dm
from depthmix.analysis.figures import heat_map, heat_maps
from depthmix.analysis.invariants import make_probe

DEPTH, DIM = 16, 32
OPTIONS = {"block_attnres": {"block_sublayers": 4}, "linear_attention": {"rank": 2}}
SPREAD = {"hyper_connections": 0.15, "ddl": 0.2, "denseformer": 0.15, "linear_attention": 0.2}  # else the rows explode


def main(folder: Path) -> None:
    traces, ranks = [], []
    print(f"{'mechanism':18} {'semiseparable rank':>18}   M with random parameters, {DEPTH} sublayers")
    for name in dm.list_mechanisms():
        probe = make_probe(name, OPTIONS.get(name, {}), dim=DIM, depth=DEPTH, tokens=(1,), spread=SPREAD.get(name, 0.4))
        dm.trace(probe.stack, probe.x, probe.sublayers).save(folder / f"{name}.safetensors")
        trace = dm.Trace.load(folder / f"{name}.safetensors")
        rank = "operator" if trace.kind == "operator" else str(int(trace.rank().max()))
        heat_map(trace, folder / f"{name}.png", name if rank == "operator" else f"{name}, rank {rank}")
        print(f"{name:18} {rank:>18}   {folder / name}.png")
        traces.append(trace)
        ranks.append("operator-valued" if rank == "operator" else f"rank {rank}")
    heat_maps(traces, folder / "all.png", [t.mechanism for t in traces], notes=ranks)
    print(f"\nside by side: {folder / 'all.png'}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/mixing_matrices"))
