"""`depthmix generate`: text from a trained model."""

from __future__ import annotations

import functools
import json as json_format
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from depthmix.cli.processes import ALONE, Serving
from depthmix.cli.shared import Several, flag, open_run_folder, repeatable, say_unfinished, switch
from depthmix.data import load_tokenizer
from depthmix.data.tokenizers import BatchTokenizer
from depthmix.inference import PREFILL_MEMORY, TextStream, Tokenizer, stream
from depthmix.models import DecoderConfig, load_model
from depthmix.models.saved import MODEL_FILES
from depthmix.parallel import ranks
from depthmix.parallel.serving import served
from depthmix.support.checks import check_device, parse_value
from depthmix.support.terminal import say
from depthmix.training import read_config
from depthmix.training.build import run_tokenizer
from depthmix.training.continued import is_retrofit
from depthmix.training.serve import plan_serving

EXAMPLES = (
    'depthmix generate runs/small --prompt "def " --max-new-tokens 40',
    "echo import | depthmix generate runs/small --temperature 0.8 --top-p 0.9 -n 9",
)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    temperature: Annotated[float, flag("Sampling temperature; 0 always takes the most likely token.", "T")] = 0.0
    top_k: Annotated[int | None, flag("Sample from the K most likely tokens.", "K", default="all")] = None
    top_p: Annotated[
        float | None,
        flag("Sample from the fewest tokens whose probabilities sum to at least P.", "P", default="all"),
    ] = None
    seed: Annotated[int, flag("Seed of the sampling.", "SEED")] = 0


@dataclass(frozen=True, kw_only=True)
class Output:
    max_new_tokens: Annotated[int, flag("Largest number of tokens per prompt.", "N", aliases=("-n",))] = 128
    stop: Annotated[Several, repeatable("A text of one token that ends the output and is not printed.", "TEXT")] = ()
    json: Annotated[bool, switch("Print one JSON object instead of the text.")] = False


@dataclass(frozen=True, kw_only=True)
class Machine:
    device: Annotated[str, flag("Device to run on, such as cpu or cuda.", "DEVICE")] = "cpu"
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"] | None,
        flag("Data type of the parameters.", default="as saved"),
    ] = None
    compiled: Annotated[bool, switch("Compile the decoding step; worthwhile for long texts.")] = False
    cache: Annotated[
        Literal["dynamic", "preallocated"] | None,
        flag("How keys and values are stored.", default="preallocated with --compiled, else dynamic"),
    ] = None
    chunk: Annotated[
        int | None,
        flag("Read the prompt in chunks of this many tokens.", "TOKENS", default="as many as --prefill-memory allows"),
    ] = None
    prefill_memory: Annotated[
        str,
        flag("Memory limit for reading the prompt, beyond weights and cache, such as 256MB; none for no limit.",
             "BYTES"),
    ] = PREFILL_MEMORY  # fmt: skip
    functions: Annotated[
        bool,
        switch("Import the user-defined functions that the model's configuration names. This runs their code."),
    ] = False


def run(
    directory: Annotated[
        Path,
        tyro.conf.Positional,
        flag("Folder of a run of `depthmix train`, or a folder that `dm.save_model` wrote.", "FOLDER"),
    ],
    prompt: Annotated[
        Several,
        repeatable(
            "Text to continue. A single prompt is streamed; several, each with its own flag, run as a batch. Without "
            "one, or with -, the prompt is read from stdin.",
            "TEXT",
            aliases=("-p",),
        ),
    ] = (),
    *,
    sampling: Sampling = Sampling(),
    output: Output = Output(),
    machine: Machine = Machine(),
    processes: Serving = ALONE,
) -> int:
    """Continue a prompt with a trained model.

    The text goes to stdout, its speed to stderr. For an unfinished run, the model of the newest checkpoint is used.

    A model that one process cannot hold: torchrun --nproc-per-node 2 -m depthmix generate FOLDER --tp 2
    """
    check_folder(directory)
    if processes == ALONE and ranks.launched() == 1:
        model, tokenizer = open_folder(directory, machine)
        return answer(model, tokenizer, read_prompts(prompt), sampling, output, machine)
    serving = plan_serving(directory, tp=processes.tp, pp=processes.pp, functions=machine.functions)
    device = ranks.own_device(check_device(machine.device))
    with ranks.process_group(device):
        distributed = serving.load(device, dtype_of(machine))
        say_unfinished(directory, serving.step)
        texts = ranks.from_first(lambda: read_prompts(prompt))
        return answer(served(distributed), tokenizer_of(directory, serving.config), texts, sampling, output, machine)


