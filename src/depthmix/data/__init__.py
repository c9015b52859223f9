"""Text to train on: sources, tokenizers, shards of tokens, batches."""

from depthmix.data.batches import Batches, Tokens, validation_batches
from depthmix.data.corpus import Corpus, prepare

__all__ = ["Batches", "Corpus", "Tokens", "prepare", "validation_batches"]
