"""`depthmix list`: every mechanism on one screen."""

from __future__ import annotations

import dataclasses
import json as json_format
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch

from depthmix.cli.shared import Several, flag, repeatable, switch
from depthmix.mechanisms import DepthStack, KVStack, PluginError, is_kv, kv_mechanism, make_config, mechanism
from depthmix.mechanisms.make import check_sizes
from depthmix.mechanisms.registry import naming_plugin, survey
from depthmix.support.checks import parse_value, split_pair
from depthmix.support.terminal import console, print_wrapped, say

EXAMPLE = "block_attnres.num_blocks=8"
WIDE = 1000  # columns: enough for any table


EXAMPLES = (
    "depthmix list",
    "depthmix list --dim 1024 --depth 128 --set block_attnres.num_blocks=8",
)


def run(
    dim: Annotated[int, flag("Width D for the figures.", "D")] = 768,
    depth: Annotated[int, flag("Number of sublayers L for the figures.", "L")] = 24,
    set_: Annotated[
        Several,
        repeatable(
            "Set an option of one mechanism, such as block_attnres.num_blocks=8 or mhc.streams=2. Repeat the flag "
            "for each option.",
            "NAME.OPTION=VALUE",
            name="set",
            aliases=("-s",),
        ),
    ] = (),
    json: Annotated[bool, switch("Print a JSON list of objects instead of a table.")] = False,
) -> int:
    """List the mechanisms with their state, parameters, traffic and FLOPs.

    A plug-in that cannot be used is left out and named on stderr, with the reason.
    """
    chosen = options_by_mechanism(set_, dim, depth)
    names, broken = survey("depth")
    rows: list[dict[str, Any]] = []
    values: list[dict[str, Any]] = []
    for name in (*names, *survey("kv")[0]):
        try:
            with naming_plugin(name):
                options = chosen.get(name, {})
                if name in names:
                    rows.append(describe(on_meta(name, dim, depth, **options)))
                else:
                    values.append(describe_kv(name, dim, depth, **options))
        except PluginError as error:
            broken[name] = error
    for reason in broken.values():
        say(f"depthmix: {reason}. It is left out")
    if json:
        print(json_format.dumps([*rows, *values], indent=2, ensure_ascii=False))
    else:
        print_table(rows, dim, depth, set_)
        print_values(values)
    return 0


def options_by_mechanism(pairs: Sequence[str], dim: int, depth: int) -> Mapping[str, dict[str, Any]]:
    """Of NAME.OPTION=VALUE, checked; a later pair prevails over an earlier one."""
    chosen: dict[str, dict[str, Any]] = {}
    for text in pairs:
        key, value = split_pair(text, EXAMPLE)
        name, dot, option = key.partition(".")
        if not dot:
            raise ValueError(f"{text!r}; expected a mechanism and its option as NAME.OPTION=VALUE, such as {EXAMPLE}")
        chosen.setdefault(name, {})[option] = parse_value(value)
    for name, options in chosen.items():
        cls = kv_mechanism(name) if is_kv(name) else mechanism(name)
        make_config(cls, name, options, dim=dim, depth=depth)
    return chosen


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
        "forward_flops": stack.facts.forward_flops,
        **state_figures(stack),
    }


