"""`depthmix bench`: what reading over depth costs, on this machine."""

from __future__ import annotations

import json as json_format
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from depthmix.analysis.invariants import verify
from depthmix.bench import MARGIN, Ratio, Size, bench_growth, bench_read, bench_step, kept_bytes_per_token
from depthmix.bench.step import CONTROL
from depthmix.mechanisms import list_mechanisms, mechanism
from depthmix.ops import backend

Part = Literal["read", "step", "memory", "growth"]
PARTS: tuple[Part, ...] = ("read", "step", "memory", "growth")
OPTIONS: dict[str, dict[str, Any]] = {"block_attnres": {"num_blocks": 8}}
BOUNDS = {  # what is aimed at; the figures stand beside them, whatever they are
    "ops.attend, forward": 3.0,
    "ops.attend, forward and backward": 12.0,
    "ops.attend against fla-core naive, forward and backward": 0.2,
    "64 sources, time of each": 1.15,
    "block_attnres": 1.05,
    "attnres": 1.12,
    "denseformer": 1.05,
    "mhc": 1.40,
}


@dataclass
class Row:
    part: str
    what: str
    figure: float
    low: float | None
    high: float | None
    unit: str
    bound: float | None
    verdict: str


def run(
    parts: tuple[Part, ...] = PARTS,
    mixers: tuple[str, ...] = (),
    rounds: int = 15,
    quick: bool = False,
    compiled: bool = False,
    json: bool = False,
) -> int:
    """Time the reads and whole training steps of mechanisms against the plain residual, in one process.

    Args:
        parts: what to measure: one read, a training step, bytes kept for the backward pass, growth with sources.
        mixers: mechanisms for the step and the memory; all but the residual by default.
        rounds: paired rounds; variants take turns in rotating order.
        quick: small sizes and few rounds: whether it runs, not how fast it is.
        compiled: the step under torch.compile (compiling takes minutes).
        json: print one object instead of a table.
    """
    names = list(mixers or (n for n in list_mechanisms() if n != "residual"))
    for name in names:
        mechanism(name)  # an unknown one is told before anything runs
    rounds = min(rounds, 3) if quick else rounds
    if rounds < 1:
        raise ValueError(f"rounds={rounds}; expected at least 1")
    refuse_while_red(names)
    size = Size(dim=64, depth=6, hidden=128, tokens=64) if quick else Size()
    rows: list[Row] = []
    if "read" in parts:
        shape = (9, 256, 128) if quick else (9, 4096, 1024)
        rows += rows_of("read", bench_read(rounds, *shape, progress("read")), "passes", not quick)
    if "growth" in parts:
        counts = (2, 4) if quick else (8, 16, 32, 64)
        grown = bench_growth(rounds, counts, *((64, 64) if quick else (1024, 768)), progress("growth"))
        rows += rows_of("growth", {f"{n} sources, time of each": r for n, r in grown.items()}, "×", not quick)
    if "step" in parts:
        chosen = {name: (name, OPTIONS.get(name, {}) if not quick else {}) for name in names}
        by_step, by_forward = bench_step(chosen, size, rounds=rounds, compiled=compiled, progress=progress("step"))
        how = "compiled step" if compiled else "step"
        rows += rows_of(how, by_step, "×", not quick) + rows_of(
            how.replace("step", "forward"), by_forward, "×", bounded=False
        )
    if "memory" in parts:
        rows += memory_rows(names, size, quick)
    where = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, float32",
        "reads": backend.describe(),
        "size": asdict(size),
        "rounds": rounds,
        "command": " ".join(["depthmix", *sys.argv[1:]]) if sys.argv else "depthmix bench",
    }
    if json:
        print(json_format.dumps({**where, "rows": [asdict(row) for row in rows]}, indent=2, ensure_ascii=False))
    else:
        print_rows(rows, where)
    return 0


def refuse_while_red(names: Iterable[str]) -> None:
    for name in names:
        red = [c.name for c in verify(name, mechanism(name).variants[0], dtype=torch.float32) if not c.holds]
        if red:
            raise ValueError(f"{name} is not right yet, so its speed is of no interest: {'; '.join(red)}. See verify")


def progress(label: str) -> Any:
    from rich.console import Console
    from rich.progress import track

    console = Console(file=sys.stderr)
    return lambda steps: track(steps, description=label, transient=True, console=console)


def rows_of(part: str, found: Mapping[str, Ratio], unit: str, bounded: bool = True) -> list[Row]:
    control = found.get(CONTROL)
    shaky = control is not None and abs(control.median - 1) > MARGIN
    rows = []
    for what, r in found.items():
        bound = BOUNDS.get(what) if bounded else None
        verdict = "" if bound is None else "undecided (control)" if shaky else r.verdict(bound)
        rows.append(Row(part, what, r.median, r.low, r.high, unit, bound, verdict))
    return rows


def memory_rows(names: Iterable[str], size: Size, quick: bool) -> list[Row]:
    plain = kept_bytes_per_token("residual", {}, size)
    rows = []
    for name in names:
        extra = kept_bytes_per_token(name, {} if quick else OPTIONS.get(name, {}), size) - plain
        bound = (size.depth + 2) * size.dim * 4 + 64 * size.depth if name == "block_attnres" else None
        verdict = "" if bound is None else "holds" if extra <= bound else "fails"
        rows.append(Row("memory", name, extra, None, None, "bytes a token", bound, verdict))
    return rows


def print_rows(rows: list[Row], where: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title="What reading over depth costs", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("part", "what", "figure", "middle half", "at most", ""):
        table.add_column(heading, overflow="fold", min_width=12 if heading == "what" else None)
    for row in rows:
        number = f"{row.figure:,.0f}" if row.part == "memory" else f"{row.figure:.3f}"
        spread = "" if row.low is None or row.high is None else f"{row.low:.3f}–{row.high:.3f}"
        bound = "" if row.bound is None else f"{row.bound:,g}"
        table.add_row(row.part, row.what, f"{number} {row.unit}", spread, bound, row.verdict)
    console.print(table)
    console.print("Ratios to the plain residual (×), passes over the sources, or bytes kept beyond the residual's.")
    for key, value in where.items():
        console.print(f"{key}: {value}")
