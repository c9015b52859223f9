"""The decoder: a list of sublayers whose depth mixing is an exchangeable part."""

from importlib import import_module
from types import ModuleType

from depthmix.models.bounds import segment_bounds
from depthmix.models.config import Choice, DecoderConfig, LoopConfig, MoEConfig
from depthmix.models.counting import count_parameters, count_sublayers
from depthmix.models.decoder import Decoder, next_token_losses
from depthmix.models.io import load_model, load_segment, save_model
from depthmix.models.kept_bytes import CacheBytes, cache_bytes
from depthmix.models.kinds import KDAConfig, MLAConfig
from depthmix.models.moe import update_balance
from depthmix.models.presets import PRESETS, preset
from depthmix.models.segment import Segment
from depthmix.models.stack_files import load_stack, save_stack

__all__ = [
    "PRESETS",
    "CacheBytes",
    "Choice",
    "Decoder",
    "DecoderConfig",
    "KDAConfig",
    "LoopConfig",
    "MLAConfig",
    "MoEConfig",
    "Segment",
    "cache_bytes",
    "count_parameters",
    "count_sublayers",
    "load_model",
    "load_segment",
    "load_stack",
    "next_token_losses",
    "preset",
    "save_model",
    "save_stack",
    "segment_bounds",
    "update_balance",
]


def __getattr__(name: str) -> ModuleType:
    """The names of others' weights, imported when they are asked for."""
    if name == "names":
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
