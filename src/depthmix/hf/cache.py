"""A cache of transformers, as attention calls it: keys and values, latents of MLA, states of KDA.

Axes: B batch, T new token, S column, H head, d channel of a head, P = H·d, W width of a convolution, r width of a
latent with its shared key.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, StaticCache

from depthmix.models import DecoderConfig

CROPS_BY_LENGTH = not hasattr(CacheLayerMixin, "is_croppable")  # older versions: crop(0) keeps no token, not all


class StateLayer(DynamicLayer):
    """The state of KDA in place of keys and values, whose methods repeat, select and reorder its rows.

    keys: the memory [B, H, d, d]. values: the last inputs of the convolutions [B, W − 1, 3·P]. Neither has an axis of
    tokens, so their number is kept beside them.
    """

    is_croppable = False
    supports_early_init = False
    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self.length = 0  # tokens that the state contains, with their padding

    @property
    def state(self) -> tuple[Tensor, Tensor] | None:
        return (self.keys, self.values) if self.length else None

    def advance(self, memory: Tensor, history: Tensor, tokens: int) -> None:
        """Replace the state by the one after `tokens` more tokens."""
        self.dtype, self.device, self.is_initialized = memory.dtype, memory.device, True
        self.keys, self.values, self.length = memory, history, self.length + tokens

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        """Remove all tokens."""
        self.keys = self.values = None
        self.is_initialized, self.length = False, 0

    def crop(self, tokens: int) -> None:
        """Refuse to remove tokens; the argument is the number to keep, or minus the number to remove."""
        by_length = tokens > 0 or (tokens == 0 and CROPS_BY_LENGTH)
        kept = tokens if by_length else self.length + tokens
        if kept < self.length:
            raise ValueError(
                f"crop({tokens}) of a cache of {self.length} tokens with attention 'kda'; expected to keep all of "
                "them: its state contains every token, and none can be removed. Copy the cache before the tokens that "
                "may be taken back"
            )

    def update(self, *args: Any, **options: Any) -> Any:
        raise TypeError("keys and values were written to the state of KDA; expected a cache filled by this model only")


class Slots:
    """A cache of transformers for the attention of a decoder; positions and mask are made beforehand."""

    def __init__(self, cache: Any, tokens: int) -> None:
        self.cache = cache
        self.tokens = tokens  # new ones, T

    def put(self, slot: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append keys and values [B, heads, T, width], or latents [B, 1, T, r], which are keys without values."""
        keys, values = new if len(new) == 2 else (*new, new[0][..., :0])
        stored: tuple[Tensor, ...] = self.cache.update(keys, values, slot)
        return stored[: len(new)]

    def state(self, slot: int) -> tuple[Tensor, ...] | None:
        state: tuple[Tensor, ...] | None = self.cache.layers[slot].state
        return state

    def replace(self, slot: int, *state: Tensor) -> None:
        self.cache.layers[slot].advance(*state, self.tokens)


def fit(cache: Any, config: DecoderConfig) -> None:
    """Give an empty cache layers for the states of KDA, in place; refuse caches that cannot have them."""
    others = sorted({*config.attention_kinds} - {"gqa"})
    if not others:
        return
    suitable = (DynamicCache,) if "kda" in others else (DynamicCache, StaticCache)
    if not isinstance(cache, suitable):
        raise ValueError(
            f"a {type(cache).__name__} with attention {' and '.join(map(repr, others))}; expected a "
            f'{" or a ".join(cls.__name__ for cls in suitable)}, the default of `generate`: "kda" keeps a state of '
            'constant size and "mla" latents without values, for which other caches have no place'
        )
    for slot, kept in enumerate(config.kept()):
        if kept.state:
            place_state(cache, slot)


def place_state(cache: DynamicCache, slot: int) -> None:
    layers = cache.layers
    while len(layers) <= slot:
        layers.append(DynamicLayer())
    if isinstance(layers[slot], StateLayer):
        return
    if cache.get_seq_length() or layers[slot].is_initialized:
        raise ValueError(
            f"attention {slot} is 'kda', but the cache holds keys and values for it; expected a cache filled by this "
            "model, or an empty DynamicCache"
        )
    layers[slot] = StateLayer()
