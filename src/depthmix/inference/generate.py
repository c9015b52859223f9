"""Generation with a decoder: prefill, then one token per step.

Axes: B batch, T token, V vocabulary.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from depthmix.inference.cache import DynamicCache, PreallocatedCache, check_batch
from depthmix.inference.prefill import prefill, prefill_chunk
from depthmix.models import Decoder
from depthmix.models.shard import WHOLE
from depthmix.support.files import seed_of

Prompts = Sequence[Sequence[int]] | Tensor
AnyCache = DynamicCache | PreallocatedCache
CAPACITY_STEP = 128  # capacities are multiples of this, so that prompts of similar length share a compiled step
PREFILL_MEMORY = "1GB"  # limit above which a prompt is read in chunks
compiled_steps: WeakKeyDictionary[Decoder, dict[Any, Callable[..., Tensor]]] = WeakKeyDictionary()


def generate(model: Decoder, prompts: Prompts, **options: Any) -> list[list[int]]:
    """Generate the new tokens of each prompt. The options are those of `stream`.

    Stop tokens are not part of the result: a row shorter than `max_new_tokens` ended with one.
    """
    rows: list[list[int]] | None = None
    for step in stream(model, prompts, **options):
        rows = rows or [[] for _ in step]
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows if rows is not None else [[] for _ in prompts]


def stream(
    model: Decoder,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    seed: int | Sequence[int] = 0,
    cache: Literal["dynamic", "preallocated"] | AnyCache | None = None,
    chunk: int | None = None,
    prefill_memory: int | str | None = PREFILL_MEMORY,
    compiled: bool = False,
) -> Iterator[list[int | None]]:
    """Yield at each step one token per prompt, or None for a row that has ended.

    Arguments are checked at the call, before the first step.

    Args:
        model: the decoder; it runs in evaluation mode, and its mode is restored afterwards.
        prompts: lists of ids, or a tensor [B, T]; shorter ones are padded on the left.
        max_new_tokens: maximum number of new tokens per prompt.
        temperature: temperature of sampling; 0: always the most likely token.
        top_k: draw from the k most likely tokens.
        top_p: draw from the fewest tokens that together have this probability, after top_k.
        stop: ids that end a row.
        seed: each row has its own random generator, independent of the other rows; a number gives row i the seed
            `row_seed(seed, i)`, a list gives one seed per row.
        cache: "dynamic", "preallocated", or a cache object, whose tokens the prompts then continue. None: preallocated
            if the step is compiled, otherwise dynamic.
        chunk: number of tokens per chunk of the prefill; None: as many as `prefill_memory` allows.
        prefill_memory: memory limit of the prefill beyond weights and cache, in bytes or as "256MB"; a prompt that
            needs more is read in chunks, see `prefill_chunk`. None: no limit, always a single pass.
        compiled: run the decode step under `torch.compile`: one graph for all steps, kept per model and cache shape.
    """
    check_sampling(max_new_tokens, temperature, top_k, top_p, chunk)
    tokens, valid = pad_prompts(prompts, model.config.vocab_size, next(model.parameters()).device)
    seeds = row_seeds(seed, len(tokens))
    stops = stop_ids(stop, model.config.vocab_size)
    kv_cache = make_cache(model, cache, compiled, len(tokens), tokens.shape[1] + max(0, max_new_tokens - 1))
    step = compiled_step(model, kv_cache) if compiled else decode
    draw = Sampler(seeds, temperature, top_k, top_p)
    if chunk is None and prefill_memory is not None:
        batch, columns = tokens.shape
        padded, before = valid is not None, kv_cache.length
        chunk = prefill_chunk(model, columns, prefill_memory, batch=batch, padded=padded, before=before)
    return run(model, tokens, valid, kv_cache, step, draw, max_new_tokens, stops, chunk or tokens.shape[1])


@torch.no_grad()
def run(
    model: Decoder,
    tokens: Tensor,
    valid: Tensor | None,
    cache: AnyCache,
    step: Callable[..., Tensor],
    draw: Sampler,
    steps: int,
    stops: frozenset[int],
    chunk: int,
) -> Iterator[list[int | None]]:
    with evaluating(model):
        logits = prefill(model, tokens, valid, cache, chunk)
    running, new = [True] * len(tokens), tokens[:, -1]
    for i in range(steps):
        if i:
            with evaluating(model):
                logits = step(model, new[:, None], cache)
        new = model.shard.agree(draw(logits[:, -1]))
        ids: list[int] = new.tolist()
        running = [alive and token not in stops for alive, token in zip(running, ids, strict=True)]
        if not any(running):
            return
        # Rows that have ended still run; rows are independent of each other.
        yield [token if alive else None for alive, token in zip(running, ids, strict=True)]


def decode(model: Decoder, tokens: Tensor, cache: AnyCache) -> Tensor:
    return model(tokens, cache=cache, last_only=True)


def compiled_step(model: Decoder, cache: AnyCache) -> Callable[..., Tensor]:
    """`decode`, compiled for this model and cache shape."""
    if not isinstance(model, Decoder) or model.shard is not WHOLE:
        raise ValueError("compiled=True with a model on several processes; expected compiled=False")
    if not isinstance(cache, PreallocatedCache):
        raise ValueError(
            f"compiled=True with a {type(cache).__name__}; expected a preallocated cache, which one graph can use"
        )
    of_model = compiled_steps.setdefault(model, {})
    key = (cache.capacity, *((tensor.shape, tensor.dtype, tensor.device) for tensor in cache.tensors))
    if key not in of_model:
        # torch limits the graphs per code object, so each model and shape gets its own.
        copy = types.FunctionType(decode.__code__.replace(), decode.__globals__, "decode")
        of_model[key] = torch.compile(copy, fullgraph=True, dynamic=False)
    return of_model[key]


@contextmanager
def evaluating(model: Decoder) -> Iterator[None]:
    """Evaluation mode inside the block; the previous mode is restored."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Sampler:
    """Draws one token per row from logits [B, V], in float64, with one random number per row."""

    def __init__(self, seeds: Sequence[int], temperature: float, top_k: int | None, top_p: float | None) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        # On the CPU, for the same draws on every device.
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(-1)
        drawn = [torch.rand(1, dtype=torch.float64, generator=generator) for generator in self.generators]
        uniform = torch.stack(drawn).to(logits.device)  # [B, 1]
        probability, ids = self.distribution(logits)
        cumulative = probability.cumsum(-1)
        pick = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        last = (probability > 0).sum(-1, keepdim=True) - 1  # rounding can push the product past the last token
        return ids.gather(-1, torch.minimum(pick, last)).squeeze(-1)

    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities [B, k], largest first and 0 for tokens that top_p excludes, and their ids."""
        best, ids = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
        best, ids = best[:, : self.top_k], ids[:, : self.top_k]
        probability = torch.softmax((best - best[:, :1]) / self.temperature, -1)
        if self.top_p is not None:
            before = probability.cumsum(-1) - probability
            probability = probability.where(before < self.top_p, 0)
        return probability, ids


def row_seed(seed: int, row: int) -> int:
    """The seed of a row: rows of one seed, and neighbouring seeds, draw independent numbers."""
    return seed_of(seed, row, separator=" ")  # a space, as in every earlier version


def row_seeds(seed: int | Sequence[int], batch: int) -> list[int]:
    if isinstance(seed, int):
        return [row_seed(seed, row) for row in range(batch)]
    if len(seed) != batch:
        raise ValueError(f"{len(seed)} seeds for {batch} prompts; expected one per prompt, or a single number")
    return list(seed)


def pad_prompts(prompts: Prompts, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Tokens [B, T], padded on the left, and which of them are valid; None: all."""
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2 or prompts.is_floating_point() or prompts.dtype == torch.bool:
            raise ValueError(f"prompts: {prompts.dtype} {list(prompts.shape)}; expected integers [batch, tokens]")
        prompts = prompts.tolist()
    if isinstance(prompts, str) or any(isinstance(row, (int, str)) for row in prompts):
        raise TypeError(f"prompts={prompts!r:.60}; expected a list of prompts, each a list of token ids")
    if not len(prompts):
        raise ValueError("no prompts; expected at least one")
    for i, row in enumerate(prompts):
        if not len(row):
            raise ValueError(f"prompt {i} is empty; expected at least one token")
        wrong = next((x for x in row if not isinstance(x, int) or isinstance(x, bool) or not 0 <= x < vocabulary), None)
        if wrong is not None:
            raise ValueError(f"prompt {i} contains {wrong!r}; expected ids from 0 to {vocabulary - 1}")
    longest = max(map(len, prompts))
    gaps = [longest - len(row) for row in prompts]
    tokens = torch.tensor([[0] * gap + list(row) for gap, row in zip(gaps, prompts, strict=True)], device=device)
    if not any(gaps):
        return tokens, None
    return tokens, torch.arange(longest, device=device) >= torch.tensor(gaps, device=device)[:, None]


