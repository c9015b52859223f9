"""The tokenizer of a run in the form of transformers: the same ids for every text, files that AutoTokenizer reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from depthmix.data import ByteTokenizer, FileTokenizer, load_tokenizer
from depthmix.data.tokenizers import BatchTokenizer
from depthmix.models.saved import CONFIG, MODEL, STAGED, read_description
from depthmix.support.checks import import_package

END = "\x00"  # the separator of byte tokens
INSTALL = "'depthmix[hf]'"


def tokenizer_of(folder: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of a finished run, or of a folder that `dm.save_model` wrote.

    Without a `tokenizer.json` it is that of bytes. `save_pretrained` writes it beside a model of `depthmix.hf`.
    """
    paths = [place / name for place in (Path(folder), Path(folder) / "final") for name in (CONFIG, STAGED)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"{folder} has no {CONFIG}; expected the folder of a finished run, or one that dm.save_model wrote"
        )
    return from_tokenizer(load_tokenizer(path.parent, read_description(path, MODEL)["model"].get("vocab_size", 0)))


def from_tokenizer(tokenizer: BatchTokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of depthmix for transformers. As in training, it puts nothing around a text and cuts nothing off.

    The separator of documents is its token for beginning, end and padding; without a separator it has none of them.
    """
    if isinstance(tokenizer, ByteTokenizer):
        inner = byte_level()
        end: str | None = END
    elif isinstance(tokenizer, FileTokenizer):
        inner = without_template(tokenizer.inner)
        end = None if tokenizer.separator is None else inner.id_to_token(tokenizer.separator)
    else:
        raise TypeError(
            f"from_tokenizer got a {type(tokenizer).__name__}; expected a ByteTokenizer or a FileTokenizer of "
            "depthmix.data"
        )
    ends = {} if end is None else dict.fromkeys(("bos_token", "eos_token", "pad_token"), end)
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **ends)


def byte_level() -> Any:
    """Bytes of UTF-8 as ids 0 to 255, for the tokenizers package.

    Its byte-level form spells every byte as a printable letter. Only U+0000 contains the byte 0, so this id is that
    character itself: the separator, which is found before texts are spelled.
    """
    tokenizers = import_package("tokenizers", "a tokenizer of transformers", INSTALL)
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters()) if byte} | {END: 0}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return inner


def byte_letters() -> list[str]:
    """How the byte-level form spells the bytes 0 to 255: printable ones as themselves, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def without_template(inner: Any) -> Any:
    """A copy that adds no special tokens around a text."""
    content = json.loads(inner.to_str())
    return type(inner).from_str(json.dumps({**content, "post_processor": None}))
