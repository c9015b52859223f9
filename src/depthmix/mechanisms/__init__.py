"""Mechanisms of depth mixing: one file a paper, behind the protocol of `base`."""

from importlib import import_module
from types import ModuleType

from depthmix.mechanisms.base import DepthMixer, Facts, KVMixer, MixerConfig, Site, State, StateSpec, option
from depthmix.mechanisms.registry import DEPTH, KV, kv_mechanism, list_mechanisms, mechanism
from depthmix.mechanisms.stack import DepthStack, make_config, make_kv_mixers, param_groups

__all__ = [
    "DepthMixer",
    "DepthStack",
    "Facts",
    "KVMixer",
    "MixerConfig",
    "Site",
    "State",
    "StateSpec",
    "kv_mechanism",
    "list_mechanisms",
    "make_config",
    "make_kv_mixers",
    "mechanism",
    "option",
    "param_groups",
]


def __getattr__(name: str) -> ModuleType:
    """The module of a mechanism, imported when it is asked for."""
    if name in DEPTH | KV:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
