"""A `PipelineStage` that sends what the next rank lacks and takes the rest of its state from the store of its rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input

from depthmix.parallel.stage_module import StageModule
from depthmix.parallel.store import Store
from depthmix.parallel.transport import Ids


class CachedStage(PipelineStage):
    """A stage of a plan.

    To torch, only the wire is there: static metadata sizes its buffers. To autograd, what is taken from the store is an
    input like what arrives, and what is kept is an output like what is sent; so a tensor that only passes through needs
    no special case. Without a cache nothing is taken or kept.
    """

    submod: StageModule

    def __init__(
        self, module: StageModule, store: Store, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        s, plan, transport = module.index, module.plan, module.transport

        def examples(ids: Ids) -> tuple[Tensor, ...]:
            metas = [plan.tensors[n] for n in ids]
            return tuple(torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape, dtype in metas)

        anything = (torch.empty(0, device="meta"),)  # the model's own input and output do not travel
        super().__init__(
            module,
            s,
            plan.count,
            device,
            input_args=anything if module.is_first else examples(transport.wire[s - 1]),
            output_args=anything if module.is_last else examples(transport.wire[s]),
            group=group,
        )
        self.stage_index_to_group_rank = dict(enumerate(plan.rank_of))
        self._runtime_validate = False  # it would compare with the wire's part; every read checks the whole state
        self.plan, self.store = plan, store
        self.takes, self.keeps, self.sends = transport.takes[s], transport.keeps[s], len(transport.wire[s])
        self.backward_of: int | None = None  # the micro-batch whose inputs get their gradients
        self.sent_bytes = {"forward": 0, "backward": 0}

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self.store.clear()  # after a step that failed; otherwise it is empty

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing to clean: metadata are static. With FSDP2 torch would drop the gradients found so far."""

    # Forward.

    def _retrieve_recv_activations(self, batch: int) -> tuple[Tensor, ...]:
        needs_grad = self.has_backward and torch.is_grad_enabled()
        taken = (self.store.take(n, batch).requires_grad_(needs_grad) for n in self.takes)
        return (*super()._retrieve_recv_activations(batch), *taken)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if self.is_last:
            return output
        for n, tensor in zip(self.keeps, output[self.sends :], strict=True):
            self.store.put(n, fwd_chunk_id, tensor)
        return output[: self.sends]  # a neighbour on this rank is handed these

    def get_fwd_send_ops(self, batch: int) -> list[dist.P2POp]:
        outputs, inputs = self.fwd_cache[batch]
        self.fwd_cache[batch] = outputs[: self.sends], inputs
        ops: list[dist.P2POp] = super().get_fwd_send_ops(batch)
        self.fwd_cache[batch] = outputs, inputs
        self.sent_bytes["forward"] += count_bytes(ops)
        return ops

    # Backward.

    def _retrieve_recv_grads(self, batch: int) -> tuple[Tensor | None, ...]:
        kept = []
        for n in self.keeps:
            shape, dtype = self.plan.tensors[n]
            gradient = self.store.collect(n, batch)
            kept.append(torch.zeros(shape, dtype=dtype, device=self.device) if gradient is None else gradient)
        return (*super()._retrieve_recv_grads(batch), *kept)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.backward_of = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.backward_of = None

    def backward_maybe_with_nosync(self, kind: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        if kind != "full":
            self.gather()
        if kind == "input":
            gradients, groups = self.input_gradients(**bwd_kwargs)
        else:
            gradients, groups = super().backward_maybe_with_nosync(kind, bwd_kwargs, last_backward=last_backward)
        if self.backward_of is None or self.is_first:  # the weights' half of a split backward pass; nothing arrived
            return gradients, groups
        gradients = tuple(g.contiguous() if isinstance(g, Tensor) else g for g in gradients)  # gloo needs dense memory
        arrived = len(self._stage_meta.inputs or ())
        for n, gradient in zip(self.takes, gradients[arrived : arrived + len(self.takes)], strict=True):
            self.store.leave(n, self.backward_of, gradient)
        return gradients, groups

    def get_local_bwd_output(self, batch: int) -> Any:
        return super().get_local_bwd_output(batch) if self.has_backward else ()

    def set_local_bwd_input(self, gradients: Any, batch: int) -> None:
        if self.has_backward:  # a V-shaped schedule asks in an evaluation too
            super().set_local_bwd_input(gradients, batch)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def gather(self) -> None:
        """A split backward pass looks for the parameters that the forward pass used, which FSDP2 may have freed."""
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.unshard()

    def input_gradients(self, stage_output: Any, output_grads: Any, input_values: list[Any]) -> tuple[Any, Any]:
        """The first half of a split backward pass (zero-bubble schedules): gradients of inputs and of mixers.

        torch finds a parameter's gradient by walking down from each place where it is used. From the upper of two
        places it walks through all sublayers between, and frees what they saved, which their own weights still need.
        So parameters that are used at several depths count as inputs; only the sublayers' weights wait.
        """
        if isinstance(self.submod, FSDPModule):  # gradients are reduced once, after the last micro-batch
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        early = self.submod.part.used_repeatedly()
        apart = {id(p) for p in early}
        later = (p for p in self.submod.parameters() if id(p) not in apart)
        gradients, groups = stage_backward_input(stage_output, output_grads, [*input_values, *early], later)
        for parameter, gradient in zip(early, gradients[len(input_values) :], strict=True):
            if parameter.grad is gradient and gradient is not None:  # autograd may have given it to another as well
                parameter.grad = gradient.clone()
        return gradients[: len(input_values)], groups

    def get_bwd_send_ops(self, batch: int) -> list[dist.P2POp]:
        ops: list[dist.P2POp] = super().get_bwd_send_ops(batch)
        self.sent_bytes["backward"] += count_bytes(ops)
        return ops


def count_bytes(ops: list[dist.P2POp]) -> int:
    return sum(op.tensor.numel() * op.tensor.element_size() for op in ops)
