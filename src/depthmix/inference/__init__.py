"""Running a decoder: caches, generation, streamed text."""

from depthmix.inference.cache import DynamicCache, PreallocatedCache
from depthmix.inference.generate import PREFILL_MEMORY, generate, row_seed, stream
from depthmix.inference.prefill import prefill_chunk
from depthmix.inference.text import TextStream, Tokenizer

__all__ = [
    "PREFILL_MEMORY",
    "DynamicCache",
    "PreallocatedCache",
    "TextStream",
    "Tokenizer",
    "generate",
    "prefill_chunk",
    "row_seed",
    "stream",
]
