"""`depthmix list`: every mechanism on one screen."""

from __future__ import annotations

import dataclasses
import json as json_format
from typing import Any

import torch

from depthmix.mechanisms import DepthStack, KVStack, PluginError, kv_mechanism
from depthmix.mechanisms.registry import naming_plugin, survey
from depthmix.support.terminal import console, say


def run(dim: int = 768, depth: int = 24, json: bool = False) -> int:
    """List the mechanisms with what they cost and keep; a plug-in that cannot be used is named on stderr.

    Args:
        dim: width for the figures.
        depth: number of sublayers for the figures.
        json: print a list of objects instead of a table.
    """
    names, broken = survey("depth")
    rows: list[dict[str, Any]] = []
    values: list[dict[str, Any]] = []
    for name in (*names, *survey("kv")[0]):
        try:
            with naming_plugin(name):
                if name in names:
                    rows.append(describe(on_meta(name, dim, depth)))
                else:
                    values.append(describe_kv(name, depth))
        except PluginError as error:
            broken[name] = error
    for reason in broken.values():
        say(f"depthmix: {reason}. It is left out")
    if json:
        print(json_format.dumps([*rows, *values], indent=2, ensure_ascii=False))
    else:
        print_table(rows, dim, depth)
        print_values(values)
    return 0


def on_meta(name: str, dim: int, depth: int, /, **options: Any) -> DepthStack:
    """A stack without storage: enough to ask it."""
    with torch.device("meta"):
        return DepthStack(name, dim=dim, depth=depth, **options)


def describe(stack: DepthStack) -> dict[str, Any]:
    """What a mechanism says of itself, at this size and with these options."""
    cls = type(next(iter(stack)))
    return {
        "name": stack.name,
        "kind": "depth",
        "paper": cls.paper,
        "state": cls.holds,
        "parameters_formula": cls.parameters_formula,
        "rank_formula": cls.rank_formula,
        "operator_valued": cls.operator_valued,
        "dim": stack.dim,
        "depth": stack.depth,
        "options": dataclasses.asdict(stack.config),
        **dataclasses.asdict(stack.facts),
        **state_figures(stack),
    }


def describe_kv(name: str, depth: int, /, **options: Any) -> dict[str, Any]:
    """What a mechanism inside attention says of itself, in a decoder of `depth` sublayers."""
    cls = kv_mechanism(name)
    with torch.device("meta"):
        stack = KVStack(name, head_dim=2, depth=max(1, depth // 2), **options)
    return {"name": name, "kind": "kv", "paper": cls.paper, "state": cls.holds, **state_figures(stack)}


def state_figures(stack: DepthStack | KVStack) -> dict[str, float]:
    at_cut, in_read = stack.state_widths()
    return {"state_at_cut_in_widths": at_cut, "state_in_read_in_widths": in_read}


def widths(row: dict[str, Any]) -> str:
    """Both sizes of a state, as a table shows them."""
    return "/".join(f"{row[f'state_{where}_in_widths']:.1f}".removesuffix(".0") for where in ("at_cut", "in_read"))


def print_values(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    title = "Inside attention: values mixed over depth, with any of the above"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("mechanism", "arXiv", "state"):
        table.add_column(heading, no_wrap=heading == "mechanism")
    for row in rows:
        table.add_row(row["name"], row["paper"].removeprefix("arXiv "), f"{row['state']} {widths(row)}·K")
    terminal = console()
    terminal.print(table)
    terminal.print("K        width of all key-value heads together")
    terminal.print("\nFormulas, options and code of one mechanism: depthmix show NAME")


def print_table(rows: list[dict[str, Any]], dim: int, depth: int) -> None:
    from rich import box
    from rich.table import Table

    title = f"Mechanisms with default options at D = {dim}, L = {depth} sublayers"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("mechanism", no_wrap=True)
    table.add_column("arXiv", min_width=10)
    table.add_column("state")
    table.add_column("params", justify="right", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("traffic", justify="right", no_wrap=True)
    table.add_column("two-\nphase", no_wrap=True)
    table.add_column("Pre-\nNorm")
    for row in rows:
        table.add_row(
            row["name"],
            row["paper"].removeprefix("arXiv ").replace(", ", "\n"),
            f"{row['state']} {widths(row)}·D",  # no column of its own: 80 columns hold no more
            f"{row['parameters']:,}",
            "–" if row["rank"] is None else str(row["rank"]),
            f"{row['reads'] / dim:.3g}+{row['writes'] / dim:.3g}",
            "yes" if row["two_phase"] else "–",
            row["preserves_prenorm"],
        )
    terminal = console()
    terminal.print(table)
    terminal.print("state    and its widths D per token: at a cut/in a read, derived results included")
    terminal.print("rank     semiseparable rank of the depth mixing matrix M, generic coefficients")
    terminal.print("traffic  widths D read + written per token and sublayer, keys and values apart")
    terminal.print("two-phase  queries are known in advance: reads of several sites share a pass")
    terminal.print("PreNorm  whether a fresh stack computes the PreNorm network")
    for row in rows:
        if row["note"]:
            terminal.print(f"{row['name']}: {row['note']}")
    terminal.print()
