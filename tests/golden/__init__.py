"""What configurations resolve to and how tiny runs learn, kept as files: a changed default or result shows in a diff.

`python -m tests.golden --renew WHY` rewrites what has changed. WHY, one sentence, goes into the file of losses where
these changed: later readers see why the numbers are not the earlier ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import depthmix as dm
from depthmix.mechanisms import is_kv, kv_mechanism, registry
from depthmix.models import PRESETS
from depthmix.training import TrainConfig, preset_config, rule_config, train
from depthmix.training.recipes import RECIPES
from tests.runs import lines, tiny_run

FOLDER = Path(__file__).parent
RENEW = 'If this is meant: .venv/bin/python -m tests.golden --renew "why it changed"'
TOLERANCE = 1e-4  # relative, of a loss

# torch's Muon computes in bfloat16: after 16 steps two kinds of CPU differ by 9e-4 at the dial's rate, by 1e-5 at this.
MUON = {"optimizer.name": "muon", "optimizer.lr": 1e-3}
DEPTHS = (2, 6, 12, 24, 48)  # of the dial
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "residual": ("residual", {}),
    "block_attnres": ("block_attnres", {"mixer.block_sublayers": 2}),
    "attnres with Muon": ("attnres", MUON),
    "denseformer": ("denseformer", {}),
    "mhc": ("mhc", {}),
    "ddl": ("ddl", {}),
    "delta_attnres with Muon": ("delta_attnres", MUON),
    "value_residual, accumulated": ("value_residual", {"run.accumulate": 2}),
    "depth_attention, experts": ("depth_attention", {"model.moe": {"experts": 4, "active": 2, "hidden": 8}}),
    "block_attnres, loop": ("block_attnres", {"model.loop": {"first": 0, "last": 1, "repeats": 2}}),
    "attnres+value_residual, experts, loop, Muon": (
        "attnres+value_residual",
        {
            "model.moe": {"experts": 4, "active": 2, "hidden": 8, "scoring": "sigmoid", "balance": "loss"},
            "model.loop": {"first": 1, "last": 2, "repeats": 2},
            **MUON,
            "schedule.kind": "wsd",
        },
    ),
}


def resolved_mechanisms() -> dict[str, Any]:
    """Every option of each of depthmix's own mechanisms, as it comes by default and in its variants."""
    found: dict[str, Any] = {}
    for name in sorted(registry.DEPTH | registry.KV):
        child = "kv_mixer" if is_kv(name) else "mixer"
        get = kv_mechanism if is_kv(name) else dm.mechanism
        for options in get(name).variants:
            config = dm.DecoderConfig.from_depth(12, **{child: {"name": name, **options}})
            asked = ", ".join(f"{key}={value}" for key, value in options.items())
            found[f"{name}({asked})"] = config.saved()[child]
    return found


def resolved_presets() -> dict[str, Any]:
    return {name: dm.preset(name).saved() for name in PRESETS}


def resolved_recipes() -> dict[str, Any]:
    """How presets train, without their shapes; and what the rule of a table makes of small sizes, whole."""
    recipes = {name: preset_config(name).saved() for name in RECIPES}
    parts = {name: {part: fields for part, fields in r.items() if part != "model"} for name, r in recipes.items()}
    rule = {f"attnres, depth {depth}": rule_config(depth).saved() for depth in (4, 12)}
    return {**parts, **rule, "attnres, 24 x 96": rule_config(24, 96, "residual", tokens=1e6).saved()}


def resolved_dial() -> dict[str, Any]:
    """All that one number decides."""
    found = {f"depth {depth}": TrainConfig.from_dial(depth).saved() for depth in DEPTHS}
    found["depth 12, kimi_linear"] = TrainConfig.from_dial(12, backbone="kimi_linear").saved()
    found["depth 12, attnres+depth_attention, bpe:4096"] = TrainConfig.from_dial(
        12, "attnres+depth_attention", tokenizer="bpe:4096", tokens=5e6
    ).saved()
    return found


CONFIGURATIONS = {
    "mechanisms": resolved_mechanisms,
    "presets": resolved_presets,
    "recipes": resolved_recipes,
    "dial": resolved_dial,
}


def losses(folder: Path, mixer: str, changes: Mapping[str, Any]) -> dict[str, list[float]]:
    """Of a tiny run, of every step and of the validation at its middle and end."""
    torch.set_num_threads(1)
    quiet = {"run.steps": 16, "run.validate_every": 8, "run.checkpoint_every": 0, "run.depth_every": 0}
    config = tiny_run(folder / "run", mixer, **{"run.snapshot_every": 0, **quiet, **changes})
    train(config)
    kinds = ("train", "validation")
    return {kind: [round(line["loss"], 6) for line in lines(folder / "run", kind)] for kind in kinds}


def as_text(found: Any) -> str:
    """As JSON; a list of numbers stands on one line, so that a curve is one line of a diff."""
    text = json.dumps(found, indent=1, ensure_ascii=False)
    return re.sub(r"\[[^][{}]*\]", lambda match: " ".join(match[0].split()), text) + "\n"


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def far(found: Mapping[str, list[float]], kept: Mapping[str, list[float]]) -> str | None:
    """Where the first loss is that differs by more than rounding does, if any."""
    for kind, values in kept.items():
        if len(values) != len(found[kind]):
            return f"{len(found[kind])} {kind} losses; {len(values)} are kept"
        for k, (value, before) in enumerate(zip(found[kind], values, strict=True)):
            if not abs(value - before) <= TOLERANCE * abs(before):
                return f"{kind} loss {k + 1} is {value}; {before} is kept"
    return None
