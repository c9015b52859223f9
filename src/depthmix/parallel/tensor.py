"""Tensor and sequence parallelism of a decoder: the state over depth is sharded along the sequence.

Each rank holds T / ranks tokens of the state and mixes over depth without communication. A sublayer gathers the
sequence behind its norm, works on this rank's heads or hidden channels, and hands out its partial sums along the
sequence: an all-gather and a reduce-scatter, together as much as the all-reduce that they replace.

Parameters are DTensors, so that optimisers, clipping, FSDP2 and checkpoints see whole parameters. While a module runs
they are replaced by the plain tensors of this rank, and the arithmetic is local.

Axes: B batch, T token, D channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from depthmix.models.decoder import SublayerLoop
from depthmix.models.shard import WholeSequence
from depthmix.parallel import ranks

# The axis along which a matrix of a sublayer is cut; all other parameters are replicated.
CUTS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
Replaced: TypeAlias = tuple[dict[str, Any], str, Any]  # the parameters of a module, a name, and its DTensor

# Their names before torch 2.13.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def cut_of(name: str, parameter: Tensor) -> int | None:
    """The axis along which a parameter is cut; None: it is replicated."""
    word = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if not name.startswith("sublayers.") or word not in CUTS:
        return None
    return CUTS[word] + (parameter.dim() == 3)  # experts have a leading axis


class SequenceShard(WholeSequence):
    """The share of a sequence that a rank of a tensor-parallel group holds: T / ranks tokens, rounded up.

    Where T is not divisible, the last tokens of the last ranks are padding. Sublayers never see it: a gathered sequence
    has T tokens, and gradients of padding are 0.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.tokens = 0  # of the sublayer that runs

    def own(self, values: Tensor, tokens: int) -> Tensor:
        share = -(-tokens // self.ranks)
        first = self.rank * share
        mine = values[:, first : first + share]
        return padded(mine, share)

    def whole(self, h: Tensor, tokens: int) -> Tensor:
        gathered: Tensor = Gather.apply(h, tokens, self.group)
        return gathered

    def last(self, h: Tensor, tokens: int) -> Tensor:
        rank, place = divmod(tokens - 1, h.shape[1])
        return self.whole(h[:, place : place + 1], self.ranks)[:, rank : rank + 1]

    def agree(self, tokens: Tensor) -> Tensor:
        return ranks.agree(tokens, self.group)

    def largest(self, number: int) -> int:
        return ranks.largest(number, self.group)

    @contextmanager
    def parameters(self, *modules: nn.Module | None) -> Iterator[None]:
        held = make_local(*modules)
        try:
            yield
        finally:
            restore(held)


class Gather(torch.autograd.Function):
    """[B, share, D] of each rank to [B, T, D] on all of them. Each uses the whole, so gradients are summed."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, tokens: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.share = group, h.shape[1]
        return gather(h, tokens, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return scatter(gradient, ctx.share, ctx.group), None, None


class Scatter(torch.autograd.Function):
    """Partial sums [B, T, D] of each rank to this rank's tokens [B, share, D] of their sum."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, share: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.tokens = group, y.shape[1]
        return scatter(y, share, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather(gradient, ctx.tokens, ctx.group), None, None


def gather(h: Tensor, tokens: int, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    parts = h.new_empty(ranks, *h.shape)
    all_gather(parts.flatten(0, 1), h.contiguous(), group=group)
    return parts.movedim(0, 1).flatten(1, 2)[:, :tokens]


def scatter(y: Tensor, share: int, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    parts = padded(y, share * ranks).unflatten(1, (ranks, share)).movedim(1, 0).contiguous()
    mine = y.new_empty(y.shape[0], share, *y.shape[2:])
    reduce_scatter(mine, parts.flatten(0, 1), group=group)
    return mine


def padded(values: Tensor, tokens: int) -> Tensor:
    """With zeros up to `tokens` tokens."""
    missing = tokens - values.shape[1]
    if not missing:
        return values
    return torch.cat([values, values.new_zeros(values.shape[0], missing, *values.shape[2:])], 1)


def tensor_parallel(part: SublayerLoop, mesh: DeviceMesh) -> None:
    """Shard the parameters of a decoder, or of a segment of it, over a mesh of one axis, in place.

    Every rank passes the same whole parameters. What two names share stays shared, and so does a sublayer that an
    earlier part of this rank has too: it communicates once.
    """
    shard = SequenceShard(mesh)
    whole = [layer for layer in part.all_sublayers() if not any(isinstance(p, DTensor) for p in layer.parameters())]
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in [*part.named_parameters(remove_duplicate=False)]:
        if parameter not in sharded:
            sharded[parameter] = shard_parameter(parameter, cut_of(name, parameter), mesh)
        module, _, leaf = name.rpartition(".")
        part.get_submodule(module)._parameters[leaf] = sharded[parameter]
    for sublayer in whole:
        run_sharded(sublayer, shard)
    part.shard = shard


def shard_parameter(parameter: nn.Parameter, cut: int | None, mesh: DeviceMesh) -> nn.Parameter:
    if isinstance(parameter, DTensor):  # another part of this rank has the same
        return parameter
    local = parameter.detach()
    if cut is not None:
        local = local.chunk(mesh.size(), cut)[mesh.get_local_rank()].clone()
    whole = DTensor.from_local(local, mesh, [Replicate() if cut is None else Shard(cut)], run_check=False)
    return nn.Parameter(whole, parameter.requires_grad)


def run_sharded(sublayer: nn.Module, shard: SequenceShard) -> None:
    """Gather the sequence behind the norm of a sublayer, and scatter its output.

    FSDP2's own hooks run outside of these: before them the parameters are gathered, after them they are freed.
    """
    held: list[Any] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        held.extend(make_local(module))
        shard.tokens = args[2].rotation[0].shape[2]  # of the context, which has all tokens

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        restore(held)
        held.clear()
        if output is None:  # the sublayer has raised an error
            return None
        y, *rest = output
        return (Scatter.apply(y, args[0].shape[1], shard.group), *rest)

    sublayer.register_forward_pre_hook(before)
    sublayer.norm.register_forward_hook(lambda module, args, x: shard.whole(x, shard.tokens))  # type: ignore[union-attr]
    sublayer.register_forward_hook(after, always_call=True)


def make_local(*modules: nn.Module | None) -> list[Replaced]:
    """Replace the DTensors among the parameters by their local parts; return what `restore` needs.

    A cut parameter's gradient is cut likewise. A replicated one sees some of the tokens or heads, so its gradient is a
    part of a sum over the ranks.
    """
    held: list[Replaced] = [
        (inner._parameters, key, parameter)
        for module in modules
        if module is not None
        for inner in module.modules()
        for key, parameter in inner._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    for parameters, key, parameter in held:
        placements = [Partial() if isinstance(p, Replicate) else p for p in parameter.placements]
        parameters[key] = parameter.to_local(grad_placements=placements)
    return held


def restore(held: Iterable[Replaced]) -> None:
    for parameters, key, parameter in held:
        parameters[key] = parameter


def sum_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of replicated parameters over the ranks, in one message per dtype; FSDP2 does it by itself."""
    partial: list[Any] = [p for p in parameters if isinstance(p.grad, DTensor) and p.grad.placements != p.placements]  # type: ignore[attr-defined]
    for dtype in {p.dtype for p in partial}:
        same = [p for p in partial if p.dtype == dtype]
        gradients = [p.grad.to_local() for p in same]
        joined = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(joined, group=same[0].device_mesh.get_group())
        for p, total in zip(same, joined.split([g.numel() for g in gradients]), strict=True):
            p.grad = DTensor.from_local(total.view_as(p.to_local()), p.device_mesh, p.placements, run_check=False)
