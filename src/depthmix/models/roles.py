"""What each parameter of a language model is to an optimiser, said by the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

from torch import nn

from depthmix.mechanisms import DepthStack

# matrix: of a sublayer, which multiplies a token. table: embedding, head and whatever else has rows of their own, such
# as a router or stacked experts. vector: norms, biases, short convolutions and value mixers. Mixers of the stream have
# rules of their own.
Role = Literal["matrix", "table", "vector"]


class HasRoles(Protocol):
    """A model, or a part of one, that says what its parameters are."""

    @property
    def depth(self) -> DepthStack:
        """Its mixers, or those of this part."""

    def parameter_roles(self) -> Iterator[tuple[str, nn.Parameter, Role]]:
        """Name and role of each parameter outside the mixers of the stream."""

    def mixer_names(self) -> dict[nn.Parameter, str]:
        """The mixers' parameters with their names in the model."""
