"""Models whose mixers are divided among their layers."""

from __future__ import annotations

from depthmix.mechanisms.base import KVMixer
from depthmix.mechanisms.stack import DepthStack


class DividedModel:
    """Mixin of a model that keeps a slice of its stack in each layer: traces and cuts ask it for the whole."""

    def depth_stack(self) -> DepthStack:
        """The slices that run, joined."""
        raise NotImplementedError(f"{type(self).__name__} must implement `depth_stack`")

    def value_mixers(self) -> list[KVMixer]:
        """The value mixers that run, in order of the layers; empty if there are none."""
        raise NotImplementedError(f"{type(self).__name__} must implement `value_mixers`")