def describe_kv(name: str, dim: int, depth: int, /, **options: Any) -> dict[str, Any]:
    """The same of a KV mechanism, where every second sublayer is an attention with heads of 64 channels."""
    check_sizes(name, dim=dim, depth=depth)
    cls, heads, layers = kv_mechanism(name), max(1, dim // 64), max(1, depth // 2)
    with torch.device("meta"):
        stack = KVStack(name, head_dim=dim // heads, depth=layers, **options)
    facts = stack.facts(heads=heads)
    return {
        "name": name,
        "kind": "kv",
        "paper": cls.paper,
        "state": cls.holds,
        "dim": dim,
        "depth": depth,
        "attention_layers": layers,
        "heads": heads,
        "options": dataclasses.asdict(stack.config),
        **dataclasses.asdict(facts),
        "forward_flops": facts.forward_flops,
        **state_figures(stack),
    }


def state_figures(stack: DepthStack | KVStack) -> dict[str, float]:
    at_cut, in_read = stack.state_widths()
    return {"state_at_cut_in_widths": at_cut, "state_in_read_in_widths": in_read}


def widths(row: dict[str, Any]) -> str:
    """Both sizes of a state, as a table shows them."""
    return "/".join(f"{row[f'state_{where}_in_widths']:.1f}".removesuffix(".0") for where in ("at_cut", "in_read"))


def in_widths(row: dict[str, Any]) -> str:
    """FLOPs per token and sublayer, over D; marked where reads share passes (*) and where none are stated (~)."""
    if row["forward_flops"] is None:
        return "–"
    size = row["forward_flops"] / (row["dim"] * row["depth"])
    mark = "~" if row["flops"] is None else "*" if row.get("flops_two_phase") is not None else ""
    return (f"{size:,.0f}" if size >= 100 else f"{size:.3g}") + mark


def parameters_word(row: dict[str, Any]) -> str:
    return "–" if row["parameters"] is None else f"{row['parameters']:,}"


def flops_words(row: dict[str, Any]) -> str:
    """FLOPs of the forward pass per token, for people to read."""
    if row["forward_flops"] is None:
        return "not stated by the mechanism; training counts 2 per parameter"
    words = f"{row['forward_flops']:,}  ({in_widths(row).rstrip('*~')}·D per sublayer)"
    if row["flops"] is None:
        return words + "; not stated by the mechanism, 2 per parameter are counted"
    if row.get("flops_two_phase") is not None:
        words += f"; {row['flops']:,} if each site reads separately"
    return words


def print_values(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    title = "Inside attention: values mixed over depth, beside any of the above"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("mechanism", "arXiv", "state", "params", "FLOPs"):
        table.add_column(heading, no_wrap=heading == "mechanism")
    for row in rows:
        paper = row["paper"].removeprefix("arXiv ")
        table.add_row(row["name"], paper, f"{row['state']} {widths(row)}·K", parameters_word(row), in_widths(row))
    terminal = console()
    terminal.print(table)
    terminal.print("K        width of all key-value heads together")
    if rows:
        layers, heads = rows[0]["attention_layers"], rows[0]["heads"]
        terminal.print(f"in {layers} attention layers of {heads} query and key-value heads")
    terminal.print("\nEquations, options and code of one mechanism: depthmix show NAME")


def print_table(rows: list[dict[str, Any]], dim: int, depth: int, chosen: Sequence[str] = ()) -> None:
    options = f"default options{' but ' + ', '.join(chosen) if chosen else ''}"
    terminal = console()
    print_wrapped(f"Mechanisms with {options} at D = {dim}, L = {depth} sublayers")
    table = figures_table(rows, dim)
    if terminal.measure(table, options=terminal.options.update(max_width=WIDE)).maximum > terminal.width:
        table = figures_table(rows, dim, with_papers=False)
    terminal.print(table)
    terminal.print("state    widths D per token: at a cut / during a read, with derived results")
    terminal.print("rank     semiseparable rank of the depth mixing matrix M, generic coefficients")
    terminal.print("traffic  widths D read + written per token and sublayer")
    terminal.print("FLOPs    forward pass, per token and sublayer, divided by D")
    terminal.print("  *      two-phase: queries are known in advance, so sites share passes")
    if any(row["flops"] is None for row in rows):
        terminal.print("  ~      not stated by the mechanism; 2 per parameter are counted")
    terminal.print("PreNorm  a fresh stack computes the PreNorm network exactly, up to scale, or not")
    for row in rows:
        if row["note"]:
            terminal.print(f"{row['name']}: {row['note']}")
    terminal.print()


def figures_table(rows: list[dict[str, Any]], dim: int, *, with_papers: bool = True) -> Any:
    """One row for each mechanism; without the papers where 80 columns hold no more."""
    from rich import box
    from rich.table import Table

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "mechanism": lambda row: row["name"],
        "arXiv": lambda row: row["paper"].removeprefix("arXiv ").replace(", ", "\n"),
        "state": lambda row: f"{widths(row)}·D",
        "params": lambda row: f"{row['parameters']:,}",
        "rank": lambda row: "–" if row["rank"] is None else str(row["rank"]),
        "traffic": lambda row: f"{row['reads'] / dim:.3g}+{row['writes'] / dim:.3g}",
        "FLOPs": in_widths,
        "Pre-\nNorm": lambda row: row["preserves_prenorm"].removeprefix("up to "),
    }
    shown = {name: cell for name, cell in columns.items() if with_papers or name != "arXiv"}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for name in shown:
        words = name in ("mechanism", "arXiv", "Pre-\nNorm")
        table.add_column(name, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for cell in shown.values()))
    return table
