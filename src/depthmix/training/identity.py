"""The fields that decide a run's result: their digest, and the differences between two configurations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthmix.training.config import TrainConfig

# Fields that may change when a run is resumed: none affects weights or losses (by more than rounding, where sums are
# taken in another order) unless a loss is bad, and how a bad loss was handled is in the metrics.
FREE = (
    *("data.folder", "run.folder", "run.keep", "run.checkpoint_every", "run.asynchronous", "run.tracker"),
    *("run.on_bad_loss", "run.bad_loss_factor", "run.recompute"),
)
FREE_PART = "parallel."
FREE_FOLDER = "model.from_hf"  # of a model of transformers: its digest decides


def is_free(key: str) -> bool:
    return key in (*FREE, FREE_FOLDER) or key.startswith(FREE_PART)


# Fields added after 0.1.0, with the value that keeps the earlier behaviour: with it the digest stays the same.
ADDED: Mapping[str, Any] = {
    "run.weights_seed": 0,
    "model.output_init": 1.0,
    "model.moe.scale": 1.0,
    "model.moe.dense_layers": 0,
}


def digest_of(config: Mapping[str, Any]) -> str:
    deciding = {
        key: as_float(value)
        for key, value in leaves(config)
        if not is_free(key) and not (key in ADDED and value == ADDED[key])
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def as_float(value: Any) -> Any:
    """1 and 1.0 are the same value."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def leaves(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every field by its dotted key."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*above, name))
        else:
            yield ".".join((*above, name)), value


def difference(old: TrainConfig, new: TrainConfig) -> list[str]:
    """The fields that decide the result and differ, one line for each."""
    before, after = (dict(leaves(config.deciding(config.model.canonical()))) for config in (old, new))
    keys = sorted(key for key in {*before, *after} if not is_free(key))
    return [
        f"{key}: was {before.get(key)!r}, is now {after.get(key)!r}"
        for key in keys
        if before.get(key) != after.get(key)
    ]
