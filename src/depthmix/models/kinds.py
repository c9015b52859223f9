"""The kinds of attention of a decoder: their options, and what each of them keeps of earlier tokens.

Axes: B batch, S column of a cache, H head, d channel of a head, P = H·d, W width of a convolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from depthmix import ops
from depthmix.mechanisms.base import MOST_DIM
from depthmix.support.checks import check_divides, check_fields, check_positive, check_range

if TYPE_CHECKING:
    from depthmix.models.config import DecoderConfig

KINDS = ("gqa", "kda", "mla")
WIDE = ("A_log", "dt_bias")  # parameters of KDA in float32 at least: their steps are small compared with their values
KDA_EXAMPLE = "{'heads': 4, 'head_dim': 32}"
MLA_EXAMPLE = "{'rank': 64, 'nope': 32, 'shared': 16, 'value': 32}"


class Kept(NamedTuple):
    """What one execution of attention keeps for later tokens, as the shapes of its tensors.

    Columns grow with the tokens: each tensor is [B, heads, S, width]. A state has a constant size: [B, …].
    """

    columns: tuple[tuple[int, int], ...] = ()  # (heads, width) of each
    state: tuple[tuple[int, ...], ...] = ()  # of each, without the batch
    wide: tuple[bool, ...] = ()  # for each state: whether it is float32 at least

    def tensors(self, batch: int, capacity: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor in a cache of `capacity` columns."""
        columns = [((batch, heads, capacity, width), dtype) for heads, width in self.columns]
        dtypes = [ops.accumulator(dtype) if wide else dtype for wide in self.wide]
        return [*columns, *(((batch, *shape), kind) for shape, kind in zip(self.state, dtypes, strict=True))]


@dataclass(frozen=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention in place of attention."""

    heads: int
    head_dim: int  # of keys and of values
    conv: int = 4  # tokens that a short convolution reads
    bound: float | None = None  # lower bound of the log decay, such as -5; None for none

    def __post_init__(self) -> None:
        check_fields(self)
        check_range("kda.heads", self.heads, 1, MOST_DIM)
        check_range("kda.head_dim", self.head_dim, 1, MOST_DIM)
        check_range("kda.conv", self.conv, 1, 2**10)
        if self.bound is not None and not -math.inf < self.bound < 0:
            raise ValueError(f"kda.bound={self.bound}; expected a number below 0, such as -5.0, or None for no bound")

    @property
    def kept(self) -> Kept:
        """S [B, H, d, d], and the last inputs of the convolutions [B, W − 1, 3·P]."""
        memory = (self.heads, self.head_dim, self.head_dim)
        return Kept(state=(memory, (self.conv - 1, 3 * self.heads * self.head_dim)), wide=(True, False))


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention without positions in place of attention; its heads are the decoder's."""

    rank: int  # width of the latent, from which the keys and values of all heads are made
    nope: int  # channels of a head's query and key that are its own
    shared: int  # channels of a head's query whose key is one for all heads
    value: int  # channels of a head's value
    norm_eps: float = 1e-6  # of the latent's norm

    def __post_init__(self) -> None:
        check_fields(self)
        for name, low in (("rank", 1), ("nope", 1), ("shared", 0), ("value", 1)):
            check_range(f"mla.{name}", getattr(self, name), low, MOST_DIM)
        check_positive("mla.norm_eps", self.norm_eps)

    @property
    def kept(self) -> Kept:
        """The normalised latent and the shared key, side by side: they are one key-value head for all query heads."""
        return Kept(columns=((1, self.rank + self.shared),))


def repeat_kinds(attention: str | tuple[str, ...], layers: int) -> tuple[str, ...]:
    """The kind of attention of each layer, from one name or a pattern that repeats."""
    pattern = (attention,) if isinstance(attention, str) else attention
    for kind in pattern:
        if kind not in KINDS:
            raise ValueError(
                f"attention={attention!r} with {kind!r}; expected 'gqa', 'kda' or 'mla', or a list of them"
            )
    if not 1 <= len(pattern) <= layers:
        raise ValueError(
            f"attention has {len(pattern)} names for {layers} layers; expected one name, a list with one for each "
            "layer, or a shorter list, which repeats"
        )
    return tuple(pattern[i % len(pattern)] for i in range(layers))


def check_attention(config: DecoderConfig) -> None:
    """Check that each kind of attention has its sizes, and what the kinds exclude."""
    kinds = config.attention_kinds
    for name, part, example in (("kda", config.kda, KDA_EXAMPLE), ("mla", config.mla, MLA_EXAMPLE)):
        if part is None and name in kinds:
            raise ValueError(f"attention={config.attention!r} without {name}; expected its sizes, such as {example}")
        if part is not None and name not in kinds:
            raise ValueError(
                f"{part} with attention={config.attention!r}; expected {name}=None, or {name!r} among the layers"
            )
    if config.kv_mixer is not None and {*kinds} != {"gqa"}:
        raise ValueError(
            f"kv_mixer={config.kv_mixer.name!r} with attention={config.attention!r}; expected kv_mixer=None, or "
            "attention='gqa': \"mla\" keeps one latent for all heads, from which mixed values cannot be made, and "
            '"kda" keeps no values of tokens'
        )
    if "gqa" in kinds:
        check_heads(config)


def check_heads(config: DecoderConfig) -> None:
    if config.head_dim is None:
        check_divides("heads", config.heads, config.dim)
    check_divides("kv_heads", config.num_kv_heads, config.heads, of="the query heads, heads")
    if config.width % 2:
        raise ValueError(f"head_dim={config.width}; expected an even number, since RoPE rotates pairs of channels")


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter of this name in a decoder of this dtype."""
    return ops.accumulator(dtype) if name.rpartition(".")[2] in WIDE else dtype
