"""`depthmix show`: one mechanism, its equations against the lines that compute them, its options and its cost.

Or a decoder by its name, its configuration and what it counts.
"""

from __future__ import annotations

import dataclasses
import inspect
import json as json_format
import re
import typing
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from depthmix.cli.list import describe, describe_kv, flops_words, on_meta, parameters_word, widths
from depthmix.cli.shared import flag, switch
from depthmix.cli.show_preset import show_preset
from depthmix.mechanisms import DepthMixer, DepthStack, KVMixer, is_kv, kv_mechanism, make_config, mechanism
from depthmix.mechanisms.registry import naming_plugin
from depthmix.support.checks import parse_value, split_pair
from depthmix.support.terminal import console, styled, wrapped

TAG = re.compile(r"\((\w+)\)")
INDENT = " " * 8


EXAMPLES = (
    "depthmix show block_attnres --options block_sublayers=4 heads=2",
    "depthmix show --preset kimi-linear-48b",
)


def run(
    name: Annotated[
        str | None, tyro.conf.Positional, flag("A name from `depthmix list`.", "[NAME]", default="")
    ] = None,
    options: Annotated[
        tuple[str, ...],
        flag("Options of the mechanism, such as block_sublayers=4 heads=2.", "KEY=VALUE ...", default="its defaults"),
    ] = (),
    dim: Annotated[int, flag("Width D for the figures.", "D")] = 768,
    depth: Annotated[int, flag("Number of sublayers L for the figures.", "L")] = 24,
    dtype: Annotated[str, flag("Data type of the stream, for the figures in bytes.", "DTYPE")] = "bfloat16",
    preset: Annotated[
        str | None,
        flag(
            "Instead of a mechanism: a model of one of the papers, such as attnres-194m, or all for a list.",
            "NAME",
            default="",
        ),
    ] = None,
    json: Annotated[bool, switch("Print a JSON object instead of text.")] = False,
) -> int:
    """Show a mechanism's equations beside its code, its options and its cost.

    With --preset, show a decoder instead: its configuration, its layers, its parameters and its cache.
    """
    if (name is None) == (preset is None):
        raise ValueError("show takes one of: NAME, a mechanism from `depthmix list`, or --preset NAME, such as all")
    if preset is not None:
        return show_preset(preset, json)
    assert name is not None
    page: dict[str, Any]
    with naming_plugin(name, passing=ValueError):
        chosen = parse_options(options)
        if is_kv(name):
            kv = kv_mechanism(name)
            make_config(kv, name, chosen, dim=dim, depth=depth)  # no other argument of a stack
            page = {**describe_kv(name, dim, depth, **chosen), **page_of(kv)}
        else:
            make_config(mechanism(name), name, chosen, dim=dim, depth=depth)  # no other argument of a stack
            stack = on_meta(name, dim, depth, **chosen)
            page = {**describe(stack), "chosen": list(options), **page_of(type(next(iter(stack))))}
            page["cost"] = cost(stack, dtype)
    print(json_format.dumps(page, indent=2, ensure_ascii=False, default=str)) if json else print_page(page)
    return 0


def page_of(cls: type[DepthMixer] | type[KVMixer]) -> dict[str, Any]:
    """What a class says of itself in words."""
    return {
        "description": inspect.getdoc(cls) or "",
        "equations": equations(cls),
        "option_table": option_table(cls),
    }


def parse_options(pairs: tuple[str, ...]) -> dict[str, Any]:
    split = (split_pair(pair, "num_blocks=8") for pair in pairs)
    return {key: parse_value(text) for key, text in split}


def equations(cls: type[DepthMixer] | type[KVMixer]) -> list[dict[str, Any]]:
    """Each equation of the docstring, marked (1), (2), …, with the lines of code that carry its mark."""
    lines = marked_lines(cls)
    rows = []
    for line in (inspect.getdoc(cls) or "").splitlines():
        if match := re.match(r"\((\w+)\) (.+)", line.strip()):
            rows.append({"mark": match[1], "equation": match[2], "code": lines.get(match[1], [])})
    return rows


def marked_lines(cls: type[DepthMixer] | type[KVMixer]) -> dict[str, list[str]]:
    """Lines that end in a comment with marks, of the class and of the classes that it builds upon."""
    lines: dict[str, list[str]] = {}
    for owner in cls.__mro__:
        if owner in (DepthMixer, KVMixer):
            break
        source, start = inspect.getsourcelines(owner)
        file = Path(inspect.getsourcefile(owner) or "").name
        marked: dict[str, list[str]] = {}
        counting = lines_of(vars(owner).get("facts"))  # FLOPs name the equations they belong to
        for number, line in enumerate(source, start):
            if number in counting:
                continue
            code, hash_, comment = line.partition("  # ")
            if hash_ and comment.lstrip().startswith("("):
                for mark in TAG.findall(comment):
                    marked.setdefault(mark, []).append(f"{file}:{number}  {code.strip()}")
        lines = {**marked, **lines}  # a subclass says its own equations anew
    return lines


