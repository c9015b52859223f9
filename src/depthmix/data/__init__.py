"""Text to train on: sources, tokenizers, shards of tokens, batches."""

from depthmix.data.batches import Batches, validation_batches
from depthmix.data.corpus import Corpus, prepare
from depthmix.data.shards import Tokens
from depthmix.data.tokenizers import ByteTokenizer, FileTokenizer, load_tokenizer

__all__ = [
    "Batches",
    "ByteTokenizer",
    "Corpus",
    "FileTokenizer",
    "Tokens",
    "load_tokenizer",
    "prepare",
    "validation_batches",
]
