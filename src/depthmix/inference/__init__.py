"""Running a decoder: caches, generation, streamed text."""

from depthmix.inference.cache import DynamicCache, PreallocatedCache
from depthmix.inference.generate import generate, row_seed, stream
from depthmix.inference.text import TextStream, Tokenizer

__all__ = [
    "DynamicCache",
    "PreallocatedCache",
    "TextStream",
    "Tokenizer",
    "generate",
    "row_seed",
    "stream",
]