def read_prompts(prompt: Sequence[str]) -> list[str]:
    return [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in prompt or ("-",)]


def dtype_of(machine: Machine) -> torch.dtype | None:
    return None if machine.dtype is None else getattr(torch, machine.dtype)


def answer(
    model: Any, tokenizer: BatchTokenizer, texts: list[str], sampling: Sampling, output: Output, machine: Machine
) -> int:
    """Print the continuation of each text; of several processes, the first one prints."""
    timer = Timer()
    steps = streamer(model, machine)(
        model,
        [tokenizer.encode(text) for text in texts],
        max_new_tokens=output.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        stop=[stop_id(tokenizer, text) for text in output.stop],
        seed=sampling.seed,
    )
    rows: list[list[int]] = [[] for _ in texts]
    prints = ranks.main_process()
    streamed = TextStream(tokenizer) if len(texts) == 1 and not output.json and prints else None
    for step in timer.watch(steps):
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
                if streamed is not None:
                    print(streamed.push(token), end="", flush=True)
    answers = [tokenizer.decode(row) for row in rows]
    if not prints:
        return 0
    if output.json:
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


def streamer(model: Any, machine: Machine) -> Callable[..., Iterator[list[int | None]]]:
    """The function that continues prompts: of a decoder ours, of a model of transformers one that uses its cache."""
    options: dict[str, Any] = {"cache": machine.cache, "chunk": machine.chunk, "compiled": machine.compiled}
    if isinstance(model.config, DecoderConfig):
        return functools.partial(stream, prefill_memory=parse_value(machine.prefill_memory), **options)
    for name, value in options.items():
        if value:
            raise ValueError(
                f"--{name} with a model of transformers; expected no such option. model.generate of transformers has "
                "its own: AutoModelForCausalLM.from_pretrained(RUN/final)"
            )
    return import_module("depthmix.hf.generation").stream  # transformers takes seconds to import


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} does not exist or is not a folder; expected that of a run or of a saved model"
        )
    if saved_model(folder) is None and not (folder / "config.toml").is_file():
        raise FileNotFoundError(
            f"{folder} is neither the folder of a run of `depthmix train` (it has no config.toml) nor a folder written "
            "by dm.save_model (it has no config.json)"
        )


def saved_model(folder: Path) -> Path | None:
    """Where a model that `save_model` wrote is: in the folder, or in `final` of a finished run."""
    places = (folder, folder / "final")
    return next((place for place in places if any((place / name).is_file() for name in MODEL_FILES)), None)


def open_folder(folder: Path, machine: Machine) -> tuple[Any, BatchTokenizer]:
    """The model and the tokenizer of a run, finished or not, or of a folder that `save_model` wrote."""
    place, dtype, functions = saved_model(folder), dtype_of(machine), machine.functions
    if place is not None and not is_retrofit(folder):
        model = load_model(place, device=machine.device, dtype=dtype, functions=functions)
    else:
        model = open_run_folder(folder, machine.device, dtype=dtype, functions=functions).model
    return model, tokenizer_of(folder, model.config)


def tokenizer_of(folder: Path, config: Any) -> BatchTokenizer:
    place = saved_model(folder)
    if place is not None:
        return load_tokenizer(place, config.vocab_size)
    return run_tokenizer(folder, read_config(folder).data)


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
