"""Names of mechanisms and the modules that define them, each imported only when it is used."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, TypeAlias

import torch

from depthmix.mechanisms.base import DepthMixer, KVMixer
from depthmix.support.checks import closest, did_you_mean

MechanismKind: TypeAlias = Literal["depth", "kv"]
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


HOME = {  # what a kind is, and where to use a mechanism of this kind
    "depth": (
        "a depth mechanism: it decides what each sublayer reads",
        "Use DecoderConfig(mixer={0!r}), or DepthStack({0!r}, dim=…, depth=…) in your own model",
    ),
    "kv": (
        "a KV mechanism: it mixes values inside attention",
        "Use DecoderConfig(kv_mixer={0!r}), `depthmix train --mixer {0}`, or "
        "KVStack({0!r}, head_dim=…, depth=…) in your own attention",
    ),
}


class PluginError(ValueError):
    """A mechanism of another package cannot be used; the message names the mechanism, the package and the reason."""


def installed() -> dict[str, EntryPoint]:
    """Mechanisms that other packages provide through the entry-point group `depthmix.mechanisms`."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in DEPTH | KV}


def list_mechanisms(kind: MechanismKind = "depth") -> list[str]:
    """The names that `DepthStack` (kind "depth") or `KVStack` (kind "kv") accepts, sorted."""
    names, broken = survey(kind)
    for error in broken.values():
        warnings.warn(str(error), stacklevel=2)
    return names


def survey(kind: MechanismKind) -> tuple[list[str], dict[str, PluginError]]:
    """The names of one kind, sorted, and the plug-ins of either kind that cannot be loaded."""
    if kind not in HOME:
        raise ValueError(f"kind={kind!r}; expected 'depth' or 'kv'")
    names, broken = [*(DEPTH if kind == "depth" else KV)], {}
    for name, point in installed().items():
        try:
            if kind_of(load(point)) == kind:
                names.append(name)
        except PluginError as error:
            broken[name] = error
    return sorted(names), broken


def mechanism(name: str) -> type[DepthMixer]:
    """The class of a mechanism of kind "depth", by name."""
    return find(name, "depth")


def kv_mechanism(name: str) -> type[KVMixer]:
    """The class of a mechanism of kind "kv", by name."""
    return find(name, "kv")


def name_of(cls: type) -> str:
    """The registered name of a class or of the nearest one that it extends, or its own name if there is none."""
    names = {target: name for name, target in (DEPTH | KV).items()}
    known = (names.get(f"{base.__module__}:{base.__qualname__}") for base in cls.__mro__)
    return next(filter(None, known), cls.__name__)


def is_kv(name: str) -> bool:
    """Whether a name is that of a KV mechanism; False for an unknown name."""
    cls = lookup(name)
    return cls is not None and kind_of(cls) == "kv"


def find(name: str, kind: MechanismKind) -> type:
    cls = lookup(name)
    if cls is None:
        known, _ = survey(kind)
        others, _ = survey("kv" if kind == "depth" else "depth")
        hint, meant = did_you_mean(name, [*known, *others]), closest(name, [*known, *others])
        if meant in others:
            what, where = HOME["kv" if kind == "depth" else "depth"]
            hint = f"Did you mean {meant!r}, {what}? {where.format(meant)}. "
        raise ValueError(f"unknown mechanism {name!r}. {hint}Known: {', '.join(known) or 'none'}")
    if kind_of(cls) != kind:
        what, where = HOME[kind_of(cls)]
        raise ValueError(f"{name!r} is {what}; expected {HOME[kind][0].partition(':')[0]}. {where.format(name)}")
    return cls


def lookup(name: str) -> type | None:
    """The class of a mechanism of either kind, by name; None for an unknown name."""
    if target := DEPTH.get(name) or KV.get(name):
        module, _, attribute = target.partition(":")
        cls: type = getattr(importlib.import_module(module), attribute)
        return cls
    point = installed().get(name)
    return None if point is None else load(point)


def kind_of(cls: type) -> MechanismKind:
    return "kv" if issubclass(cls, KVMixer) else "depth"


def load(point: EntryPoint) -> type:
    """The class that another package provides."""
    try:
        cls = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(f"{describe(point)} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(cls, type) or not issubclass(cls, (DepthMixer, KVMixer)):
        got = f"the class {cls.__name__}" if isinstance(cls, type) else f"a {type(cls).__name__}"
        raise PluginError(f"{describe(point)} is {got}; expected a subclass of depthmix.DepthMixer or depthmix.KVMixer")
    return cls


def describe(point: EntryPoint) -> str:
    package = f" (package {point.dist.name})" if point.dist is not None else ""
    return f"mechanism {point.name!r} of {point.value}{package}"


@contextmanager
def naming_plugin(name: str, passing: type[Exception] = PluginError) -> Iterator[None]:
    """Turn errors raised inside by another package's mechanism into a `PluginError` that names it.

    Errors of depthmix's own mechanisms, and those of the type `passing`, are raised unchanged.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        point = installed().get(name)
        if point is None:
            raise
        where = " on the meta device" if torch.get_default_device().type == "meta" else ""
        raise PluginError(f"{describe(point)} fails{where}: {type(error).__name__}: {error}") from error
