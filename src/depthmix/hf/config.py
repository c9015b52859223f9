"""The decoder's configuration in the form of transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from depthmix.models import DecoderConfig
from depthmix.models.io import functions_in
from depthmix.support.files import FORMAT, format_of


class DepthmixConfig(PreTrainedConfig):
    """The configuration of a `DepthmixForCausalLM`: `DepthmixConfig(depthmix=decoder_config.to_dict())`.

    depthmix: the fields of a `DecoderConfig`, as its `to_dict` gives them. They are kept with every option of the
        mechanisms, so that a file means the same when a default changes.
    depthmix_format: format of these fields; files state theirs.
    use_cache: whether `forward` returns a cache when it is not asked; a model in training mode returns none.

    The sizes that transformers reads from a configuration (`vocab_size`, `hidden_size`, `num_hidden_layers`, …) follow
    from `depthmix`; other values for them are an error. A looped layer counts once for each execution.
    """

    model_type = "depthmix"
    keys_to_ignore_at_inference = ["past_key_values"]

    depthmix: dict[str, Any] | None = None
    depthmix_format: int = FORMAT
    use_cache: bool = True

    def __post_init__(self, **others: Any) -> None:
        if self.depthmix is not None:  # transformers builds an empty one to find the defaults
            check_fields(self.depthmix)
            number = format_of({"format": self.depthmix_format}, "this configuration (depthmix_format)")
            sizes = self.set_decoder(DecoderConfig.from_saved(self.depthmix, number))
            for name in sizes.keys() & others.keys():
                check_size(name, others.pop(name), sizes[name])
        super().__post_init__(**others)

    @property
    def decoder_config(self) -> DecoderConfig:
        """The configuration of the decoder; an error if an attribute that follows from it was changed."""
        if self.depthmix is None:
            raise ValueError(
                "depthmix=None; expected the fields of a decoder: DepthmixConfig(depthmix=config.to_dict())"
            )
        config = DecoderConfig.from_saved(self.depthmix, self.depthmix_format)
        for name, expected in sizes_of(config).items():
            check_size(name, getattr(self, name), expected)
        return config

    def set_decoder(self, config: DecoderConfig) -> dict[str, Any]:
        """Hold `config` from now on; returns the attributes that follow from it."""
        self.depthmix, self.depthmix_format = config.saved(), FORMAT
        sizes = sizes_of(config)
        for name, value in sizes.items():
            setattr(self, name, value)
        return sizes

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """A configuration from a file. One that names functions is refused: importing these runs their code."""
        for option, name in functions_in(check_fields(config_dict.get("depthmix", {}))):
            raise ValueError(
                f"this configuration names the function {name} ({option}); loading it runs the code of its module. If "
                "you trust it, read the file's field `depthmix` yourself and pass config=DepthmixConfig(depthmix=…)"
            )
        return super().from_dict(config_dict, **options)


def check_fields(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise TypeError(
            f"depthmix={fields!r}; expected the fields of a decoder: DepthmixConfig(depthmix=config.to_dict())"
        )
    return fields


def sizes_of(config: DecoderConfig) -> dict[str, Any]:
    """The attributes by which transformers makes caches, masks and new embeddings."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": len(config.layer_order),  # slots of a cache
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.width,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
    }


def check_size(name: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise ValueError(f"{name}={got!r}, but the field `depthmix` makes it {expected!r}. Change it there")


AutoConfig.register(DepthmixConfig.model_type, DepthmixConfig)
