"""Mechanisms of depth mixing: one file per paper, behind the protocol of `base`."""

from importlib import import_module
from types import ModuleType

from depthmix.mechanisms.base import (
    DepthMixer,
    Facts,
    KVFacts,
    KVMixer,
    MixerConfig,
    Site,
    SourceWeights,
    State,
    StateSpec,
    option,
)
from depthmix.mechanisms.divided import DividedModel
from depthmix.mechanisms.kv_stack import KVStack
from depthmix.mechanisms.make import make_config
from depthmix.mechanisms.optimiser_groups import param_groups
from depthmix.mechanisms.registry import DEPTH, KV, PluginError, is_kv, kv_mechanism, list_mechanisms, mechanism
from depthmix.mechanisms.retrofit import retrofit_options
from depthmix.mechanisms.stack import BoundStack, DepthStack

__all__ = [
    "BoundStack",
    "DepthMixer",
    "DepthStack",
    "DividedModel",
    "Facts",
    "KVFacts",
    "KVMixer",
    "KVStack",
    "MixerConfig",
    "PluginError",
    "Site",
    "SourceWeights",
    "State",
    "StateSpec",
    "is_kv",
    "kv_mechanism",
    "list_mechanisms",
    "make_config",
    "mechanism",
    "option",
    "param_groups",
    "retrofit_options",
]


def __getattr__(name: str) -> ModuleType:
    """The module of a mechanism, imported when it is asked for."""
    if name in DEPTH | KV:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
