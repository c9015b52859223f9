"""Mechanisms of depth mixing: one file a paper, behind the protocol of `base`."""

from depthmix.mechanisms.base import DepthMixer, Facts, KVMixer, MixerConfig, Site, State, StateSpec, option
from depthmix.mechanisms.registry import kv_mechanism, list_mechanisms, mechanism
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
