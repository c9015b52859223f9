"""`depthmix generate`: text from a directory of weights."""

from __future__ import annotations

import json as json_format
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from depthmix.cli.shared import Several, open_run_folder
from depthmix.data import load_tokenizer
from depthmix.data.tokenizers import BatchTokenizer
from depthmix.inference import PREFILL_MEMORY, TextStream, Tokenizer, stream
from depthmix.models import Decoder, load_model
from depthmix.models.io import MODEL_FILES
from depthmix.support.checks import parse_value
from depthmix.support.terminal import say
from depthmix.training import read_config
from depthmix.training.build import run_tokenizer


def run(
    directory: Annotated[Path, tyro.conf.Positional],
    prompt: Annotated[Several, tyro.conf.arg(aliases=("-p",), metavar="TEXT")] = (),
    max_new_tokens: Annotated[int, tyro.conf.arg(aliases=("-n",))] = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Annotated[Several, tyro.conf.arg(metavar="TEXT")] = (),
    seed: int = 0,
    cache: Literal["dynamic", "preallocated"] | None = None,
    chunk: int | None = None,
    prefill_memory: Annotated[str, tyro.conf.arg(metavar="BYTES")] = PREFILL_MEMORY,
    compiled: bool = False,
    device: str = "cpu",
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None,
    functions: bool = False,
    json: bool = False,
) -> int:
    """Continue a prompt with the model of a directory; the text goes to stdout, its speed to stderr.

    Args:
        directory: config.json and model.safetensors, and a tokenizer.json unless the tokens are bytes; or the folder of
            a finished run of `depthmix train`.
        prompt: one prompt is streamed; several, each with its own -p, run as a batch. "-" or none: from stdin.
        max_new_tokens: at most so many tokens for each prompt.
        temperature: 0 for the most likely token, always.
        top_k: draw from the k most likely tokens.
        top_p: draw from the fewest tokens that together have this probability.
        stop: a text of one token that ends the answer and is not part of it; several, each with its own --stop.
        seed: of the draws.
        cache: of keys and values; preallocated where the step is compiled.
        chunk: read the prompt in chunks of so many tokens; by default as many as --prefill-memory allows.
        prefill_memory: limit for reading the prompt, beyond weights and cache, such as 256MB; none for no limit.
        compiled: compile the decode step; worth its time for long texts.
        device: such as cpu or cuda.
        dtype: of the parameters; as saved by default.
        functions: import the functions of your own that the model's configuration names; this runs their code.
        json: print one object instead of the text.
    """
    kind = None if dtype is None else getattr(torch, dtype)
    model, tokenizer = open_folder(directory, device, kind, functions)
    texts = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in prompt or ("-",)]
    timer = Timer()
    steps = stream(
        model,
        [tokenizer.encode(text) for text in texts],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=[stop_id(tokenizer, text) for text in stop],
        seed=seed,
        cache=cache,
        chunk=chunk,
        prefill_memory=parse_value(prefill_memory),
        compiled=compiled,
    )
    rows: list[list[int]] = [[] for _ in texts]
    streamed = TextStream(tokenizer) if len(texts) == 1 and not json else None
    for step in timer.watch(steps):
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
                if streamed is not None:
                    print(streamed.push(token), end="", flush=True)
    answers = [tokenizer.decode(row) for row in rows]
    if json:
        results = [{"prompt": p, "text": a, "tokens": t} for p, a, t in zip(texts, answers, rows, strict=True)]
        print(json_format.dumps({"answers": results, **timer.figures()}, indent=2, ensure_ascii=False))
        return 0
    if streamed is not None:
        print(streamed.finish(), flush=True)
    else:
        for i, answer in enumerate(answers):
            print(f"[{i + 1}] {answer}")
    say(timer.describe())
    return 0


def open_folder(
    folder: Path, device: str, dtype: torch.dtype | None, functions: bool
) -> tuple[Decoder, BatchTokenizer]:
    """The model and the tokenizer of a run, finished or not, or of a directory that `save_model` wrote."""
    if any((folder / name).is_file() for name in MODEL_FILES):
        model = load_model(folder, device=device, dtype=dtype, functions=functions)
        return model, load_tokenizer(folder, model.config.vocab_size)
    if (folder / "config.toml").is_file():
        model = open_run_folder(folder, device, dtype=dtype, functions=functions).model
        return model, run_tokenizer(folder, read_config(folder).data)
    raise FileNotFoundError(
        f"{folder} is neither the folder of a run of `depthmix train` (it has no config.toml) nor a directory written "
        "by dm.save_model (it has no config.json)"
    )


@dataclass
class Timer:
    """When the first token came, and how fast those after it."""

    begun: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    after_first: int = 0

    def watch(self, steps: Iterator[list[int | None]]) -> Iterator[list[int | None]]:
        for step in steps:
            self.last = time.perf_counter()
            count = sum(token is not None for token in step)
            self.tokens += count
            if self.first is None:
                self.first = self.last
            else:
                self.after_first += count
            yield step

    def figures(self) -> dict[str, float | None]:
        wait = None if self.first is None else self.first - self.begun
        took = 0.0 if self.first is None else self.last - self.first
        speed = self.after_first / took if self.after_first and took > 0 else None
        return {"new_tokens": self.tokens, "seconds_to_first_token": wait, "tokens_per_second": speed}

    def describe(self) -> str:
        figures = self.figures()
        words = [f"{self.tokens} tokens"]
        if figures["tokens_per_second"] is not None:
            words.append(f"{figures['tokens_per_second']:.1f} tokens/s after the first")
        if figures["seconds_to_first_token"] is not None:
            words.append(f"first token after {1000 * figures['seconds_to_first_token']:.0f} ms")
        return ", ".join(words)


def stop_id(tokenizer: Tokenizer, text: str) -> int:
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        raise ValueError(f"stop={text!r} is {len(ids)} tokens; expected a text of one token, such as a newline")
    return ids[0]
