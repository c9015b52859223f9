"""Everything that decides a run, as plain data: frozen dataclasses, TOML, dotted keys, one dial."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from depthmix.data.tokenizers import Bytes, count_ids, full_name
from depthmix.mechanisms import is_kv, kv_mechanism, mechanism
from depthmix.models import DecoderConfig, count_parameters
from depthmix.support.checks import check_fields, check_positive, check_range, did_you_mean, parse_value, user_path
from depthmix.support.files import FORMAT, format_of, parse_toml, read_text, toml_lines

# What may change from one start to the next: none of it touches the weights or the measured losses of a run that goes
# well, and what became of a bad loss is in its metrics.
FREE = (
    *("data.folder", "run.folder", "run.keep", "run.checkpoint_every", "run.asynchronous", "run.tracker"),
    *("run.on_bad_loss", "run.bad_loss_factor"),
)
RESTORE = "Restore the file, or choose another"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: str = "stdlib"  # or a folder, a text, JSONL or Parquet file, or hf:NAME
    tokenizer: str = "bytes"  # or bpe:4096, or a tokenizer.json
    folder: str | None = None  # of the tokens; None: under data/, by what decides them
    validation: float = 0.05  # share that is held out
    field: str = "text"  # of a row of JSONL, Parquet or a dataset: where its text is
    tokens_per_row: int = 256
    rows: int = 16  # of a micro-batch, over all ranks

    def __post_init__(self) -> None:
        check_fields(self)
        check_range("data.tokens_per_row", self.tokens_per_row, 2)
        check_range("data.rows", self.rows, 1)
        if not 0 < self.validation < 1:
            raise ValueError(f"data.validation={self.validation}; expected a share between 0 and 1")

    @property
    def path(self) -> Path:
        if self.folder is not None:
            return Path(self.folder)
        words = [re.sub(r"[^A-Za-z0-9]+", "-", word).strip("-") for word in (self.source, self.tokenizer)]
        marks = [self.source, self.tokenizer]
        asked = {name: getattr(self, name) for name in ("validation", "field")}
        marks += [f"{name}={value}" for name, value in asked.items() if value != getattr(DataConfig, name)]
        if marks[2:] or "/" in self.source + self.tokenizer:  # paths that differ in a sign must not share a folder
            words.append(hashlib.sha256("\n".join(marks).encode()).hexdigest()[:8])
        return Path("data") / "_".join(words)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Muon takes the matrices of the sublayers, scaled so that AdamW's rate and decay serve for both."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-3
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95  # of Muon
    weight_decay: float = 0.1  # of matrices
    clip: float = 1.0  # largest norm of the whole gradient; 0: none

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "betas", tuple(self.betas))
        check_range("optimizer.lr", self.lr, 0)
        check_positive("optimizer.eps", self.eps)
        for name in ("weight_decay", "clip"):
            check_range(f"optimizer.{name}", getattr(self, name), 0)
        for value in (*self.betas, self.momentum):
            if not 0 <= value < 1:
                raise ValueError(f"optimizer.betas={self.betas}, momentum={self.momentum}; expected numbers in [0, 1)")
        if len(self.betas) != 2:
            raise ValueError(f"optimizer.betas={self.betas}; expected two numbers")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Shares of all steps, so that a shorter run has the same shape."""

    kind: Literal["cosine", "wsd"] = "cosine"  # wsd: warmup, stable, decay
    warmup: float = 0.02
    decay: float = 0.2  # of wsd: the last share, in which the rate falls in a line
    final: float = 0.1  # the last rate over the highest

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("warmup", "decay", "final"):
            check_range(f"schedule.{name}", getattr(self, name), 0, 1)
        if self.kind == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(f"schedule.warmup={self.warmup} and decay={self.decay}; expected at most 1 together")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    folder: str = "runs/run"
    steps: int = 1000
    accumulate: int = 1  # micro-batches of a step
    seed: int = 0
    device: str = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    validate_every: int = 100
    validate_batches: int = 16
    checkpoint_every: int = 100
    keep: int = 3
    asynchronous: bool = False
    snapshot_every: int = 500  # M, averaged over a fixed batch
    depth_every: int = 100  # norms over depth, on the same batch
    on_bad_loss: Literal["stop", "skip"] = "stop"
    bad_loss_factor: float = 3.0  # a loss above so many times the running median is bad
    tracker: Literal["none", "tensorboard", "trackio"] = "none"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("steps", "accumulate", "validate_batches", "keep"):
            check_range(f"run.{name}", getattr(self, name), 1)
        for name in ("validate_every", "checkpoint_every", "snapshot_every", "depth_every"):  # 0: at the end only
            check_range(f"run.{name}", getattr(self, name), 0)
        check_range("run.bad_loss_factor", self.bad_loss_factor, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    model: DecoderConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def tokens_per_step(self) -> int:
        return self.run.accumulate * self.data.rows * self.data.tokens_per_row

    @classmethod
    def from_dial(
        cls,
        depth: int = 12,
        mixer: str | Mapping[str, Any] = "residual",
        *,
        tokenizer: str = "bytes",
        folder: str | None = None,
        tokens: float | None = None,
        **model: Any,
    ) -> TrainConfig:
        """All from one number: `depth` sublayers of width 32·depth, 20 tokens a parameter, start and rate by the width.

        Args:
            depth: sublayers; attention and MLP count separately.
            mixer: a mechanism's name; a KV site's name alone goes with the residual, "attnres+value_residual" has both.
            tokenizer: bytes, bpe:SIZE or a tokenizer.json; decides the vocabulary, unless `vocab_size` is given.
            folder: of the run.
            tokens: to train on.
            model: other fields of DecoderConfig.
        """
        if "vocab_size" not in model:
            model["vocab_size"] = vocabulary(tokenizer)
        chosen = {**mechanisms(mixer), **model}
        decoder = DecoderConfig.from_depth(depth, **chosen)
        if "init_std" not in model:  # as wide matrices have with 0.02, so that narrow ones do not start with a whisper
            decoder = dataclasses.replace(decoder, init_std=float(f"{0.5 / math.sqrt(decoder.dim):.2g}"))
        name = "+".join(c.name for c in (decoder.mixer, decoder.kv_mixer) if c is not None)
        wide = decoder.dim >= 512
        data = DataConfig(tokenizer=tokenizer, tokens_per_row=512 if wide else 256, rows=32 if wide else 16)
        budget = dial_tokens(decoder) if tokens is None else tokens
        steps = max(1, round(budget / (data.rows * data.tokens_per_row)))
        run = RunConfig(folder=folder or f"runs/{name}-{depth}", steps=steps)
        rate = float(f"{3e-3 * math.sqrt(256 / decoder.dim):.2g}")
        return cls(model=decoder, data=data, optimizer=OptimizerConfig(lr=min(rate, 5e-3)), run=run)

    def to_dict(self) -> dict[str, Any]:
        """As it was given; `from_dict` reads it with the defaults of this version."""
        parts = {f.name: dataclasses.asdict(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {**parts, "model": self.model.to_dict()}

    def saved(self) -> dict[str, Any]:
        """What files hold: a format and every option of the mechanisms, so that later defaults do not change it."""
        return {"format": FORMAT, **self.to_dict(), "model": self.model.saved()}

    @classmethod
    def from_saved(cls, found: Mapping[str, Any], where: object = "the configuration") -> TrainConfig:
        """The content of a file; one without a format has the defaults of 0.1.0, which wrote none."""
        number = format_of(found, where)
        parts = {name: part for name, part in found.items() if name != "format"}
        if not isinstance(parts.get("model"), Mapping):
            return cls.from_dict(parts)  # which says what is wrong
        return cls.from_dict({**parts, "model": DecoderConfig.from_saved(parts["model"], number).to_dict()})

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> TrainConfig:
        hints = get_type_hints(cls)
        if extra := sorted(set(found) - set(hints)):
            raise ValueError(f"unknown parts {', '.join(extra)}; expected some of {', '.join(hints)}")
        if "model" not in found:
            raise ValueError("the part [model] is missing; expected a configuration that `depthmix train` wrote")
        for name, part in found.items():
            if not isinstance(part, Mapping):
                raise ValueError(f"{name}={part!r}; expected its fields, such as {name}.{fields(hints[name])[0]}")
        parts: dict[str, Any] = {"model": DecoderConfig.from_dict(found["model"])}
        for name in set(found) - {"model"}:
            known = fields(hints[name])
            if extra := sorted(set(found[name]) - set(known)):
                raise ValueError(f"unknown fields {', '.join(extra)} of {name}; expected some of {', '.join(known)}")
            parts[name] = hints[name](**found[name])
        return cls(**parts)

    def to_toml(self) -> str:
        found = self.saved()
        for child in ("mixer", "kv_mixer"):
            if (options := found["model"][child]) is not None:
                found["model"][child] = {k: "none" if v is None else v for k, v in options.items()}
        return "\n".join(toml_lines(found, ())).strip() + "\n"

    @classmethod
    def from_toml(cls, text: str, where: str = "the configuration") -> TrainConfig:
        found = parse_toml(text, where, RESTORE)
        format_of(found, where)
        try:
            return cls.from_saved(with_none(found), where)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where} is no configuration of this version: {error}") from error

    @classmethod
    def from_file(cls, path: Path) -> TrainConfig:
        return cls.from_toml(read_text(path, RESTORE), str(path))

    @property
    def digest(self) -> str:
        """Of all that decides weights and losses."""
        return digest_of({**self.to_dict(), "model": self.model.fingerprint()})


def digest_of(found: Mapping[str, Any]) -> str:
    plain = {key: as_float(value) for key, value in leaves(found) if key not in FREE}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def with_none(found: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: an option that is None is written as "none", since its default may come to be another."""
    model: Any = found.get("model")
    for child in ("mixer", "kv_mixer"):
        if isinstance(model, dict) and isinstance(options := model.get(child), dict):
            model[child] = {key: None if value == "none" else value for key, value in options.items()}
    return found


def as_float(value: Any) -> Any:
    """1 and 1.0 are one value, however they were written."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def fields(part: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(part)]


def dial_tokens(model: DecoderConfig) -> int:
    """20 for each parameter that a token uses, without embeddings."""
    return 20 * count_parameters(model).active_without_embeddings


def vocabulary(tokenizer: str) -> int:
    name = full_name(tokenizer)
    if name == "bytes":
        return Bytes.size
    return int(name.removeprefix("bpe:")) if name.startswith("bpe:") else count_ids(user_path(tokenizer))


def mechanisms(mixer: str | Mapping[str, Any]) -> dict[str, Any]:
    """The children of a decoder that "block_attnres", "depth_attention" or "attnres+value_residual" names."""
    if not isinstance(mixer, str):
        return {"mixer": mixer}
    found: dict[str, Any] = {}
    for name in mixer.split("+"):
        child = "kv_mixer" if is_kv(name) else "mixer"
        if child in found:
            kind = "KV" if child == "kv_mixer" else "depth"
            raise ValueError(
                f"mixer={mixer!r} has two {kind} mechanisms, {found[child]} and {name}; expected at most one of each "
                "kind, such as attnres+value_residual"
            )
        found[child] = name
    return found


def override(config: TrainConfig, key: str, value: Any) -> TrainConfig:
    """A copy with one field set by its dotted key: "optimizer.lr", "model.mixer", "mixer.block_sublayers".

    A text is read as a number, true or false, none, or a list where it is one, unless the field wants a text. Setting
    `model.mixer` to a name drops the options of the one before; setting `mixer.num_blocks` drops
    `mixer.block_sublayers`, and so with other options that exclude each other.
    """
    path = ["model", *key.split(".")] if key.split(".")[0] in ("mixer", "kv_mixer") else key.split(".")
    found = config.to_dict()
    place: Any = found
    for i, name in enumerate(path[:-1]):
        if not isinstance(place, dict) or name not in place:
            raise ValueError(
                f"unknown key {key!r}; {'.'.join(path[:i]) or 'a configuration'} has no {name!r}. {known(place)}"
            )
        if place[name] is None:
            place[name] = {}
        place = place[name]
    fixed = path[:2] not in (["model", "mixer"], ["model", "kv_mixer"], ["model", "moe"], ["model", "loop"])
    if not isinstance(place, dict) or (fixed and path[-1] not in place):
        keys = [whole for whole, _ in leaves(config.to_dict())]
        hint = did_you_mean(path[-1], keys) or did_you_mean(".".join(path), keys)
        raise ValueError(f"unknown key {key!r}. {hint}{known(place)}")
    if not fixed and path[1] in ("mixer", "kv_mixer") and len(path) == 3:
        drop_excluded(place, path[1], path[2], parse_value(value))
    problem: Exception | None = None
    for read in (like(place.get(path[-1]), value), value):  # a text that looks like a number, or "none", as it is
        place[path[-1]] = read
        try:
            return TrainConfig.from_dict(found)
        except (TypeError, ValueError) as error:
            problem = problem or error
    raise ValueError(f"{key}={value!r}: {problem}")


def drop_excluded(options: dict[str, Any], child: str, key: str, value: Any) -> None:
    """Remove, for one option that is about to be set, those that cannot stay beside it."""
    gone: list[str] = []
    if key == "name" and value != options.get("name"):
        gone = [other for other in options if other != "name"]
    elif "name" in options and value is not None:
        gone = [other for group in excluding(child, options["name"]) if key in group for other in group if other != key]
    for other in gone:
        options.pop(other, None)


def excluding(child: str, name: str) -> tuple[tuple[str, ...], ...]:
    return (mechanism if child == "mixer" else kv_mechanism)(name).Config.either


def check_excluding(config: TrainConfig, keys: Iterable[str]) -> None:
    """Of options that exclude each other, somebody may set one only."""
    given = {key.removeprefix("model.") for key in keys}
    for child in ("mixer", "kv_mixer"):
        choice = getattr(config.model, child)
        for group in excluding(child, choice.name) if choice is not None else ():
            both = [f"{child}.{name}" for name in group if f"{child}.{name}" in given]
            if len(both) > 1:
                raise ValueError(f"{' and '.join(both)} are both set; expected one of them: they exclude each other")


def known(place: Any) -> str:
    return f"Known: {', '.join(place)}" if isinstance(place, dict) else "It has no parts"


def like(old: Any, value: Any) -> Any:
    """1e4 is a whole number where one is expected."""
    new = parse_value(value)
    if isinstance(old, int) and not isinstance(old, bool) and isinstance(new, float) and new.is_integer():
        return int(new)
    return new


def leaves(found: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every field by its dotted key."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*above, name))
        else:
            yield ".".join((*above, name)), value


def difference(old: TrainConfig, new: TrainConfig) -> list[str]:
    """What decides the result and is not the same, a line each."""
    before, after = (dict(leaves({**each.to_dict(), "model": each.model.canonical()})) for each in (old, new))
    keys = sorted({*before, *after} - set(FREE))
    return [
        f"{key}: {before.get(key)!r} there, {after.get(key)!r} now" for key in keys if before.get(key) != after.get(key)
    ]
