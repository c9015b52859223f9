"""A model of any origin on data-parallel ranks: whole on one process, its layers sharded by FSDP2 on several."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from depthmix.mechanisms.record import is_record
from depthmix.models.roles import HasRoles
from depthmix.parallel import ranks
from depthmix.parallel.layout import Layout
from depthmix.parallel.model import DistributedModel
from depthmix.parallel.wrap import shard_units


class Shardable(HasRoles, Protocol):
    """What training needs of such a model, which is not the module itself."""

    module: nn.Module  # what is called

    def units(self) -> list[nn.Module]:
        """Its layers: each is gathered on its own; the rest of the model is one more unit."""

    def loss(self, tokens: Tensor) -> Tensor:
        """The mean next-token loss of tokens [B, T]."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once."""

    def state_dict(self) -> dict[str, Tensor]:
        """What is saved, each tensor once."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules."""

    def rebuilt(self, state: Mapping[str, Tensor]) -> nn.Module:
        """A new module with these weights."""


class ShardedModel(DistributedModel):
    """A model that keeps its own code.

    Args:
        part: the model, with the same weights on all ranks.
        layout: ranks without tensor parallelism and pipelines.
        device: device of this rank.
        compile: whether to compile the loss; on one process only.
        bfloat16: whether to compute in bfloat16: by autocast on one process, by FSDP2's mixed precision on several.
    """

    def __init__(
        self,
        part: Shardable,
        layout: Layout,
        device: torch.device,
        *,
        compile: bool = False,
        bfloat16: bool = False,
    ) -> None:
        super().__init__(layout, device)
        self.part = part
        part.module.train()
        if self.mesh is None:
            part.module.to(device)
            self.autocasts = bfloat16
        else:
            # The state over depth passes through layers that do not change it. Nothing writes into it in place.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            mesh = self.mesh["fsdp"] if layout.replicate == 1 else self.mesh["replicate", "fsdp"]
            # FSDP2 moves one unit after the other: the device never holds the whole model.
            shard_units(part.units(), part.module, mesh, bfloat16)
        self.parts: dict[int, Any] = {0: part}
        self.roots: dict[int, Any] = {0: part.module}
        loss: Callable[[Tensor], Tensor] = part.loss
        self.loss_of = torch.compile(loss, dynamic=False) if compile else loss

    def whole(self) -> nn.Module | None:
        if self.mesh is None:
            return self.part.module
        own = {name: tensor for name, tensor in self.state_dict().items() if not is_record(name)}
        state = {}
        for name, tensor in own.items():
            full = ranks.full_tensor(tensor)
            if ranks.rank() == 0:
                state[name] = full.cpu()
        return self.part.rebuilt(state) if ranks.rank() == 0 else None
