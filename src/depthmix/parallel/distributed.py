"""A decoder on the ranks of a layout: gradients, losses, norms and whole weights, whatever the layout is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from depthmix import ops
from depthmix.mechanisms.record import is_record, with_records
from depthmix.models import Decoder, DecoderConfig
from depthmix.models.decoder import SublayerLoop, empty_decoder
from depthmix.models.kinds import parameter_dtype
from depthmix.models.moe import MixtureOfExperts
from depthmix.parallel import ranks
from depthmix.parallel.decoder_plan import meta_parts, shared_names
from depthmix.parallel.layout import Layout
from depthmix.parallel.model import DistributedModel
from depthmix.parallel.plan import Plan


class DistributedDecoder(DistributedModel):
    """This rank's parts of a decoder: the decoder itself, or some stages of it.

    Args:
        config: the decoder.
        layout: the ranks; `Layout()` is one process.
        device: device of this rank.
        prepare: sets the weights of a part, before it is wrapped: equal ones on all ranks for a parameter of one name.
        dtype: dtype of the parameters; None: as `prepare` leaves them.
        recompute: sublayers per segment of activation checkpointing; None: no checkpointing.
        compile: whether to compile: the whole loss on one process, each sublayer on several.
        bfloat16: whether to compute in bfloat16: by autocast on one process, by FSDP2's mixed precision on several.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layout: Layout,
        device: torch.device,
        *,
        prepare: Callable[[SublayerLoop], object],
        dtype: torch.dtype | None = torch.float32,
        recompute: int | None = None,
        compile: bool = False,
        bfloat16: bool = False,
    ) -> None:
        super().__init__(layout, device)
        self.config = config
        self.pipeline: Any = None
        self.roots: dict[int, Any] = {}
        self.parts: dict[int, SublayerLoop] = {}
        if layout.plan is None:
            self.parts[0] = self.roots[0] = empty_decoder(config)
        else:
            self.build_stages(layout.plan)
        for part in self.parts.values():
            prepare(part)
        for part in self.parts.values():
            part.to(device=device, dtype=dtype).train()
        if self.mesh is not None:
            from depthmix.parallel.wrap import wrap

            for s, part in self.parts.items():
                options: dict[str, Any] = {"recompute": recompute, "compile": compile, "bfloat16": bfloat16}
                wrap(part, self.roots[s], layout, self.mesh, **options)
        else:
            self.autocasts, self.parts[0].checkpoint_every = bfloat16, recompute
        if layout.plan is None:
            decoder: Any = self.parts[0]
            self.loss_of: Callable[[Tensor], Tensor] = decoder.loss
            if compile and self.mesh is None:
                self.loss_of = torch.compile(decoder.loss, dynamic=False)
        else:
            self.connect(layout.plan, torch.bfloat16 if bfloat16 else own_dtype(self.parts))

    # Pipelines.

    def build_stages(self, plan: Plan) -> None:
        from depthmix.parallel.decoder_pipeline import build_stages, tie

        assert self.mesh is not None
        self.roots = dict(build_stages(self.config, plan, self.layout.cache, self.mesh.get_local_rank("pp")))
        self.parts = {s: root.part for s, root in self.roots.items()}
        tie([root.part for root in self.roots.values()])

    def connect(self, plan: Plan, dtype: torch.dtype) -> None:
        """Make what joins the stages: a relay and, if the layout has a schedule, the pipeline."""
        from depthmix.parallel.decoder_pipeline import DecoderPipeline
        from depthmix.parallel.relay import Relay
        from depthmix.parallel.shared import SharedParameters

        assert self.mesh is not None
        group = self.mesh.get_group("pp")
        schedule, microbatches = self.layout.schedule, self.layout.microbatches
        parts: Any = self.parts
        self.relay = Relay(parts, plan.rank_of, group, dtype, self.roots)
        if schedule:
            stages = [*self.roots.items()]
            self.pipeline = DecoderPipeline(
                stages, schedule=schedule, microbatches=microbatches, device=self.device, group=group
            )
            pipelines = self.mesh.mesh.flatten(1).T.tolist()  # the global ranks of each
            self.shared = SharedParameters(shared_names(self.config, plan), pipelines)

    # A step.

    def accumulate(self, batches: Sequence[Tensor]) -> Tensor:
        """The backward passes; returns the loss of this rank."""
        if self.pipeline is None:
            total = super().accumulate(batches)
        else:
            loss = self.pipeline.step(torch.cat([*batches]))
            total = torch.zeros((), device=self.device, dtype=ops.accumulator(own_dtype(self.parts)))
            total += 0.0 if loss is None else loss
        if self.layout.tp > 1:
            from depthmix.parallel.tensor import sum_partial_gradients

            sum_partial_gradients(self.parameters())
        if self.pipeline is not None:
            self.shared.sum_gradients(self.named_parameters())
        return total

    def own_loss(self, tokens: Tensor) -> Tensor:
        if self.layout.plan is None:
            return super().own_loss(tokens)
        chunks = tokens.chunk(min(len(tokens), self.layout.pp))
        results = self.relay.run(chunks, loss=True)
        shares = [len(chunk) / len(tokens) for chunk in chunks]
        losses = [] if results is None else [r[0] * share for r, share in zip(results, shares, strict=True)]
        return sum(losses, torch.zeros((), device=self.device))

    def gradient_norm(self) -> Tensor:
        norm = super().gradient_norm()
        if self.pipeline is not None:
            assert self.mesh is not None
            square = norm.double().square()
            dist.all_reduce(square, group=self.mesh.get_group("pp"))
            norm = square.sqrt().to(norm.dtype)
        return norm

    def counted_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.named_parameters():
            if self.pipeline is None or self.shared.counts_here(name):
                yield name, parameter

    def update_balance(self) -> None:
        """One step of the bias of every mixture of experts, from the tokens of all ranks."""
        layers = [m for m in self.modules() if isinstance(m, MixtureOfExperts) and m.load is not None]
        if self.mesh is not None:
            for name in ("replicate", "fsdp"):
                for layer in layers if getattr(self.layout, name) > 1 else ():
                    dist.all_reduce(layer.load, group=self.mesh.get_group(name))
            if self.pipeline is not None:
                self.shared.sum_loads(self.parts.values())
        for layer in layers:
            layer.update_balance()

    def forget_load(self) -> None:
        """Discard the number of tokens of each expert since the last step."""
        for module in self.modules():
            if isinstance(module, MixtureOfExperts) and module.load is not None:
                module.load.zero_()

    # The whole.

    def whole_state(self) -> dict[str, Tensor] | None:
        """The unsharded state of the whole decoder on global rank 0, None elsewhere; every rank must call this."""
        own = {name: tensor for name, tensor in self.state_dict().items() if not is_record(name)}
        plan = self.layout.plan
        if plan is None:
            whole = {name: ranks.full_tensor(tensor) for name, tensor in own.items()}
            return whole if ranks.rank() == 0 else None
        assert self.mesh is not None
        here, stride = self.mesh.get_local_rank("pp"), self.layout.size // self.layout.pp
        found: dict[str, Tensor] = {}
        for name, (holder, shape, dtype) in holders(self.config, plan, own_dtype(self.parts)).items():
            tensor = ranks.full_tensor(own[name]).contiguous() if holder == here else None
            if ranks.rank() == 0:
                if tensor is None:
                    tensor = torch.empty(shape, dtype=dtype, device=self.device)
                    dist.recv(tensor, holder * stride)
                found[name] = tensor
            elif tensor is not None and ranks.rank() == holder * stride:
                dist.send(tensor, 0)
        return found if ranks.rank() == 0 else None

    def whole(self) -> Decoder | None:
        """A plain decoder with the present weights on global rank 0, None elsewhere; every rank must call this."""
        state = self.whole_state()
        if state is None:
            return None
        with torch.device("meta"):
            model = Decoder(self.config)
        model.load_state_dict(with_records(model, state), assign=True)
        for module in model.modules():
            if isinstance(module, MixtureOfExperts) and module.load is not None and module.load.is_meta:
                module.load = torch.zeros_like(module.load, device=self.device)
        return model


def own_dtype(parts: dict[int, SublayerLoop]) -> torch.dtype:
    return next(parameter.dtype for part in parts.values() for parameter in part.parameters())


def holders(config: DecoderConfig, plan: Plan, dtype: torch.dtype) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
    """The first rank of a pipeline that holds each tensor of the decoder's state, its shape and its dtype."""
    found: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
    for rank, part in meta_parts(config, plan):
        parameters = {name for name, _ in part.named_parameters()}
        for name, tensor in part.state_dict().items():
            if not is_record(name):
                kind = parameter_dtype(name, dtype) if name in parameters else tensor.dtype
                found.setdefault(name, (rank, tensor.shape, kind))
    return found
