"""The configuration of a model of transformers with a mechanism put into it: the other kind of [model] beside the
decoder's. `depthmix.hf`, which imports transformers, is imported only when the folder is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.mechanisms import MixerConfig, kv_mechanism, make_config, mechanism, retrofit_options
from depthmix.models import Choice, DecoderConfig
from depthmix.models import count_parameters as count_decoder
from depthmix.models.counting import Counts
from depthmix.support.checks import check_fields, check_range, user_path

KIND = "from_hf"  # the field by which files tell this kind of model from a decoder
SIZES = ("vocab_size", "dim", "layers", "depth", "head_dim", "positions")


@dataclass(frozen=True, kw_only=True)
class RetrofitConfig:
    """A causal language model of transformers, with what `dm.wrap` puts into it.

    from_hf: the folder that it comes from. It may be moved: the digest says what it must hold.
    digest: SHA-256 of its configuration, weights and tokenizer.
    mixer, kv_mixer, blend, freeze_base: as in `dm.wrap`; options that keep the model's function are set by default.

    The other fields are sizes that follow from the folder: `of` reads them.
    """

    from_hf: str
    digest: str
    vocab_size: int
    dim: int
    layers: int
    depth: int  # sublayers
    head_dim: int
    positions: int  # tokens of the longest row
    mixer: Choice = Choice(name="residual")
    kv_mixer: Choice | None = None
    blend: bool = True
    freeze_base: bool = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "mixer", Choice.of(self.mixer))
        put(self, "kv_mixer", None if self.kv_mixer is None else Choice.of(self.kv_mixer))
        check_fields(self)
        for name in SIZES:
            check_range(name, getattr(self, name), 1)
        if self.freeze_base and self.is_plain:
            raise ValueError("freeze_base=True with mixer residual; expected a mechanism: nothing would be trained")
        self.mixers()

    @classmethod
    def of(cls, folder: str, **choices: Any) -> RetrofitConfig:
        """For the model in `folder`; `choices` are the fields that the folder does not decide."""
        from depthmix.hf.base import digest_of_folder, sizes_of_folder

        path = user_path(folder)
        return cls(from_hf=folder, digest=digest_of_folder(path), **sizes_of_folder(path)._asdict(), **choices)

    def moved(self, folder: str) -> RetrofitConfig:
        """The same model from another folder, whose digest and sizes are its own."""
        choices = {name: getattr(self, name) for name in ("mixer", "kv_mixer", "blend", "freeze_base")}
        return RetrofitConfig.of(folder, **choices)

    @property
    def path(self) -> Path:
        return user_path(self.from_hf)

    def existing_path(self) -> Path:
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"{self.from_hf} is not there, the model that this run began with. Restore it, or say where it is now: "
                "depthmix train --folder RUN --from-hf FOLDER"
            )
        return self.path

    @property
    def is_plain(self) -> bool:
        """Whether the model is what it was: without a mechanism."""
        return self.mixer.name == "residual" and self.kv_mixer is None

    def mixers(self) -> dict[str, tuple[MixerConfig, dict[str, int]]]:
        """For each child "mixer" and "kv_mixer" that is not None: its options, its width and its depth."""
        sizes = {"dim": self.dim, "depth": self.depth}
        options = retrofit_options(self.mixer.name, self.mixer.options, **sizes)
        children = {"mixer": (make_config(mechanism(self.mixer.name), self.mixer.name, options, **sizes), sizes)}
        if (kv := self.kv_mixer) is not None:
            sizes = {"dim": self.head_dim, "depth": self.layers}
            children["kv_mixer"] = make_config(kv_mechanism(kv.name), kv.name, kv.options, **sizes), sizes
        return children

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value.to_dict() if isinstance(value, Choice) else value for name, value in values.items()}

    def saved(self) -> dict[str, Any]:
        """`to_dict` with every option of the mechanisms, as files store it, so that new defaults do not change it."""
        options = {child: config.resolved(**sizes) for child, (config, sizes) in self.mixers().items()}
        return self.with_options(options)

    def canonical(self) -> dict[str, Any]:
        """`to_dict` with every option of the mechanisms, in a form that is the same for equal models."""
        options = {child: config.canonical(**sizes) for child, (config, sizes) in self.mixers().items()}
        return self.with_options(options)

    def fingerprint(self) -> dict[str, Any]:
        """What decides a run."""
        return self.canonical()

    def with_options(self, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        fields = self.to_dict()
        return {**fields, **{child: {"name": fields[child]["name"], **every} for child, every in options.items()}}

    def wrapping(self) -> dict[str, Any]:
        """The mechanisms as the configuration of a wrapped model names them."""
        fields = self.saved()
        return {name: fields[name] for name in ("mixer", "kv_mixer", "blend")}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> RetrofitConfig:
        known = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(cls)}
        if extra := sorted(set(given) - set(known)):
            raise ValueError(f"unknown fields {', '.join(extra)} of a model with {KIND}. Known: {', '.join(known)}")
        if missing := sorted(name for name, needed in known.items() if needed and name not in given):
            raise ValueError(f"missing fields: {', '.join(missing)}; `depthmix train --from-hf FOLDER` reads them")
        return cls(**given)


ModelConfig = DecoderConfig | RetrofitConfig


def model_from_dict(fields: Mapping[str, Any]) -> ModelConfig:
    return RetrofitConfig.from_dict(fields) if KIND in fields else DecoderConfig.from_dict(fields)


def model_from_saved(fields: Mapping[str, Any], number: int) -> ModelConfig:
    """The model in a file of format `number`; those with `from_hf` name every option."""
    return RetrofitConfig.from_dict(fields) if KIND in fields else DecoderConfig.from_saved(fields, number)


def count_parameters(config: ModelConfig) -> Counts:
    """The numbers of parameters of a model, by part."""
    if isinstance(config, DecoderConfig):
        return count_decoder(config)
    from depthmix.hf.counting import count

    return count(config.existing_path(), config.wrapping()).counts
