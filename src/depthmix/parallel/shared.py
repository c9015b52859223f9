"""Parameters that several ranks of a pipeline hold: looped layers, shared mixers, a tied embedding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from depthmix.models.moe import MixtureOfExperts


class SharedParameters:
    """Sums over the holders of a parameter what each of them has found for it.

    Every process makes this object, with the same arguments: it creates process groups.

    Args:
        names: from `shared_names`: the plan ranks that hold each parameter.
        pipelines: the global ranks of every pipeline of the run, in the order of the plan's ranks.
    """

    def __init__(self, names: Mapping[str, tuple[int, ...]], pipelines: Sequence[Sequence[int]]) -> None:
        self.names = names
        self.rank = -1
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        me = dist.get_rank()
        for ranks in pipelines:
            self.rank = ranks.index(me) if me in ranks else self.rank
            for holders in sorted({*names.values()}):
                members = [ranks[holder] for holder in holders]
                group = dist.new_group(members)
                if me in members:
                    self.groups[holders] = group
        if self.rank < 0:
            raise ValueError(f"rank {me} is in none of the pipelines {[[*p] for p in pipelines]}; expected it in one")

    def counts_here(self, name: str) -> bool:
        """Whether this rank counts the parameter, in a norm over all: its first holder does. If a rank holds several
        copies of it, it counts one."""
        return self.names.get(name, (self.rank,))[0] == self.rank

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Give every copy of a parameter the sum of the gradients of all copies, on this rank and others.

        `parameters` are this rank's, by name; a name may come several times. A missing gradient counts as zero. Of
        DTensors, which must be sharded alike on all holders, the local parts are summed.
        """
        held: dict[str, dict[int, nn.Parameter]] = {}
        for name, parameter in parameters:
            held.setdefault(name, {})[id(parameter)] = parameter
        copies: dict[str, list[Tensor]] = {}
        for name, found in held.items():
            if name in self.names or len(found) > 1:
                copies[name] = [local_gradient(parameter) for parameter in found.values()]
        self.sum_copies(copies, self.names)

    @torch.no_grad()
    def sum_loads(self, parts: Iterable[nn.Module]) -> None:
        """The same for the loads of mixtures of experts, which their balance is computed from."""
        owners = {name.rsplit(".", 2)[0]: ranks for name, ranks in self.names.items() if name.endswith("router.weight")}
        loads: dict[str, dict[int, Tensor]] = {}
        for part in parts:
            for name, module in part.named_modules():
                if isinstance(module, MixtureOfExperts) and module.load is not None:
                    loads.setdefault(name, {})[id(module.load)] = module.load
        self.sum_copies({name: [*found.values()] for name, found in loads.items()}, owners)

    def sum_copies(self, copies: Mapping[str, list[Tensor]], owners: Mapping[str, tuple[int, ...]]) -> None:
        for name in sorted(copies):  # in one order on all ranks
            total, *others = copies[name]
            for other in others:
                total += other
            if name in owners:
                dist.all_reduce(total, group=self.groups[owners[name]])
            for other in others:
                other.copy_(total)


def local_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
