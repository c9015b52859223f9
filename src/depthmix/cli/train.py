"""`depthmix train`: one dial, everything else derived and open to change; a second start in a folder goes on."""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from depthmix.analysis.trace import trace
from depthmix.training.checkpoint import CheckpointError
from depthmix.training.config import TrainConfig, mechanisms, override
from depthmix.training.loop import BadLoss, Interrupted, train
from depthmix.training.ranks import main_process


def run(
    folder: Path | None = None,
    mixer: str | None = None,
    depth: int | None = None,
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
        config: a TOML file to begin with instead of the dial, such as the config.toml of another run.
        tokens: to train on; by default 20 for each parameter.
        steps: to train for; prevails over tokens.
        seed: of weights and data order.
        set_: any field by its dotted key, such as optimizer.lr=1e-3 or mixer.block_sublayers=4; once for each.
        restart: begin anew and remove what the folder holds.
        print_config: print the resolved configuration as TOML and end.
        every: without a terminal, print a line each so many steps.
        json: print the result as one object.
    """
    chosen = resolve(folder, mixer, depth, config, tokens, steps, seed, set_, restart)
    if print_config:
        print(chosen.to_toml())
        return 0
    with progress(every) as report:
        try:
            found = train(chosen, resume=not restart, report=report, trace=trace)
        except FileNotFoundError:
            raise
        except (BadLoss, CheckpointError, OSError) as error:
            print(f"depthmix: {error}", file=sys.stderr)
            return 1
        except Interrupted as error:
            if main_process():
                print(f"depthmix: {error}. To go on: depthmix train --folder {chosen.run.folder}", file=sys.stderr)
            return 130
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


def resolve(
    folder: Path | None,
    mixer: str | None,
    depth: int | None,
    file: Path | None,
    tokens: float | None,
    steps: int | None,
    seed: int | None,
    changes: tuple[str, ...],
    restart: bool,
) -> TrainConfig:
    """File or dial first, then flags, then dotted keys. A folder alone says it all."""
    pairs = [split(change) for change in changes]
    there = None if folder is None or restart else folder / "config.toml"
    if there is not None and there.is_file() and file is None and depth is None and mixer is None:
        file = there
    if file is not None:
        if depth is not None:
            raise ValueError(f"depth={depth} beside config={file}; expected one of them, or set model.layers")
        if not file.is_file():
            raise FileNotFoundError(f"no configuration at {file}; expected a TOML file such as a run's config.toml")
        found = TrainConfig.from_toml(file.read_text(encoding="utf-8"), str(file))
        for name, value in mechanisms(mixer).items() if mixer is not None else ():
            found = override(found, f"model.{name}", value)
    else:
        # Fields of the model that others follow from must be there when these are derived.
        first: dict[str, Any] = {
            k.removeprefix("model."): v for k, v in pairs if k in ("model.dim", "model.vocab_size")
        }
        tokenizer = dict(pairs).get("data.tokenizer", "bytes")
        sizes: dict[str, Any] = {name: whole(name, value) for name, value in first.items()}
        found = TrainConfig.from_dial(
            12 if depth is None else depth, mixer or "residual", tokenizer=tokenizer, tokens=tokens, **sizes
        )
    for key, value in pairs:
        found = override(found, key, value)
    if tokens is not None:
        found = override(found, "run.steps", max(1, round(tokens / found.tokens_per_step)))
    for key, number in (
        ("run.steps", steps),
        ("run.seed", seed),
        ("run.folder", None if folder is None else str(folder)),
    ):
        found = found if number is None else override(found, key, number)
    return found


def split(change: str) -> tuple[str, str]:
    key, sign, value = change.partition("=")
    if not sign or not key:
        raise ValueError(f"set {change!r}; expected KEY=VALUE, such as optimizer.lr=1e-3")
    return key.strip(), value.strip()


def whole(name: str, value: str) -> int:
    if not value.isdigit():
        raise ValueError(f"model.{name}={value}; expected a whole number")
    return int(value)


class progress:
    """A bar with the time left on a terminal, else a line each `every` steps. Both on stderr."""

    def __init__(self, every: int) -> None:
        self.every = max(1, every)
        self.steps, self.first, self.begun, self.last = 0, 0, time.monotonic(), ""
        self.bar: Any = None

    def __enter__(self) -> Callable[[Mapping[str, Any]], None]:
        if sys.stderr.isatty() and main_process():
            from rich import progress as rich
            from rich.console import Console

            columns = ("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
            self.bar = rich.Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("training")
        return self.report

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def report(self, event: Mapping[str, Any]) -> None:
        kind, step = event["kind"], event["step"]
        if kind == "begin":
            self.steps, self.first, self.begun = event["steps"], step, time.monotonic()
            if self.bar is not None:
                self.bar.update(self.task, total=self.steps, completed=step)
            goes = f"goes on after step {step} of {self.steps}" if step else f"{self.steps} steps"
            self.say(f"{event['parameters']:,} parameters, {goes}")
        elif kind == "validation":
            self.last = f"validation {event['loss']:.4f}"
            self.say(f"step {step}/{self.steps}  {self.last}  {event['bits_per_byte']:.4f} bits per byte")
        elif kind == "skipped":
            self.say(f"step {step}/{self.steps}  skipped: bad loss {event['loss']}")
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
            self.bar.console.print(line, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)
