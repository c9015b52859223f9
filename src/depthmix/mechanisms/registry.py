"""Names of mechanisms and where they live. Nothing is imported before it is asked for."""

from __future__ import annotations

import difflib
import importlib
import warnings
from importlib.metadata import EntryPoint, entry_points
from typing import Literal

from depthmix.mechanisms.base import DepthMixer, KVMixer

ENTRY_POINTS = "depthmix.mechanisms"

DEPTH: dict[str, str] = {
    "attnres": "depthmix.mechanisms.attnres:AttnRes",
    "block_attnres": "depthmix.mechanisms.block_attnres:BlockAttnRes",
    "ddl": "depthmix.mechanisms.ddl:DeepDelta",
    "delta_attnres": "depthmix.mechanisms.delta_attnres:DeltaAttnRes",
    "denseformer": "depthmix.mechanisms.denseformer:DenseFormer",
    "highway": "depthmix.mechanisms.highway:Highway",
    "hyper_connections": "depthmix.mechanisms.hyper_connections:HyperConnections",
    "linear_attention": "depthmix.mechanisms.linear_attention:LinearAttention",
    "mhc": "depthmix.mechanisms.mhc:ManifoldHyperConnections",
    "mhc_lite": "depthmix.mechanisms.mhc_lite:LiteHyperConnections",
    "mrla": "depthmix.mechanisms.mrla:LayerAttention",
    "residual": "depthmix.mechanisms.residual:Residual",
    "scaled_residual": "depthmix.mechanisms.scaled_residual:ScaledResidual",
}
KV: dict[str, str] = {
    "depth_attention": "depthmix.mechanisms.depth_attention:DepthAttention",
    "value_residual": "depthmix.mechanisms.value_residual:ValueResidual",
}


def installed() -> dict[str, EntryPoint]:
    """Mechanisms that other packages offer through the entry-point group `depthmix.mechanisms`."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def list_mechanisms(kind: Literal["depth", "kv"] = "depth") -> list[str]:
    """Names that `DepthStack` (kind "depth") or attention (kind "kv") takes, sorted."""
    if kind not in ("depth", "kv"):
        raise ValueError(f"kind={kind!r}; expected 'depth' or 'kv'")
    own, base = (DEPTH, DepthMixer) if kind == "depth" else (KV, KVMixer)
    outside = []
    for name, point in installed().items():
        if name in DEPTH | KV:
            continue
        try:
            if issubclass(point.load(), base):
                outside.append(name)
        except Exception as error:  # somebody else's package: name it, and go on without it
            warnings.warn(f"mechanism {name!r} of {point.value} cannot be loaded: {error!r}", stacklevel=2)
    return sorted([*own, *outside])


def mechanism(name: str) -> type[DepthMixer]:
    """The class behind a name of kind "depth"."""
    found = find(name, DEPTH, "depth")
    if not issubclass(found, DepthMixer):
        raise ValueError(
            f"{name!r} is no depth mechanism (it derives from {found.__mro__[1].__name__}); expected a "
            "subclass of DepthMixer. Mechanisms of kind 'kv' go into attention"
        )
    return found


def kv_mechanism(name: str) -> type[KVMixer]:
    """The class behind a name of kind "kv"."""
    found = find(name, KV, "kv")
    if not issubclass(found, KVMixer):
        raise ValueError(f"{name!r} is no mechanism of kind 'kv'; expected a subclass of KVMixer")
    return found


def find(name: str, own: dict[str, str], kind: Literal["depth", "kv"]) -> type:
    found: type
    if name in own:
        module, _, attribute = own[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        return found
    if name in (others := installed()):
        found = others[name].load()
        return found
    names = list_mechanisms(kind)
    close = difflib.get_close_matches(str(name), names, 1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"unknown mechanism {name!r}. {hint}Known: {', '.join(names) or 'none'}")
