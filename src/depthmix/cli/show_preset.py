"""`depthmix show --preset`: a decoder by its name: configuration, layers, parameters, cache."""

from __future__ import annotations

import dataclasses
import json as json_format
from itertools import groupby
from typing import Any

import torch

from depthmix.mechanisms.block_attnres import BlockAttnRes
from depthmix.models import PRESETS, DecoderConfig, cache_bytes, count_parameters, count_sublayers
from depthmix.models import preset as find_preset
from depthmix.models.decoder import make_mixers
from depthmix.support.terminal import console, styled

CONTEXT = 2**20  # tokens of the example of a cache


def show_preset(name: str, json: bool) -> int:
    """A decoder in full; of all decoders the counts."""
    presets = [describe_preset(each) for each in (PRESETS if name == "all" else (name,))]
    if json:
        print(json_format.dumps(presets if name == "all" else presets[0], indent=2, ensure_ascii=False))
    elif name == "all":
        print_counts(presets)
    else:
        print_preset(presets[0])
    return 0


def describe_preset(name: str) -> dict[str, Any]:
    config = find_preset(name)
    cache = cache_bytes(config)
    return {
        "name": name,
        "parameters": dataclasses.asdict(count_parameters(config)),
        "configuration": config.to_dict(),
        "layers": {"attention": list(config.attention_kinds), "mlp": mlp_kinds(config)},
        "mixing": describe_mixing(config),
        "sublayers": {kind: dataclasses.asdict(part) for kind, part in count_sublayers(config).items()},
        "cache": {"dtype": "bfloat16", "bytes_per_token": cache.per_token, "bytes_per_row": cache.per_row},
    }


def mlp_kinds(config: DecoderConfig) -> list[str]:
    dense = config.layers if config.moe is None else config.moe.dense_layers
    return ["dense" if layer < dense else "experts" for layer in range(config.layers)]


def describe_mixing(config: DecoderConfig) -> dict[str, Any]:
    """The layout that the mechanism states; for blocks, also where they begin, from 1, and the sources of the head."""
    with torch.device("meta"):
        stack, _ = make_mixers(config)
    found: dict[str, Any] = {"name": stack.name, "sublayers": config.depth, "layout": stack.facts.note}
    if isinstance(stack.out, BlockAttnRes):
        opening = [number for number, mixer in enumerate(stack, 1) if getattr(mixer, "opens_block", False)]
        found |= {"blocks_begin_at_sublayer": opening, "sources_at_the_head": len(stack.out.source_names())}
    return found


def print_preset(preset: dict[str, Any]) -> None:
    from rich.table import Table

    terminal = console()
    terminal.print(styled((preset["name"], "bold"), "\n"))
    parts = (
        ("Configuration", {key: setting(value) for key, value in preset["configuration"].items()}),
        ("Layers, from 0", {kind: ranges(kinds) for kind, kinds in preset["layers"].items()}),
        ("Mixing over depth", {key.replace("_", " "): setting(value) for key, value in preset["mixing"].items()}),
        ("Parameters", {key.replace("_", " "): f"{value:,}" for key, value in preset["parameters"].items()}),
        ("Parameters of one sublayer", {kind: sizes(part) for kind, part in preset["sublayers"].items()}),
        (f"Cache, {preset['cache']['dtype']}", cache_rows(preset["cache"])),
    )
    for title, rows in parts:
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for key, value in rows.items():
            table.add_row(key, value)
        terminal.print(table)


def setting(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def ranges(kinds: list[str]) -> str:
    """The layers of each kind: "mla: 3, 7; kda: 0–2, 4–6"."""
    words = []
    for kind in dict.fromkeys(kinds):
        layers = [layer for layer, other in enumerate(kinds) if other == kind]
        runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])]
        listed = (f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
        words.append(f"{kind} in {len(layers)}: {', '.join(listed)}")
    return "\n".join(words)


def sizes(part: dict[str, int]) -> str:
    used = "" if part["active"] == part["total"] else f", of which a token uses {part['active']:,}"
    return f"{part['total']:,}{used}"


def cache_rows(cache: dict[str, Any]) -> dict[str, str]:
    token, row = cache["bytes_per_token"], cache["bytes_per_row"]
    return {
        "per token": f"{token:,} bytes",
        "per row, constant": f"{row:,} bytes",
        f"row of {CONTEXT:,} tokens": f"{(row + CONTEXT * token) / 2**30:,.2f} GiB",
    }


def millions(count: int) -> str:
    return f"{count / 1e6:,.0f}" if count >= 1e10 else f"{count / 1e6:,.2f}"


def print_counts(presets: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        title="Decoders by name, millions of parameters", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("preset", no_wrap=True)
    headings = {
        "total": "total",
        "active": "active",
        "active_without_embeddings": "active, no\nembeddings",
        "embedding": "embedding\nand head",
        "mixer": "mixer",
    }
    for heading in headings.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in presets:
        table.add_row(row["name"], *(millions(row["parameters"][key]) for key in headings))
    terminal = console()
    terminal.print(table)
    terminal.print("active: parameters that one token uses; experts it is not routed to are left out")
    terminal.print("Configuration and exact counts of one preset: depthmix show --preset NAME")
