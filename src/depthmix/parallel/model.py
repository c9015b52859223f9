"""A model on the ranks of a layout, as training sees it: gradients, losses, norms and state, whatever the model is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from depthmix import ops
from depthmix.parallel import ranks
from depthmix.parallel.layout import AXES, Layout


class DistributedModel:
    """This rank's parts of a model, whole on each data-parallel rank; parameters may be sharded by FSDP2.

    Attributes:
        parts: by stage (0 where there is no pipeline): what has parameters, `depth` and roles.
        roots: by stage: the module that is called, around a part.
        loss_of: the mean loss of tokens [B, T].
    """

    mesh: DeviceMesh | None = None
    autocasts = False
    loss_of: Callable[[Tensor], Tensor]
    parts: Mapping[int, Any]
    roots: Mapping[int, Any]

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        if layout.size > 1:
            self.mesh = make_mesh(layout, device.type)

    # Parameters and state.

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank, each once, under their names in the whole model."""
        seen: set[nn.Parameter] = set()
        for part in self.parts.values():
            for name, parameter in part.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Of all parts of this rank; tensors may be sharded."""
        return {name: tensor for part in self.parts.values() for name, tensor in part.state_dict().items()}

    def modules(self) -> Iterator[nn.Module]:
        """The modules of all parts; a sublayer that several of them share comes once."""
        return iter(dict.fromkeys(module for part in self.parts.values() for module in part.modules()))

    def train(self, mode: bool = True) -> None:
        for root in self.roots.values():
            root.train(mode)

    def whole(self) -> Any:
        """A plain model with the present weights on global rank 0, None elsewhere; every rank must call this."""
        raise NotImplementedError(f"{type(self).__name__} must implement `whole`")

    def probe(self) -> Any:
        """The model for diagnostics; every rank must call this.

        Sharded by FSDP2 at most, all ranks run it. Otherwise it is put together on rank 0, and None elsewhere.
        """
        return self.roots[0] if self.layout.is_whole else self.whole()

    # A step.

    def backward(self, batches: Sequence[Tensor]) -> float:
        """Add the gradient of the mean loss over all batches and all ranks; return that loss.

        Args:
            batches: micro-batches [B, T] of this data-parallel rank, the same on all ranks of its pipeline and
                tensor-parallel group. A pipeline divides them into its own micro-batches.
        """
        return float(self.everywhere(self.accumulate(batches)))

    def accumulate(self, batches: Sequence[Tensor]) -> Tensor:
        """The backward passes; returns the loss of this rank."""
        dtype = ops.accumulator(next(self.parameters()).dtype)
        total = torch.zeros((), device=self.device, dtype=dtype)
        for tokens in batches:
            with self.autocast():
                loss = self.loss_of(tokens) / len(batches)
            loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> float:
        """The mean loss of these tokens [B, T], the same on every rank; data-parallel ranks divide the rows if they
        can."""
        parts = self.layout.data
        if self.mesh is not None and len(tokens) % parts == 0:
            tokens = tokens[self.data_rank :: parts]
        loss = self.own_loss(tokens)
        for root in self.roots.values() if self.mesh is not None else ():
            for module in root.modules():
                if hasattr(module, "reshard"):  # FSDP2 leaves some gathered, which the optimiser's step would not reach
                    module.reshard()
        return float(self.everywhere(loss.double()))

    def own_loss(self, tokens: Tensor) -> Tensor:
        """The loss of this rank's rows, not compiled."""
        with self.autocast():
            loss: Tensor = self.parts[0].loss(tokens)
        return loss

    def autocast(self) -> AbstractContextManager[object]:
        """Parameters and the optimiser stay in float32; matrix products are computed in bfloat16."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocasts else nullcontext()

    def everywhere(self, loss: Tensor) -> Tensor:
        """The mean over data-parallel ranks of a loss that is 0 but on the last stage, and which tensor-parallel ranks
        have parts of."""
        if self.mesh is not None:
            dist.all_reduce(loss)
            loss = loss / self.layout.data
        return loss

    def clip(self, limit: float) -> float:
        """Return the norm of the whole gradient; if it is above `limit` (0: none), scale the gradient down to that."""
        norm = self.gradient_norm()
        value = float(norm)
        if limit and value > limit:
            nn.utils.clip_grads_with_norm_(self.parameters(), limit, norm)
        return value

    def gradient_norm(self) -> Tensor:
        gradients = [p.grad for _, p in self.counted_parameters() if p.grad is not None]
        return ranks.full_tensor(nn.utils.get_total_norm(gradients))

    def counted_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters whose gradients this rank adds to the norm."""
        return self.named_parameters()

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def update_balance(self) -> None:
        """One step of the bias of every mixture of experts of ours."""

    def forget_load(self) -> None:
        """Discard the number of tokens of each expert since the last step."""

    # Ranks.

    @property
    def data_rank(self) -> int:
        """Which part of a batch this rank works on."""
        if self.mesh is None:
            return 0
        return self.mesh.get_local_rank("replicate") * self.layout.fsdp + self.mesh.get_local_rank("fsdp")


def make_mesh(layout: Layout, device: str) -> DeviceMesh:
    return init_device_mesh(device, tuple(getattr(layout, name) for name in AXES), mesh_dim_names=AXES)
