"""`depthmix train`: one dial, everything else derived and open to change; a second start in a folder goes on."""

from __future__ import annotations

import dataclasses
import json as json_format
import math
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from depthmix.ops import keep_freed_memory
from depthmix.support.checks import split_pair
from depthmix.support.terminal import console
from depthmix.training import BadLoss, CheckpointError, Interrupted, Result, TrainConfig, override, train
from depthmix.training.dial import dial_tokens, split_mixer
from depthmix.training.overrides import check_excluding
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
    set_: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", aliases=("-s",), metavar="KEY=VALUE")
    ] = (),
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
    chosen = resolve(folder, mixer, depth, dim, config, tokens, pairs)
    if print_config:
        print(chosen.to_toml(), end="")
        return 0
    if chosen.run.device == "cpu":
        keep_freed_memory()
    found = attempt(chosen, restart, Progress(every))
    if isinstance(found, int):
        return found
    if not main_process():
        return 0
    if json:
        print(json_format.dumps(dataclasses.asdict(found), indent=2))
        return 0
    print(
        f"{chosen.run.folder}: validation loss {found.validation_loss:.4f}, {found.bits_per_byte:.4f} bits per byte "
        f"after {found.tokens:,} tokens; {found.tokens_per_second:,.0f} tokens/s, "
        f"{found.peak_memory_bytes / 2**20:,.0f} MiB, {found.flops:.3g} FLOPs"
    )
    return 0


def attempt(chosen: TrainConfig, restart: bool, progress: Progress) -> Result | int:
    """The result, or the exit code of a run that stopped; why it did is then on stderr."""
    again = f"To go on: depthmix train --folder {shlex.quote(chosen.run.folder)}"
    try:
        found = train(chosen, resume=not restart, report=progress.report)
    except FileNotFoundError:
        raise
    except (BadLoss, CheckpointError, OSError) as error:
        words, code = str(error), 1
    except Interrupted as error:
        words, code = f"{error}. {again}", 130
    except KeyboardInterrupt:  # before the first step, or a second time
        words, code = f"stopped at once, what was not in a checkpoint is lost. {again}", 130
    else:
        if not progress.begun and main_process():
            print(f"depthmix: {chosen.run.folder} was complete already; --restart begins anew", file=sys.stderr)
        return found
    finally:
        progress.end()
    if main_process():
        print(f"depthmix: {words}", file=sys.stderr)
    return code


def resolve(
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
    there = None if folder is None else folder / "config.toml"
    if there is not None and there.is_file() and file is None and depth is None and dim is None and mixer is None:
        file = there
    keys = dict(pairs)
    if file is not None:
        for name, key, given in (("depth", "layers", depth), ("dim", "dim", dim)):
            if given is not None:
                raise ValueError(f"{name}={given} beside config={file}; expected one of them, or set model.{key}")
        if not file.is_file():
            raise FileNotFoundError(f"no configuration at {file}; expected a TOML file such as a run's config.toml")
        found = TrainConfig.from_file(file)
        children = {"mixer": "residual", "kv_mixer": None, **split_mixer(mixer)} if mixer is not None else {}
        for name, value in children.items():
            found = override(found, f"model.{name}", value)
    else:
        # Fields of the model that others follow from must be there when these are derived.
        sizes: dict[str, Any] = {
            name: whole(name, keys[f"model.{name}"]) for name in ("dim", "vocab_size") if f"model.{name}" in keys
        }
        if dim is not None:
            sizes["dim"] = dim
        tokenizer = keys.get("data.tokenizer", "bytes")
        found = TrainConfig.from_dial(12 if depth is None else depth, mixer or "residual", tokenizer=tokenizer, **sizes)
    for key, value in [*pairs, *([] if folder is None else [("run.folder", str(folder))])]:
        found = override(found, key, value)
    check_excluding(found, keys)
    if tokens is None and file is None:
        tokens = dial_tokens(found.model)
    if tokens is not None and "run.steps" not in keys:
        found = override(found, "run.steps", max(1, round(tokens / found.tokens_per_step)))
    return found


def whole(name: str, value: str) -> int:
    if not value.isdigit():
        raise ValueError(f"model.{name}={value}; expected a whole number")
    return int(value)


class Progress:
    """A bar with the time left on a terminal, else a line each `every` steps. Both on stderr."""

    def __init__(self, every: int) -> None:
        self.every = max(1, every)
        self.steps, self.first, self.begun, self.last = 0, 0, 0.0, ""
        self.bar: Any = None

    def begin(self, event: Mapping[str, Any]) -> None:
        """Not before: what prepares the data writes to the terminal itself."""
        self.steps, self.first, self.begun = event["steps"], event["step"], time.monotonic()
        goes = f"goes on after step {self.first} of {self.steps}" if self.first else f"{self.steps} steps"
        self.say(f"{event['parameters']:,} parameters, {goes}")
        if event["layout"]:
            self.say(f"depth mixing: {event['layout']}")
        if sys.stderr.isatty():
            from rich import progress as rich

            columns = ("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
            self.bar = rich.Progress(*columns, console=console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("training", total=self.steps, completed=self.first)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def report(self, event: Mapping[str, Any]) -> None:
        kind, step = event["kind"], event["step"]
        if kind == "begin":
            self.begin(event)
        elif kind == "validation":
            self.last = f"validation {event['loss']:.4f}"
            self.say(f"step {step}/{self.steps}  {self.last}  {event['bits_per_byte']:.4f} bits per byte")
        elif kind == "skipped":
            self.say(f"step {step}/{self.steps}  skipped: {event['problem']}")
        elif kind == "train" and self.bar is not None:
            words = f"loss {event['loss']:.4f}  {self.last}  {event['tokens_per_second']:,.0f} tokens/s"
            self.bar.update(self.task, completed=step, description=words)
        elif kind == "train" and (step % self.every == 0 or step == self.steps):
            left = (time.monotonic() - self.begun) / (step - self.first) * (self.steps - step)
            self.say(
                f"step {step}/{self.steps}  loss {event['loss']:.4f}  lr {event['lr']:.3g}  "
                f"norm {event['grad_norm']:.3g}  {event['tokens_per_second']:,.0f} tokens/s  {left:,.0f} s left"
            )

    def say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.console.print(line)
        else:
            print(line, file=sys.stderr, flush=True)
