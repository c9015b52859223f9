"""The configuration of a decoder: one flat dataclass, with a child for each exchangeable part."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from depthmix.mechanisms import MixerConfig, kv_mechanism, legacy, make_config, mechanism
from depthmix.mechanisms.base import MOST_DEPTH, MOST_DIM, Kind
from depthmix.models import backbones
from depthmix.models.kinds import KDAConfig, Kept, MLAConfig, check_attention, repeat_kinds
from depthmix.support.checks import check_fields, check_positive, check_range, make_part

DIAL_SIZES = ("dim", "heads", "hidden")  # from which the other sizes of a backbone follow


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A mechanism by name, with its options. Written as the name alone, or as {"name": …, option: …}."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:  # JSON has only lists
        plain = {key: tuple(value) if isinstance(value, list) else value for key, value in self.options.items()}
        object.__setattr__(self, "options", plain)

    @classmethod
    def of(cls, choice: Choice | str | Mapping[str, Any]) -> Choice:
        if isinstance(choice, Choice):
            return choice
        if isinstance(choice, str):
            return cls(name=choice)
        if isinstance(choice, Mapping) and isinstance(choice.get("name"), str):
            return cls(name=choice["name"], options={k: v for k, v in choice.items() if k != "name"})
        raise ValueError(f"{choice!r}; expected the name of a mechanism, or {{'name': …}} with its options")

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **self.options}

    def __hash__(self) -> int:
        return hash((self.name, json.dumps(dict(self.options), sort_keys=True, default=str)))


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts that replaces each MLP, except those of the first layers."""

    experts: int = 64
    active: int = 8  # experts that a token is routed to
    shared: int = 1  # experts that every token uses
    hidden: int  # width of one expert
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    balance: Literal["bias", "loss", "none"] = "bias"  # bias: without an auxiliary loss, see `MixtureOfExperts`
    balance_rate: float = 1e-3  # step of the bias, or weight of the auxiliary loss
    scale: float = 1.0  # factor of the routed experts' sum; the shared experts are not scaled
    dense_layers: int = 0  # number of first layers that have an MLP of the decoder's `hidden` instead

    def __post_init__(self) -> None:
        check_fields(self)
        check_range("moe.experts", self.experts, 2, 2**16)
        check_range(
            "moe.active", self.active, 1, self.experts, remedy="A token cannot use more experts than moe.experts"
        )
        check_range("moe.shared", self.shared, 0, 2**16)
        check_range("moe.hidden", self.hidden, 1, MOST_DIM)
        check_range("moe.balance_rate", self.balance_rate, 0)
        if not self.scale > 0:
            raise ValueError(f"moe.scale={self.scale}; expected a number above 0, such as 1.0")
        check_range("moe.dense_layers", self.dense_layers, 0, MOST_DEPTH)


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Layers first … last − 1 run `repeats` times with shared weights."""

    first: int
    last: int
    repeats: int
    share_mixers: bool = False  # one mixer per sublayer instead of per execution: `repeats` can be changed later

    def __post_init__(self) -> None:
        check_fields(self)
        check_range("loop.first", self.first, 0)
        check_range("loop.last", self.last, self.first + 1, remedy="A loop needs at least one layer")
        check_range("loop.repeats", self.repeats, 1)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder of `layers` pairs of attention and MLP, whose depth mixing is a child (`mixer`).

    Qwen3-style by default. Fields of the heads after `heads`, and `rope_theta`, are those of the attention "gqa".
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    hidden: int  # width of an MLP
    kv_heads: int | None = None  # None: equal to heads
    head_dim: int | None = None  # None: dim / heads
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    key_norm: Literal["before_rope", "after_rope"] = "before_rope"
    tie_embeddings: bool = False
    init_std: float = 0.02
    output_init: float = 1.0  # standard deviation of the output projections of sublayers, divided by init_std
    attention: str | tuple[str, ...] = "gqa"  # of every layer, or a pattern that repeats: "gqa", "kda" or "mla"
    kda: KDAConfig | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    loop: LoopConfig | None = None
    mixer: Choice = Choice(name="residual")
    kv_mixer: Choice | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "mixer", Choice.of(self.mixer))
        put(self, "kv_mixer", None if self.kv_mixer is None else Choice.of(self.kv_mixer))
        put(self, "attention", tuple(self.attention) if isinstance(self.attention, list) else self.attention)
        put(self, "kda", make_part(KDAConfig, "kda", self.kda))
        put(self, "mla", make_part(MLAConfig, "mla", self.mla))
        put(self, "moe", make_part(MoEConfig, "moe", self.moe))
        put(self, "loop", make_part(LoopConfig, "loop", self.loop))
        check_fields(self)
        for name, most in (("vocab_size", MOST_DIM * 16), ("layers", MOST_DEPTH // 2)):
            check_range(name, getattr(self, name), 1, most)
        for name in ("dim", "heads", "hidden", "kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1, MOST_DIM)
        check_positive("norm_eps", self.norm_eps)
        check_positive("rope_theta", self.rope_theta)
        check_range("init_std", self.init_std, 0)
        check_range("output_init", self.output_init, 0)
        check_attention(self)
        if self.moe is not None:
            remedy = f"The decoder has {self.layers} layers; without experts in any of them, use moe=None"
            check_range("moe.dense_layers", self.moe.dense_layers, 0, self.layers - 1, remedy=remedy)
        if self.loop is not None:
            check_range("loop.last", self.loop.last, 1, self.layers, remedy=f"The decoder has {self.layers} layers")
            check_range("loop.repeats", self.loop.repeats, 1, MOST_DEPTH // (2 * self.layers))
        self.mixers()

    def mixers(self) -> dict[str, tuple[MixerConfig, dict[str, int]]]:
        """For each child "mixer" and "kv_mixer" that is not None: its options, its width and its depth."""
        children = {}
        for child, get in (("mixer", mechanism), ("kv_mixer", kv_mechanism)):
            if (choice := getattr(self, child)) is not None:
                sizes = self.sizes(child)
                children[child] = make_config(get(choice.name), choice.name, choice.options, **sizes), sizes
        return children

    def sizes(self, child: str) -> dict[str, int]:
        if child == "mixer":
            return {"dim": self.dim, "depth": self.depth}
        return {"dim": self.width, "depth": len(self.layer_order)}

    @property
    def attention_kinds(self) -> tuple[str, ...]:
        """The kind of attention of each layer."""
        return repeat_kinds(self.attention, self.layers)

    def kept(self, kv_heads: int | None = None) -> tuple[Kept, ...]:
        """What each execution of attention keeps of earlier tokens, in order, on a process with this many heads."""
        columns = ((self.num_kv_heads if kv_heads is None else kv_heads, self.width),) * 2  # keys and values
        kinds = {"gqa": Kept(columns=columns)}
        kinds |= {name: part.kept for name, part in (("kda", self.kda), ("mla", self.mla)) if part is not None}
        return tuple(kinds[self.attention_kinds[layer]] for layer in self.layer_order)

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def width(self) -> int:
        """Number of channels of a head."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def layer_order(self) -> tuple[int, ...]:
        """The layers in order of execution."""
        loop = self.loop
        if loop is None:
            return tuple(range(self.layers))
        inside = [*range(loop.first, loop.last)] * loop.repeats
        return (*range(loop.first), *inside, *range(loop.last, self.layers))

    @property
    def depth(self) -> int:
        """Number of executed sublayers, which a mechanism mixes."""
        return 2 * len(self.layer_order)

    @property
    def kinds(self) -> list[Kind]:
        return ["attn", "mlp"] * len(self.layer_order)

    @classmethod
    def from_depth(cls, depth: int, *, backbone: str = backbones.QWEN3, **overrides: Any) -> DecoderConfig:
        """A decoder from one number: `depth` sublayers of width 32·depth, heads from `dial_heads`, bytes as tokens.

        Args:
            depth: number of sublayers; attention and MLP count separately.
            backbone: "qwen3" or "kimi_linear", which decides the kinds of attention, their sizes and the experts.
            overrides: other fields. Of `dim`, `heads` and `hidden` given here, the backbone's other sizes follow.
        """
        if not isinstance(depth, int) or isinstance(depth, bool) or not 2 <= depth <= MOST_DEPTH or depth % 2:
            raise ValueError(f"depth={depth!r}; expected an even number of sublayers, 2 to {MOST_DEPTH}")
        sizes = {"dim": -(-32 * depth // 64) * 64, **{k: v for k, v in overrides.items() if k in DIAL_SIZES}}
        for name, size in sizes.items():
            if isinstance(size, int):
                check_range(name, size, 1, MOST_DIM)
        derived = backbones.derive(backbone, layers=depth // 2, **sizes)
        return cls(**{"vocab_size": 256, "layers": depth // 2, "dim": sizes["dim"], **derived, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON values."""
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Choice):
                value = value.to_dict()
            fields[field.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
        return fields

    def saved(self) -> dict[str, Any]:
        """`to_dict` with every option of the mechanisms, as files store it, so that new defaults do not change it."""
        fields = self.to_dict()
        for child, (config, sizes) in self.mixers().items():
            fields[child] = {"name": fields[child]["name"], **config.resolved(**sizes)}
        return fields

    def canonical(self) -> dict[str, Any]:
        """`to_dict` with every option of the mechanisms, in a form that is the same for equal decoders."""
        fields = self.to_dict()
        kinds = self.attention_kinds
        fields["attention"] = kinds[0] if len({*kinds}) == 1 else kinds
        for child, (config, sizes) in self.mixers().items():
            fields[child] = {"name": fields[child]["name"], **config.canonical(**sizes)}
        return fields

    def fingerprint(self) -> dict[str, Any]:
        """`canonical` without the options whose value was the default in 0.1.0 or computes the same as 0.1.0: the
        digest of a run of that version does not change."""
        fields = self.canonical()
        for name in ("attention", "kda", "mla"):
            if fields[name] in ("gqa", None):
                del fields[name]
        if self.loop is not None and not self.loop.share_mixers:
            del fields["loop"]["share_mixers"]
        for child, (config, sizes) in self.mixers().items():
            name = fields[child]["name"]
            if name in legacy.DEFAULTS:
                before = type(config)(**legacy.complete(name, {}, **sizes)).canonical(**sizes)
                fields[child] = {k: v for k, v in fields[child].items() if k == "name" or v != before[k]}
        return fields

    @classmethod
    def from_saved(cls, fields: Mapping[str, Any], number: int) -> DecoderConfig:
        """The configuration in a file of format `number`; format 1 implies the defaults of 0.1.0."""
        bare = cls.from_dict({**fields, "mixer": "residual", "kv_mixer": None})
        children: dict[str, Any] = {}
        for child, get in (("mixer", mechanism), ("kv_mixer", kv_mechanism)):
            if fields.get(child) is not None:
                choice, sizes = Choice.of(fields[child]), bare.sizes(child)
                options = legacy.complete(choice.name, choice.options, **sizes) if number == 1 else choice.options
                make_config(get(choice.name), choice.name, options, **sizes)
                options = without_defaults(get(choice.name).Config, options, sizes)
                children[child] = Choice(name=choice.name, options=options)
        return dataclasses.replace(bare, **children)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> DecoderConfig:
        known = {field.name for field in dataclasses.fields(cls)}
        if extra := sorted(set(given) - known):
            raise ValueError(f"unknown fields {', '.join(extra)}. Known: {', '.join(sorted(known))}")
        needed = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
        if missing := sorted(needed - set(given)):
            raise ValueError(f"missing fields: {', '.join(missing)}")
        return cls(**given)


def without_defaults(cls: type[MixerConfig], options: Mapping[str, Any], sizes: dict[str, int]) -> Mapping[str, Any]:
    """The options that differ from their defaults. Defaults that depend on the sizes can then follow new sizes, and an
    option can be set that the default of another one excludes."""
    for name, value in options.items():
        rest = {key: other for key, other in options.items() if key != name}
        try:
            resolved = cls(**rest).resolved(**sizes)
        except TypeError:  # an option without a default
            continue
        if resolved[name] == value:
            return without_defaults(cls, rest, sizes)
    return options
