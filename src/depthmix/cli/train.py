"""`depthmix train`: one dial, everything else derived and open to change; a second start in a folder goes on."""

from __future__ import annotations

import dataclasses
import json as json_format
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from depthmix.cli.shared import Several
from depthmix.ops import keep_freed_memory
from depthmix.support.checks import split_pair
from depthmix.support.terminal import Progress, say
from depthmix.training import BadLoss, CheckpointError, Interrupted, Result, TrainConfig, override, train
from depthmix.training.dial import dial_tokens, split_mixer
from depthmix.training.overrides import check_excluding, override_all
from depthmix.training.ranks import main_process


def run(
    folder: Path | None = None,
    mixer: str | None = None,
    depth: int | None = None,
    dim: int | None = None,
    data: str | None = None,
    tokenizer: str | None = None,
    config: Path | None = None,
    tokens: float | None = None,
    steps: int | None = None,
    seed: int | None = None,
    set_: Annotated[Several, tyro.conf.arg(name="set", aliases=("-s",), metavar="KEY=VALUE")] = (),
    restart: bool = False,
    print_config: bool = False,
    every: int = 1,
    json: bool = False,
) -> int:
    """Train a decoder; progress on stderr, the result on stdout.

    Exit code 1 where training stopped by itself (a bad loss, a full disk), 130 after Ctrl-C; both can go on.

    Args:
        folder: of the run; one that holds an unfinished run goes on with it. By default runs/MIXER-DEPTH.
        mixer: a mechanism; a KV site alone goes with the residual; attnres+value_residual has both.
        depth: the dial: sublayers, attention and MLP counted separately; width, rate, batch and length follow (12).
        dim: width; by default as the dial derives it.
        data: stdlib (the default), a folder, a text, JSONL or Parquet file, or hf:NAME.
        tokenizer: bytes (the default), bpe:4096, or a tokenizer.json.
        config: a TOML file to begin with instead of the dial, such as the config.toml of another run.
        tokens: to train on; by default 20 for each parameter.
        steps: to train for; prevails over tokens.
        seed: of weights and data order.
        set_: any field by its dotted key, such as optimizer.lr=1e-3 or mixer.block_sublayers=4; once for each.
        restart: begin anew and remove what the folder holds of an earlier run.
        print_config: print the resolved configuration as TOML and end.
        every: without a terminal, print a line each so many steps.
        json: print the result as one object.
    """
    flags = {"data.source": data, "data.tokenizer": tokenizer, "run.steps": steps, "run.seed": seed}
    pairs = [
        *(split_pair(text, "optimizer.lr=1e-3") for text in set_),
        *((key, value) for key, value in flags.items() if value is not None),
    ]
    chosen = resolve_config(folder, mixer, depth, dim, config, tokens, pairs)
    if print_config:
        print(chosen.to_toml(), end="")
        return 0
    if chosen.run.device == "cpu":
        keep_freed_memory()
    result = train_until_stopped(chosen, restart, TrainingProgress(every))
    if isinstance(result, int):
        return result
    if not main_process():
        return 0
    if json:
        print(json_format.dumps(dataclasses.asdict(result), indent=2))
        return 0
    print(
        f"{chosen.run.folder}: validation loss {result.validation_loss:.4f}, {result.bits_per_byte:.4f} bits per byte "
        f"after {result.tokens:,} tokens; {result.tokens_per_second:,.0f} tokens/s, "
        f"{result.peak_memory_bytes / 2**20:,.0f} MiB, {result.flops:.3g} FLOPs"
    )
    return 0


def train_until_stopped(chosen: TrainConfig, restart: bool, progress: TrainingProgress) -> Result | int:
    """The result, or the exit code of a run that stopped; why it did is then on stderr."""
    resume = f"To go on: depthmix train --folder {shlex.quote(chosen.run.folder)}"
    try:
        result = train(chosen, resume=not restart, report=progress.report)
    except FileNotFoundError:
        raise
    except (BadLoss, CheckpointError, OSError) as error:
        reason, code = str(error), 1
    except Interrupted as error:
        reason, code = f"{error}. {resume}", 130
    except KeyboardInterrupt:  # before the first step, or a second time
        reason, code = f"stopped at once, what was not in a checkpoint is lost. {resume}", 130
    else:
        if progress.display is None and main_process():
            say(f"depthmix: {chosen.run.folder} was complete already; --restart begins anew")
        return result
    finally:
        progress.end()
    if main_process():
        say(f"depthmix: {reason}")
    return code


