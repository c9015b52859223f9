"""The configuration of a run as plain data: frozen dataclasses, TOML, and defaults from one dial, the depth."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from depthmix.data.tokenizers import TOKENIZER_FILE, vocabulary_size
from depthmix.models import DecoderConfig
from depthmix.models.backbones import QWEN3
from depthmix.parallel.config import ParallelConfig
from depthmix.support.checks import check_fields, check_option, check_positive, check_range, user_path
from depthmix.support.files import FORMAT, format_of, parse_toml, read_text, toml_lines
from depthmix.training.dial import dial_tokens, initial_std, learning_rate, output_init, split_mixer
from depthmix.training.identity import digest_of
from depthmix.training.retrofit import ModelConfig, RetrofitConfig, model_from_dict, model_from_saved

RESTORE = "Restore the file, or choose another"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: str = "stdlib"  # or a folder, a text, JSONL or Parquet file, or hf:NAME
    tokenizer: str = "bytes"  # or bpe:4096, or a tokenizer.json
    folder: str | None = None  # where tokens are stored; None: under data/, named by what decides them
    validation: float = 0.05  # share of the text that is held out
    field: str = "text"  # field with the text, in rows of JSONL, Parquet or a dataset
    tokens_per_row: int = 256
    rows: int = 16  # rows of a micro-batch, over all ranks

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
        options = {name: getattr(self, name) for name in ("validation", "field")}
        marks += [f"{name}={value}" for name, value in options.items() if value != getattr(DataConfig, name)]
        # Paths that differ in one character must not share a folder.
        if marks[2:] or "/" in self.source + self.tokenizer:
            words.append(hashlib.sha256("\n".join(marks).encode()).hexdigest()[:8])
        return Path("data") / "_".join(words)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Muon updates the matrices of the sublayers, scaled so that one learning rate and decay suit both optimisers."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-3
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95  # Muon only
    weight_decay: float = 0.1  # matrices only
    clip: float = 1.0  # largest norm of the whole gradient; 0: no clipping

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
    """Lengths are shares of all steps, so that a shorter run has a schedule of the same shape."""

    kind: Literal["cosine", "wsd"] = "cosine"  # wsd: warmup, stable, decay
    warmup: float = 0.02
    decay: float = 0.2  # wsd only: the last share of the steps, over which the rate falls linearly
    final: float = 0.1  # final rate as a share of the highest

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("warmup", "decay", "final"):
            check_range(f"schedule.{name}", getattr(self, name), 0, 1)
        if self.kind == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(f"schedule.warmup={self.warmup} and decay={self.decay}; expected a sum of at most 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    folder: str = "runs/run"
    steps: int = 1000
    accumulate: int = 1  # micro-batches per step
    seed: int = 0
    weights_seed: int = 0  # changes the initial weights, but not the order of the data
    device: str = "cpu"
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    compile: bool = False
    recompute: int = 0  # sublayers per segment of activation checkpointing; 0: none
    validate_every: int = 100
    validate_batches: int = 16
    checkpoint_every: int = 100
    keep: int = 3
    asynchronous: bool = False
    snapshot_every: int = 500  # M and weights over sources, averaged over a fixed batch
    depth_every: int = 100  # magnitudes over depth and what layers read, on the same batch
    on_bad_loss: Literal["stop", "skip"] = "stop"
    bad_loss_factor: float = 3.0  # a loss above this multiple of the running median is bad
    tracker: Literal["none", "tensorboard", "trackio", "wandb"] = "none"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("steps", "accumulate", "validate_batches", "keep"):
            check_range(f"run.{name}", getattr(self, name), 1)
        check_range("run.recompute", self.recompute, 0)
        for name in ("validate_every", "checkpoint_every", "snapshot_every", "depth_every"):  # 0: at the end only
            check_range(f"run.{name}", getattr(self, name), 0)
        check_range("run.bad_loss_factor", self.bad_loss_factor, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

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
        optimizer: str = "muon",
        backbone: str = QWEN3,
        **model: Any,
    ) -> TrainConfig:
        """A whole configuration from one number: `depth` sublayers of width 32·depth, 20 tokens per parameter; initial
        weights and learning rate follow from depth and width. How they were chosen: docs/results/recipe.md.

        Args:
            depth: number of sublayers; attention and MLP count separately.
            mixer: a mechanism's name; a KV mechanism alone uses the plain residual; join two with +.
            tokenizer: bytes, bpe:SIZE or a tokenizer.json; decides the vocabulary, unless `vocab_size` is given.
            folder: folder of the run.
            tokens: number of tokens to train on.
            optimizer: muon or adamw; decides the learning rate.
            backbone: qwen3 or kimi_linear; see `DecoderConfig.from_depth`.
            model: other fields of DecoderConfig.
        """
        if "vocab_size" not in model:
            model["vocab_size"] = vocabulary_size(tokenizer)
        decoder = DecoderConfig.from_depth(depth, backbone=backbone, **{**split_mixer(mixer), **model})
        starts = {"init_std": initial_std(decoder.dim), "output_init": output_init(decoder.depth)}
        decoder = dataclasses.replace(decoder, **{k: v for k, v in starts.items() if k not in model})  # type: ignore[arg-type]
        name = "+".join(c.name for c in (decoder.mixer, decoder.kv_mixer) if c is not None)
        name = name if backbone == QWEN3 else f"{backbone}-{name}"
        wide = decoder.dim >= 512
        data = DataConfig(tokenizer=tokenizer, tokens_per_row=512 if wide else 256, rows=32 if wide else 16)
        budget = dial_tokens(decoder) if tokens is None else tokens
        steps = max(1, round(budget / (data.rows * data.tokens_per_row)))
        run = RunConfig(folder=folder or f"runs/{name}-{depth}", steps=steps)
        check_option("optimizer.name", optimizer, get_type_hints(OptimizerConfig)["name"])
        chosen = OptimizerConfig(name=optimizer, lr=learning_rate(decoder.dim, optimizer))  # type: ignore[arg-type]
        return cls(model=decoder, data=data, optimizer=chosen, schedule=ScheduleConfig(warmup=0.1), run=run)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as it was given; `from_dict` reads it with the defaults of this version."""
        parts = {f.name: dataclasses.asdict(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {**parts, "model": self.model.to_dict()}

    def saved(self) -> dict[str, Any]:
        """What files hold: a format and every option of the mechanisms, so that later defaults do not change it."""
        return {"format": FORMAT, **self.to_dict(), "model": self.model.saved()}

    @classmethod
    def from_saved(cls, content: Mapping[str, Any], where: object = "the configuration") -> TrainConfig:
        """The content of a file; one without a format has the defaults of 0.1.0, which wrote none."""
        number = format_of(content, where)
        parts = {name: part for name, part in content.items() if name != "format"}
        if not isinstance(parts.get("model"), Mapping):
            return cls.from_dict(parts)  # which raises the error
        return cls.from_dict({**parts, "model": model_from_saved(parts["model"], number).to_dict()})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        hints: dict[str, Any] = get_type_hints(cls)
        if extra := sorted(set(values) - set(hints)):
            raise ValueError(f"unknown sections {', '.join(extra)}; expected some of {', '.join(hints)}")
        if "model" not in values:
            raise ValueError("the section [model] is missing; expected a configuration that `depthmix train` wrote")
        hints["model"] = DecoderConfig  # for the message
        for name, part in values.items():
            if not isinstance(part, Mapping):
                raise ValueError(f"{name}={part!r}; expected its fields, such as {name}.{field_names(hints[name])[0]}")
        parts: dict[str, Any] = {"model": model_from_dict(values["model"])}
        for name in set(values) - {"model"}:
            known = field_names(hints[name])
            if extra := sorted(set(values[name]) - set(known)):
                raise ValueError(f"unknown fields {', '.join(extra)} in {name}; expected some of {', '.join(known)}")
            parts[name] = hints[name](**values[name])
        return cls(**parts)

    def to_toml(self) -> str:
        content = self.saved()
        for child in ("mixer", "kv_mixer"):
            if (options := content["model"][child]) is not None:
                content["model"][child] = {k: "none" if v is None else v for k, v in options.items()}
        return "\n".join(toml_lines(content, ())).strip() + "\n"

    @classmethod
    def from_toml(cls, text: str, where: str = "the configuration") -> TrainConfig:
        content = parse_toml(text, where, RESTORE)
        format_of(content, where)
        try:
            return cls.from_saved(read_none(content), where)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where} is not a valid configuration of this version: {error}") from error

    @classmethod
    def from_file(cls, path: Path) -> TrainConfig:
        return cls.from_toml(read_text(path, RESTORE), str(path))

    @property
    def digest(self) -> str:
        """The digest of all fields that affect weights and losses."""
        return digest_of(self.deciding(self.model.fingerprint()))

    def deciding(self, model: dict[str, Any]) -> dict[str, Any]:
        """`to_dict` with this form of the model. The tokenizer in the folder of a model is part of that folder's
        digest, so its path decides nothing."""
        fields = self.to_dict()
        if self.uses_own_tokenizer:
            fields["data"] = {**fields["data"], "tokenizer": "that of the model"}
        return {**fields, "model": model}

    @property
    def uses_own_tokenizer(self) -> bool:
        """Whether the tokenizer is the file in the folder of a model of transformers."""
        model = self.model
        return isinstance(model, RetrofitConfig) and user_path(self.data.tokenizer) == model.path / TOKENIZER_FILE


def read_none(content: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: an option that is None is written as "none", since its default may change later."""
    model: Any = content.get("model")
    for child in ("mixer", "kv_mixer"):
        if isinstance(model, dict) and isinstance(options := model.get(child), dict):
            model[child] = {key: None if value == "none" else value for key, value in options.items()}
    return content


def field_names(part: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(part)]
