"""What `depthmix train` shows of a run while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from depthmix.support.terminal import Progress, format_duration, say
from depthmix.training import TrainConfig


class TrainingProgress:
    """Progress of a run from its events: a bar on a terminal, else a line for every `every`-th step."""

    def __init__(self, config: TrainConfig, every: int, seconds: Callable[[int], float]) -> None:
        self.config, self.every, self.seconds = config, max(1, every), seconds
        self.display: Progress | None = None  # before the first event nothing has begun
        self.steps, self.validation = config.run.steps, ""

    def report(self, event: Mapping[str, Any]) -> None:
        kind, step = event["kind"], event["step"]
        if kind == "begin":
            self.begin(event)
        elif kind == "validation":
            self.validation = f", validation {event['loss']:.4f}"
            say(f"step {step}/{self.steps}{self.validation}, {event['bits_per_byte']:.4f} bits per byte")
        elif kind == "skipped":
            say(f"step {step}/{self.steps} skipped: {event['problem']}")
        elif kind == "train" and self.display is not None:
            self.show_step(self.display, event)

    def begin(self, event: Mapping[str, Any]) -> None:
        """Before the first step: the model, how much data it will see, and roughly how long that takes."""
        first, tokens = event["step"], self.steps * self.config.tokens_per_step
        epochs = tokens / event["train_tokens"]
        say(f"model: {event['parameters']:,} parameters{'; ' + event['layout'] if event['layout'] else ''}")
        say(
            f"training: {tokens:,} tokens in {self.steps:,} steps of {self.config.tokens_per_step:,}, "
            f"{epochs:.3g} epochs of {event['train_tokens']:,} tokens"
        )
        if event["processes"]:
            say(f"processes: {event['processes']}")
        resumed = f"resuming after step {first:,}; " if first else ""
        duration = format_duration(self.seconds(self.steps - first))
        say(f"{resumed}estimated time: {duration}, from the speed of matrix products on this machine")
        self.display = Progress(self.steps, first=first, every=0)

    def show_step(self, display: Progress, event: Mapping[str, Any]) -> None:
        step, speed = event["step"], f"{event['tokens_per_second']:,.0f} tokens/s"
        position = f"step {step}/{self.steps}, loss {event['loss']:.4f}"
        if display.on_terminal:
            display.update(step, f"{position}{self.validation}, {speed}")
        elif step % self.every == 0 or step == self.steps:
            display.update(step, f"{position}, lr {event['lr']:.3g}, gradient norm {event['grad_norm']:.3g}, {speed}")

    def end(self) -> None:
        if self.display is not None:
            self.display.close()