def resolve_config(
    folder: Path | None,
    mixer: str | None,
    depth: int | None,
    dim: int | None,
    file: Path | None,
    tokens: float | None,
    pairs: list[tuple[str, Any]],
) -> TrainConfig:
    """File or dial first, then dotted keys, the later ones last. A folder alone says it all, to begin anew too."""
    if tokens is not None and not 0 < tokens < math.inf:
        raise ValueError(f"tokens={tokens}; expected a number above 0")
    saved = None if folder is None else folder / "config.toml"
    if saved is not None and saved.is_file() and file is None and depth is None and dim is None and mixer is None:
        file = saved
    keys = dict(pairs)
    if file is not None:
        for name, key, given in (("depth", "layers", depth), ("dim", "dim", dim)):
            if given is not None:
                raise ValueError(f"{name}={given} beside config={file}; expected one of them, or set model.{key}")
        if not file.is_file():
            raise FileNotFoundError(f"no configuration at {file}; expected a TOML file such as a run's config.toml")
        config = TrainConfig.from_file(file)
        children = {"mixer": "residual", "kv_mixer": None, **split_mixer(mixer)} if mixer is not None else {}
        for name, value in children.items():
            config = override(config, f"model.{name}", value)
    else:
        # Fields of the model that others follow from must be there when these are derived.
        sizes: dict[str, Any] = {
            name: parse_whole(name, keys[f"model.{name}"]) for name in ("dim", "vocab_size") if f"model.{name}" in keys
        }
        if dim is not None:
            sizes["dim"] = dim
        tokenizer = keys.get("data.tokenizer", "bytes")
        dial = 12 if depth is None else depth
        config = TrainConfig.from_dial(dial, mixer or "residual", tokenizer=tokenizer, **sizes)
    config = override_all(config, [*pairs, *([] if folder is None else [("run.folder", str(folder))])])
    check_excluding(config, keys)
    if tokens is None and file is None:
        tokens = dial_tokens(config.model)
    if tokens is not None and "run.steps" not in keys:
        config = override(config, "run.steps", max(1, round(tokens / config.tokens_per_step)))
    return config


def parse_whole(name: str, value: str) -> int:
    if not value.isdigit():
        raise ValueError(f"model.{name}={value}; expected a whole number")
    return int(value)


class TrainingProgress:
    """Progress of a run from its events: a bar on a terminal, else a line for every `every`-th step."""

    def __init__(self, every: int) -> None:
        self.every = max(1, every)
        self.display: Progress | None = None  # before the first event nothing has begun
        self.steps, self.validation = 0, ""

    def report(self, event: Mapping[str, Any]) -> None:
        kind, step = event["kind"], event["step"]
        if kind == "begin":
            self.begin(event)
        elif kind == "validation":
            self.validation = f"  validation {event['loss']:.4f}"
            say(f"step {step}/{self.steps}{self.validation}  {event['bits_per_byte']:.4f} bits per byte")
        elif kind == "skipped":
            say(f"step {step}/{self.steps}  skipped: {event['problem']}")
        elif kind == "train" and self.display is not None:
            self.show_step(self.display, event)

    def begin(self, event: Mapping[str, Any]) -> None:
        self.steps, first = event["steps"], event["step"]
        length = f"goes on after step {first} of {self.steps}" if first else f"{self.steps} steps"
        say(f"{event['parameters']:,} parameters, {length}")
        if event["layout"]:
            say(f"depth mixing: {event['layout']}")
        self.display = Progress(self.steps, first=first, every=0)

    def show_step(self, display: Progress, event: Mapping[str, Any]) -> None:
        step, speed = event["step"], f"{event['tokens_per_second']:,.0f} tokens/s"
        position = f"step {step}/{self.steps}  loss {event['loss']:.4f}"
        if display.on_terminal:
            display.update(step, f"{position}{self.validation}  {speed}")
        elif step % self.every == 0 or step == self.steps:
            display.update(step, f"{position}  lr {event['lr']:.3g}  norm {event['grad_norm']:.3g}  {speed}")

    def end(self) -> None:
        if self.display is not None:
            self.display.close()
