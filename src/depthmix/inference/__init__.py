"""Running a decoder: caches, generation, text."""

from depthmix.inference.cache import DynamicCache, PreallocatedCache
from depthmix.inference.generate import generate, row_seed, stream
from depthmix.inference.text import ByteTokenizer, TextStream, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "DynamicCache",
    "PreallocatedCache",
    "TextStream",
    "Tokenizer",
    "generate",
    "load_tokenizer",
    "row_seed",
    "stream",
]
