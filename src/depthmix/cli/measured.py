"""What `trace` and `ablate` share: the model and the text that are measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from depthmix.cli.generate import check_folder, saved_model, tokenizer_of
from depthmix.cli.shared import flag, open_run_folder, switch
from depthmix.data.tokenizers import BatchTokenizer
from depthmix.models import Decoder, load_model
from depthmix.ops import keep_freed_memory
from depthmix.support.checks import check_device, check_range
from depthmix.training.texts import CONTEXT, Text, file_text, prompt_text, row_length, validation_text


@dataclass(frozen=True, kw_only=True)
class Reading:
    text: Annotated[Path | None, flag("A text file to read.", "FILE", default="the run's validation data")] = None
    prompt: Annotated[str | None, flag("A text to read, instead of a file.", "TEXT", aliases=("-p",), default="")] = (
        None
    )
    context: Annotated[
        int | None, flag("Tokens per row of text.", "TOKENS", default=f"as in training; {CONTEXT} for a saved model")
    ] = None
    device: Annotated[str, flag("Device to run on, such as cpu or cuda.", "DEVICE")] = "cpu"
    functions: Annotated[
        bool,
        switch("Import the user-defined functions that the model's configuration names. This runs their code."),
    ] = False

    def words(self) -> list[str]:
        """What is special about a measurement of this text: nothing for a run's validation data."""
        return [self.text.name] if self.text is not None else [] if self.prompt is None else ["prompt"]


class Measured(NamedTuple):
    model: Decoder
    tokenizer: BatchTokenizer
    text: Text


def open_measured(
    folder: Path, reading: Reading, *, tokens: int | None = None, rows: int | None = None, of_validation: int = 0
) -> Measured:
    """The model of a run or a saved model, and the text that was asked for.

    At most `tokens` of it, or `rows` whole rows; without both all of it, of validation data `of_validation` tokens.
    """
    check_folder(folder)
    if reading.text is not None and reading.prompt is not None:
        raise ValueError("--text and --prompt were both given; expected at most one of them")
    if reading.text is not None and not reading.text.is_file():
        raise FileNotFoundError(f"{reading.text} is not a file; expected a text file")
    if tokens is not None:
        check_range("tokens", tokens, 2)
    if reading.context is not None:
        check_range("context", reading.context, 2)
    keep_freed_memory()
    model, digest = open_model(folder, reading.device, reading.functions)
    tokenizer, length = tokenizer_of(folder, model.config), row_length(folder, reading.context)
    tokens = rows * length if rows is not None else tokens
    if reading.prompt is not None:
        read = prompt_text(reading.prompt, tokenizer, length, tokens)
    elif reading.text is not None:
        read = file_text(reading.text, tokenizer, length, tokens)
    else:
        read = validation_text(folder, digest, length, of_validation if tokens is None else tokens)
    return Measured(model, tokenizer, read)


def open_model(folder: Path, device: str, functions: bool) -> tuple[Decoder, str | None]:
    """The model, and the digest of the tokens of its run; None if it is not a run's."""
    if (folder / "config.toml").is_file():
        opened = open_run_folder(folder, device, functions=functions)
        return opened.model, opened.digest
    place = saved_model(folder)
    assert place is not None
    return load_model(place, device=check_device(device), functions=functions).eval(), None
