"""`depthmix train`: a dial, a preset or a file, and every field open to change; a second start resumes."""

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
from depthmix.training import (
    BadLoss,
    CheckpointError,
    Interrupted,
    Result,
    TrainConfig,
    override,
    preset_config,
    rule_config,
    train,
)
from depthmix.training.dial import dial_tokens
from depthmix.training.overrides import check_excluding, override_all
from depthmix.training.ranks import main_process
from depthmix.training.recipes import RULE, chosen_mixers, describe_recipe


def run(
    folder: Path | None = None,
    mixer: str | None = None,
    depth: int | None = None,
    dim: int | None = None,
    data: str | None = None,
    tokenizer: str | None = None,
    preset: str | None = None,
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

    Exit code 1 where training stopped by itself (a bad loss, a full disk), 130 after Ctrl-C; both can be resumed.

    Args:
        folder: of the run; if it contains an unfinished run, training resumes. By default runs/MIXER-DEPTH.
        mixer: a mechanism; a KV site alone goes with the residual; attnres+value_residual has both.
        depth: the dial: sublayers, attention and MLP counted separately; width, rate, batch and length follow (12).
        dim: width; by default as the dial derives it.
        data: stdlib (the default), a folder, a text, JSONL or Parquet file, or hf:NAME.
        tokenizer: bytes (the default), bpe:4096, or a tokenizer.json.
        preset: how a paper trained one of its models, such as attnres-194m, instead of the dial; or attnres with
            --depth and --dim: the rule of that paper's table at another size.
        config: a TOML file to begin with instead of the dial, such as the config.toml of another run.
        tokens: to train on; by default 20 per parameter, or as many as the preset has.
        steps: to train for; prevails over tokens.
        seed: of weights and data order.
        set_: any field by its dotted key, such as optimizer.lr=1e-3 or mixer.block_sublayers=4; repeat the flag for
            each field.
        restart: train from step 0 and remove what the folder holds of an earlier run.
        print_config: print the resolved configuration as TOML and end.
        every: without a terminal, print a line every N steps.
        json: print the result as one object.
    """
    flags = {"data.source": data, "data.tokenizer": tokenizer, "run.steps": steps, "run.seed": seed}
    pairs = [
        *(split_pair(text, "optimizer.lr=1e-3") for text in set_),
        *((key, value) for key, value in flags.items() if value is not None),
    ]
    chosen = resolve_config(folder, mixer, depth, dim, preset, config, tokens, pairs)
    numbers = "" if preset is None else describe_recipe(preset, chosen)
    if print_config:
        print(f"# {numbers}\n{chosen.to_toml()}" if numbers else chosen.to_toml(), end="")
        return 0
    if numbers and main_process():
        say(numbers)
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
    resume = f"To resume: depthmix train --folder {shlex.quote(chosen.run.folder)}"
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
            say(f"depthmix: {chosen.run.folder} was complete already; --restart trains it again from step 0")
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
    preset: str | None,
    file: Path | None,
    tokens: float | None,
    pairs: list[tuple[str, Any]],
) -> TrainConfig:
    """File, preset or dial first, then dotted keys, the later ones last. A folder alone says it all, to restart too."""
    if tokens is not None and not 0 < tokens < math.inf:
        raise ValueError(f"tokens={tokens}; expected a number above 0")
    saved = None if folder is None else folder / "config.toml"
    if saved is not None and saved.is_file() and all(given is None for given in (file, preset, depth, dim, mixer)):
        file = saved
    check_one_start(file, preset, depth, dim)
    keys = dict(pairs)
    if file is not None:
        config = from_file(file, mixer)
    elif preset is not None and preset != RULE:
        config = preset_config(preset, mixer, tokenizer=keys.get("data.tokenizer"))
    else:
        # Fields of the model that others follow from must be there when these are derived.
        sizes: dict[str, Any] = {
            name: parse_whole(name, keys[f"model.{name}"]) for name in ("dim", "vocab_size") if f"model.{name}" in keys
        }
        if dim is not None:
            sizes["dim"] = dim
        sizes["tokenizer"] = keys.get("data.tokenizer", "bytes")
        dial = 12 if depth is None else depth
        if preset == RULE:
            config = rule_config(dial, mixer=mixer, tokens=tokens, **sizes)
        else:
            optimizer = keys.get("optimizer.name", "muon")
            config = TrainConfig.from_dial(dial, mixer or "residual", optimizer=optimizer, **sizes)
    recipe_tokens = config.run.steps * config.tokens_per_step
    config = override_all(config, [*pairs, *([] if folder is None else [("run.folder", str(folder))])])
    check_excluding(config, keys)
    if tokens is None and file is None:
        tokens = dial_tokens(config.model) if preset is None else recipe_tokens
    if tokens is not None and "run.steps" not in keys:
        config = override(config, "run.steps", max(1, round(tokens / config.tokens_per_step)))
    return config


def check_one_start(file: Path | None, preset: str | None, depth: int | None, dim: int | None) -> None:
    """A file, a preset and the dial exclude each other; the rule of a table takes the dial's sizes."""
    if file is not None and preset is not None:
        raise ValueError(f"preset={preset} beside config={file}; expected one of them")
    start = f"config={file}" if file is not None else f"preset={preset}" if preset not in (None, RULE) else None
    for name, key, given in (("depth", "layers", depth), ("dim", "dim", dim)):
        if start is not None and given is not None:
            other = f", or --preset {RULE} for other sizes" if file is None else ""
            raise ValueError(f"{name}={given} beside {start}; expected one of them, or set model.{key}{other}")


def from_file(file: Path, mixer: str | None) -> TrainConfig:
    if not file.is_file():
        raise FileNotFoundError(f"no configuration at {file}; expected a TOML file such as a run's config.toml")
    config = TrainConfig.from_file(file)
    for name, value in chosen_mixers(mixer).items():
        config = override(config, f"model.{name}", value)
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
        length = f"resumes after step {first} of {self.steps}" if first else f"{self.steps} steps"
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
