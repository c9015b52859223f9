"""Has anything changed in what is computed? Trains two commits on this machine and compares every bit.

    python -m tools.same_results BEFORE [AFTER]     # commits or checkouts; AFTER is by default this checkout

Both are driven through `depthmix train`, which is what they have in common. Each trains the same tiny runs, in one
process with the same number of threads; compared are the SHA-256 of all weights, of all losses (training and
validation) and gradient norms, and of M. Exit code 1 where something differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.checkouts import ROOT, start, unpack

Runs = dict[str, tuple[str, dict[str, Any]]]
STEPS = 12
MUON, BF16 = {"optimizer.name": "muon"}, {"run.precision": "bfloat16"}
EXPERTS = {"model.moe.experts": 4, "model.moe.active": 2, "model.moe.hidden": 32}
LOOP = {"model.loop.first": 1, "model.loop.last": 2, "model.loop.repeats": 2}
REGISTERED = re.compile(r'"(\w+)": "depthmix\.mechanisms\.\w+:\w+"')  # as a line of the registry
# Beside a run with each mechanism that both commits have.
COMBINED: Runs = {
    "experts": ("block_attnres", EXPERTS),
    "loop": ("block_attnres", LOOP),
    "Muon": ("attnres", MUON),
    "Muon, experts, loop": ("attnres+value_residual", {**MUON, **EXPERTS, **LOOP}),
    "bfloat16": ("block_attnres", BF16),
    "bfloat16, mhc": ("mhc", BF16),
    "bfloat16, Muon": ("ddl+depth_attention", {**BF16, **MUON}),
    "accumulated, wsd": ("denseformer", {"run.accumulate": 2, "schedule.kind": "wsd"}),
}
BASE = {
    "model": {"vocab_size": 256, "dim": 64, "layers": 4, "heads": 4, "hidden": 96, "kv_heads": 2, "init_std": 0.05},
    "data": {"source": "text", "folder": "tokens", "validation": 0.2, "tokens_per_row": 64, "rows": 4},
    "run": {"steps": STEPS, "validate_every": 6, "validate_batches": 2, "checkpoint_every": 0, "snapshot_every": 6},
}
# Runs in the other process, with the sources of its commit.
DRIVER = """
import contextlib, io, json, sys
import depthmix, torch
from depthmix.cli import main

assert depthmix.__file__.startswith({source!r}), depthmix.__file__
torch.set_num_threads({threads})
for name, args in json.loads({orders!r}):
    words = io.StringIO()
    with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
        code = main(args)
    if code:
        sys.exit(name + ": " + words.getvalue())
"""


def runs_of(checkouts: list[Path]) -> Runs:
    """By name: mechanism and changes of a run."""
    names = [registered(checkout) for checkout in checkouts]
    return {**{name: (name, {}) for name in sorted(set.intersection(*names))}, **COMBINED}


def registered(checkout: Path) -> set[str]:
    files = (checkout / "src" / "depthmix" / "mechanisms").glob("*.py")
    found = {name for file in files for name in REGISTERED.findall(file.read_text())}
    if "residual" not in found:
        raise SystemExit(f"no registry of mechanisms in {checkout}")
    return found


def configuration(changes: dict[str, Any]) -> str:
    """As TOML. Files of format 2 name their defaults; here they are left out, so that a changed one shows."""
    tables: dict[str, dict[str, Any]] = {name: dict(part) for name, part in BASE.items()}
    for key, value in changes.items():
        table, _, field = key.rpartition(".")
        tables.setdefault(table, {})[field] = value
    lines = ["format = 2"]
    for name in sorted(tables):
        lines += [f"[{name}]", *(f"{field} = {json.dumps(value)}" for field, value in tables[name].items())]
    return "\n".join(lines) + "\n"


def write_text(folder: Path) -> None:
    """Something to train on."""
    words = random.Random(0)
    folder.mkdir(parents=True)
    for k in range(12):
        line = " ".join(words.choice(["depth", "mixes", "what", "a", "layer", "reads"]) for _ in range(400))
        (folder / f"{k}.txt").write_text(line)


def write_orders(folder: Path, runs: Runs) -> list[tuple[str, list[str]]]:
    """Text and configurations in a folder; the command line of each run in it."""
    write_text(folder / "text")
    orders = []
    for k, (name, (mixer, changes)) in enumerate(runs.items()):
        (folder / f"{k}.toml").write_text(configuration(changes))
        orders.append((name, ["train", "--config", f"{k}.toml", "--mixer", mixer, "--folder", f"run-{k}"]))
    return orders


def tensors_digest(files: list[Path], only: str | None = None) -> str:
    """Of names, dtypes, shapes and bits of the tensors in safetensors files, or of the one named `only`, whatever else
    these say."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        size = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:size])
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items()):
            if only not in (None, name):
                continue
            begin, end = entry["data_offsets"]
            digest.update(f"{file.name} {name} {entry['dtype']} {entry['shape']}".encode())
            digest.update(content[size + begin : size + end])
    return digest.hexdigest()


def losses_digest(run: Path) -> str:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [
        (line["kind"], line["step"], line["loss"], line.get("grad_norm"))
        for line in lines
        if line["kind"] in ("train", "validation")
    ]
    if len(found) != STEPS + 2:
        raise SystemExit(f"{run / 'metrics.jsonl'} has {len(found)} losses; expected {STEPS + 2}")
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def digests(run: Path) -> dict[str, str]:
    snapshots = sorted((run / "snapshots").glob("*.safetensors"))
    return {
        "weights": tensors_digest([run / "final" / "model.safetensors"]),
        "losses": losses_digest(run),
        "M": tensors_digest(snapshots, only="M"),
    }


def train_both(checkouts: list[Path], folder: Path, threads: int) -> list[dict[str, dict[str, str]]]:
    """The digests of every run of each checkout."""
    sides, processes, runs = [], [], runs_of(checkouts)
    for k, checkout in enumerate(checkouts):
        sides.append(folder / f"side-{k}")
        orders = json.dumps(write_orders(sides[k], runs))
        script = DRIVER.format(threads=threads, orders=orders, source=str(checkout / "src"))
        processes.append(start(checkout, script, sides[k], threads))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("a side could not train; its message stands above")
    return [{name: digests(side / f"run-{k}") for k, name in enumerate(runs)} for side in sides]


def print_table(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> int:
    """How many runs differ."""
    print("| run | weights | losses | M | |\n|---|---|---|---|---|")
    different = 0
    for name, found in before.items():
        cells = [
            value[:12] if value == after[name][what] else f"{value[:12]} → {after[name][what][:12]}"
            for what, value in found.items()
        ]
        same = found == after[name]
        different += not same
        print(f"| {name} | {' | '.join(cells)} | {'same' if same else 'DIFFERENT'} |")
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a commit or a checkout")
    parser.add_argument("after", nargs="?", default=str(ROOT), help="a commit or a checkout; by default this one")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on both sides")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkouts = [unpack(commit, folder / f"source-{k}") for k, commit in enumerate((args.before, args.after))]
        before, after = train_both(checkouts, folder, args.threads)
    different = print_table(before, after)
    print(
        f"\n{len(before) - different} of {len(before)} runs are the same, bit for bit: {args.before} and {args.after}"
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