def lines_of(method: Any) -> range:
    """Line numbers of a method in its file; none if there is no method."""
    if method is None:
        return range(0)
    source, start = inspect.getsourcelines(getattr(method, "__func__", method))
    return range(start, start + len(source))


def option_table(cls: type[DepthMixer] | type[KVMixer]) -> list[dict[str, str]]:
    hints = typing.get_type_hints(cls.Config)
    return [
        {
            "option": field.name,
            "default": repr(field.default),
            "takes": takes(hints[field.name]),
            "meaning": field.metadata.get("meaning", ""),
        }
        for field in dataclasses.fields(cls.Config)
    ]


def takes(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(repr, typing.get_args(hint)))
    return getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)


def cost(stack: DepthStack, dtype: str) -> dict[str, Any]:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point or kind.itemsize < 2:  # no stream is in float8
        raise ValueError(f"dtype={dtype!r}; expected a floating-point dtype of torch, such as bfloat16")
    specs = [stack.spec(index) for index in range(stack.depth + 1)]
    facts = stack.facts
    return {
        "dtype": dtype,
        "parameters": facts.parameters,
        "read_bytes_per_token_and_sublayer": facts.reads * kind.itemsize,
        "write_bytes_per_token_and_sublayer": facts.writes * kind.itemsize,
        "state_at_cut_bytes_per_token": max(spec.nbytes(kind, essential=True) for spec in specs),
        "state_in_read_bytes_per_token": max(spec.nbytes(kind) for spec in specs),
    }


def print_page(page: dict[str, Any]) -> None:
    terminal = console()
    title = page["description"].splitlines()[0]
    terminal.print(styled((page["name"], "bold"), f"  {title}\n"))
    for row in page["equations"]:
        terminal.print(styled(f"  ({row['mark']}) ", (row["equation"], "bold")))
        for line in row["code"]:
            terminal.print(styled((wrapped(line, terminal.width, INDENT, INDENT + "    "), "dim")), soft_wrap=True)
    prose = [" ".join(p.split()) for p in page["description"].split("\n\n")[1:] if not p.startswith("(")]
    terminal.print("\n" + "\n\n".join(prose) + "\n")
    if page["option_table"]:
        terminal.print("Options")
        for row in page["option_table"]:
            terminal.print(styled("  ", (f"{row['option']} = {row['default']}", "bold"), f"  ({row['takes']})"))
            terminal.print(wrapped(row["meaning"], terminal.width, INDENT, INDENT), soft_wrap=True)
        terminal.print()
    terminal.print(cost_table(page) if "cost" in page else kv_cost_table(page))


def kv_cost_table(page: dict[str, Any]) -> Any:
    from rich.table import Table

    sizes = f"{page['attention_layers']} attention layers of {page['heads']} heads"
    table = Table(title=f"At D = {page['dim']}, {sizes}", title_justify="left", show_header=False)
    table.add_row("kind of attention", "grouped queries (gqa) only, not kda or mla")
    table.add_row("parameters", parameters_word(page))
    table.add_row("state per token", f"{widths(page)} widths of the key-value heads, at a cut / in a read")
    table.add_row("FLOPs per token, forward", flops_words(page))
    if page["note"]:
        table.add_row("layout", page["note"])
    return table


def cost_table(page: dict[str, Any]) -> Any:
    from rich.table import Table

    facts, figures = page, page["cost"]
    table = Table(title=f"At D = {facts['dim']}, L = {facts['depth']}", title_justify="left", show_header=False)
    defaults = not page["chosen"]  # formulas are those of the default options
    rank = page["rank_formula"] if facts["rank"] is None else str(facts["rank"])
    rank += f"  ({page['rank_formula']})" if defaults and facts["rank"] is not None else ""
    at_cut, in_read = (figures[f"state_{where}_bytes_per_token"] for where in ("at_cut", "in_read"))
    rows = [
        ("parameters", f"{figures['parameters']:,}" + (f"  ({page['parameters_formula']})" if defaults else "")),
        ("semiseparable rank of M", rank),
        ("starts as PreNorm", facts["preserves_prenorm"]),
        ("two-phase", "yes: the queries are known in advance, so sites share passes" if facts["two_phase"] else "no"),
        ("state", page["state"]),
        ("state, widths D per token", f"{widths(page)}, at a cut / in a read"),
        ("state, bytes per token", f"{at_cut:,}/{in_read:,} in {figures['dtype']}"),
        ("reads per token and sublayer", f"{figures['read_bytes_per_token_and_sublayer']:,.0f} bytes"),
        ("writes per token and sublayer", f"{figures['write_bytes_per_token_and_sublayer']:,.0f} bytes"),
        ("FLOPs per token, forward", flops_words(page)),
        *([("layout", facts["note"])] if facts["note"] else []),
    ]
    for key, value in rows:
        table.add_row(key, value)
    return table
