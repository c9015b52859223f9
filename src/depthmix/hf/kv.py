"""Mix values inside the attention of transformers, before they are cached.

Attention rotates queries and keys, gives keys and values to the cache and calls the function that its configuration
names. So a wrapped layer hands it a stand-in for the cache, which only notes what it is given, and the configuration
names a function of ours: it sees the new tokens alone, mixes their values, and only then fills the cache and calls the
function that was chosen.

Axes: B batch, Q query head, K key-value head, T token, d channel of a head.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthmix.mechanisms.blend import Blend
from depthmix.mechanisms.record import Recorded
from depthmix.mechanisms.registry import name_of

PREFIX = "depthmix_"  # of the attention functions that mix values first
OWNER = "depthmix_owner"  # attribute of an attention: whose layer mixes its values
FUNCTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


class Deferred:
    """Stands for the cache in one call of an attention: it notes what it is to store, and stores it later."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.noted: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.attended = False

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.noted = (args, kwargs)
        return k, v

    def put(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values; returns all that the cache holds."""
        self.attended = True
        if self.cache is None:
            return k, v
        args, kwargs = self.noted
        stored: tuple[Tensor, Tensor] = self.cache.update(k, v, *args, **kwargs)
        return stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["cache"], name)


def attend(chosen: str, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    """An attention function of transformers: `chosen`, after the values of the new tokens were mixed."""
    if OWNER in module.__dict__:
        k, v = module.__dict__[OWNER].layer.mix_values(q, k, v)
    if chosen == "eager":
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        function = ALL_ATTENTION_FUNCTIONS[chosen]
    return function(module, q, k, v, *args, **kwargs)


class RecordedValues(Recorded):
    """Mixin before a value mixer's class: its options are in the state dict, as those of a stack are."""

    def record(self) -> dict[str, Any]:
        mixer: Any = self
        options = mixer.config.function(dim=mixer.site.dim, depth=mixer.site.depth)
        return {"kv_mixer": name_of(type(self)), "blend": isinstance(self, Blend), **options}


@functools.cache
def recorded(cls: type) -> type:
    return type(f"Recorded{cls.__name__}", (RecordedValues, cls), {"__module__": __name__})


def calls_registered_functions(attention: nn.Module) -> bool:
    """Whether an attention calls the function that its configuration names; in old versions of some families it is a
    class for each implementation instead."""
    return hasattr(sys.modules[type(attention).__module__], "ALL_ATTENTION_FUNCTIONS")


def register_functions() -> None:
    for name in FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(PREFIX + name, functools.partial(attend, name))
        if name in ALL_MASK_ATTENTION_FUNCTIONS:
            ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])


def route_attention(model: Any) -> None:
    """Let the model's configuration name the function that mixes values."""
    chosen = model.config._attn_implementation or "eager"
    if not chosen.startswith(PREFIX):
        if chosen not in FUNCTIONS:
            raise ValueError(
                f"attn_implementation={chosen!r} with a KV mechanism; expected one of {', '.join(FUNCTIONS)}"
            )
        model.config._attn_implementation_internal = PREFIX + chosen


def restore_attention(model: Any) -> None:
    """The opposite of `route_attention`."""
    chosen = model.config._attn_implementation
    if chosen and chosen.startswith(PREFIX):
        model.config._attn_implementation_internal = chosen.removeprefix(PREFIX)


register_functions()