def make_cache(model: Decoder, cache: str | AnyCache | None, compiled: bool, batch: int, columns: int) -> AnyCache:
    cache = cache if cache is not None else "preallocated" if compiled else "dynamic"
    weight = next(model.parameters())
    if cache == "dynamic":
        return DynamicCache()
    if cache == "preallocated":
        capacity = -(-columns // CAPACITY_STEP) * CAPACITY_STEP
        return PreallocatedCache(
            model.config,
            batch,
            capacity,
            dtype=weight.dtype,
            device=weight.device,
            kv_heads=model.config.num_kv_heads // model.shard.ranks,
            slots=model.slots,
            first_slot=model.first_slot,
        )
    if not isinstance(cache, (DynamicCache, PreallocatedCache)):
        raise ValueError(f"cache={cache!r}; expected 'dynamic', 'preallocated', or a cache object")
    check_batch(batch, cache.batch)
    if cache.capacity is not None and cache.length + columns > cache.capacity:
        raise ValueError(
            f"{cache.length} columns in use and {columns} more needed (the longest prompt and the new tokens); "
            f"expected at most {cache.capacity} in total, the capacity of the cache. Use a larger one, or fewer tokens"
        )
    return cache


def check_sampling(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, chunk: int | None
) -> None:
    for name, count, low in (("max_new_tokens", max_new_tokens, 0), ("top_k", top_k, 1), ("chunk", chunk, 1)):
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < low):
            raise ValueError(f"{name}={count!r}; expected a whole number of at least {low}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature!r}; expected 0 (always the most likely token) or a positive number")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p!r}; expected a probability above 0 and at most 1")


def stop_ids(stop: Collection[int], vocabulary: int) -> frozenset[int]:
    if isinstance(stop, (int, str)):
        raise TypeError(f"stop={stop!r}; expected a collection of token ids")
    for token in stop:
        if not 0 <= token < vocabulary:
            raise ValueError(f"stop contains {token}; expected ids from 0 to {vocabulary - 1}")
    return frozenset(stop)
