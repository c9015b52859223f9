"""The configuration of a wrapped model: its family's own, with the mechanisms in a field more.

In memory `model_type` stays the family's, since other packages look there for what they know of a family. Only files
say `"model_type": "depthmix_wrapped"` and name the family beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from depthmix.models import Choice
from depthmix.models.io import functions_in
from depthmix.support.files import FORMAT, format_of

MODEL_TYPE = "depthmix_wrapped"
FIELD = "depthmix"  # of the configuration: {"format": …, "mixer": …, "kv_mixer": …, "blend": …}
KNOWN = {"format", "mixer", "kv_mixer", "blend"}


class WrappedConfigMixin:
    """Before the family's configuration class. What is written to disk changes, nothing else."""

    depthmix: dict[str, Any]

    def to_diff_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        family: str = type(self).model_type  # type: ignore[attr-defined]
        return {**fields, "model_type": MODEL_TYPE, "base_model_type": family, FIELD: self.depthmix}


class DepthmixWrappedConfig(PreTrainedConfig):
    """What the Auto classes find under the model type on disk: it gives the family's configuration, extended."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        family, fields = config_dict.get("base_model_type"), config_dict.get(FIELD)
        if family not in CONFIG_MAPPING:
            raise ValueError(f"base_model_type={family!r} in this configuration; expected a family of transformers")
        check_fields(fields)
        base = CONFIG_MAPPING[family]
        announce(base)
        own = {name: value for name, value in config_dict.items() if name not in ("model_type", "base_model_type")}
        return config_class(base).from_dict({**own, "model_type": family}, **options)


FAMILIES_READ: list[type] = []  # configuration classes of the families that files have named so far
LISTENERS: list[Callable[[type], object]] = []


def announce(base: type) -> None:
    FAMILIES_READ.append(base)
    for listener in LISTENERS:
        listener(base)


def when_read(listener: Callable[[type], object]) -> None:
    """Call `listener` with the configuration class of each family that a file names, also of those named before."""
    LISTENERS.append(listener)
    for base in FAMILIES_READ:
        listener(base)


@functools.cache
def config_class(base: type) -> Any:
    """The class of a wrapped model's configuration, for that of a family."""
    body = {"__module__": __name__, "base": base}
    return type(f"Depthmix{base.__name__}", (WrappedConfigMixin, base), body)


def check_fields(fields: Any) -> None:
    """Refuse what `save_pretrained` did not write, and functions, whose import would run code."""
    if not isinstance(fields, Mapping) or set(fields) != KNOWN or not isinstance(fields["blend"], bool):
        raise ValueError(f"{FIELD}={fields!r} in this configuration; expected the fields {', '.join(sorted(KNOWN))}")
    format_of(fields, f"this configuration ({FIELD})")
    for option, name in functions_in(fields):
        raise ValueError(
            f"this configuration names the function {name} ({option}); loading it runs the code of its module. If you "
            "trust it, load the unwrapped model and call dm.wrap with these options yourself"
        )


def make_fields(mixer: Choice, kv_mixer: Choice | None, blend: bool) -> dict[str, Any]:
    """The field as it is written: plain JSON values."""
    fields = {"format": FORMAT, "mixer": mixer.to_dict(), "kv_mixer": None, "blend": blend}
    return fields if kv_mixer is None else {**fields, "kv_mixer": kv_mixer.to_dict()}


def read_fields(fields: Mapping[str, Any]) -> tuple[Choice, Choice | None, bool]:
    """What `make_fields` was given."""
    kv_mixer = fields["kv_mixer"]
    return Choice.of(fields["mixer"]), None if kv_mixer is None else Choice.of(kv_mixer), fields["blend"]


AutoConfig.register(MODEL_TYPE, DepthmixWrappedConfig)
