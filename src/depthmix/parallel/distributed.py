"""A decoder on the ranks of a layout: gradients, losses, norms and whole weights, whatever the layout is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from depthmix import ops
from depthmix.mechanisms.record import is_record, with_records
from depthmix.models import Decoder, DecoderConfig
from depthmix.models.decoder import SublayerLoop, empty_decoder
from depthmix.models.kinds import parameter_dtype
from depthmix.models.moe import MixtureOfExperts
from depthmix.parallel import ranks
from depthmix.parallel.decoder_plan import meta_parts, shared_names
from depthmix.parallel.layout import AXES, Layout
from depthmix.parallel.plan import Plan


class DistributedDecoder:
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
        self.config, self.layout, self.device = config, layout, device
        self.mesh: DeviceMesh | None = None
        self.pipeline: Any = None
        self.autocasts = False
        self.roots: dict[int, Any] = {}  # by stage: what is called, around a part
        self.parts: dict[int, SublayerLoop] = {}
        if layout.size > 1:
            self.mesh = make_mesh(layout, device.type)
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

    # Parameters and state.

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank, each once, under their names in the whole decoder."""
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

    # A step.

    def backward(self, batches: Sequence[Tensor]) -> float:
        """Add the gradient of the mean loss over all batches and all ranks; return that loss.

        Args:
            batches: micro-batches [B, T] of this data-parallel rank, the same on all ranks of its pipeline and
                tensor-parallel group. A pipeline divides them into its own micro-batches.
        """
        total = torch.zeros((), device=self.device, dtype=ops.accumulator(next(self.parameters()).dtype))
        if self.pipeline is not None:
            loss = self.pipeline.step(torch.cat([*batches]))
            total += 0.0 if loss is None else loss
        else:
            for tokens in batches:
                with self.autocast():
                    loss = self.loss_of(tokens) / len(batches)
                loss.backward()
                total += loss.detach()
        if self.layout.tp > 1:
            from depthmix.parallel.tensor import sum_partial_gradients

            sum_partial_gradients(self.parameters())
        if self.pipeline is not None:
            self.shared.sum_gradients(self.named_parameters())
        return float(self.everywhere(total))

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> float:
        """The mean loss of these tokens [B, T], the same on every rank; data-parallel ranks divide the rows if they
        can."""
        parts = self.layout.data
        if self.mesh is not None and len(tokens) % parts == 0:
            tokens = tokens[self.data_rank :: parts]
        if self.layout.plan is None:
            with self.autocast():
                loss: Tensor = self.roots[0].loss(tokens)
        else:
            chunks = tokens.chunk(min(len(tokens), self.layout.pp))
            results = self.relay.run(chunks, loss=True)
            shares = [len(chunk) / len(tokens) for chunk in chunks]
            losses = [] if results is None else [r[0] * share for r, share in zip(results, shares, strict=True)]
            loss = sum(losses, torch.zeros((), device=self.device))
        for root in self.roots.values() if self.mesh is not None else ():
            for module in root.modules():
                if hasattr(module, "reshard"):  # FSDP2 leaves some gathered, which the optimiser's step would not reach
                    module.reshard()
        return float(self.everywhere(loss.double()))

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
        here = [p.grad for name, p in self.named_parameters() if p.grad is not None and self.counts_here(name)]
        norm = ranks.full_tensor(nn.utils.get_total_norm(here))
        if self.pipeline is not None:
            assert self.mesh is not None
            square = norm.double().square()
            dist.all_reduce(square, group=self.mesh.get_group("pp"))
            norm = square.sqrt().to(norm.dtype)
        value = float(norm)
        if limit and value > limit:
            nn.utils.clip_grads_with_norm_(self.parameters(), limit, norm)
        return value

    def counts_here(self, name: str) -> bool:
        return self.pipeline is None or self.shared.counts_here(name)

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

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

    # Ranks.

    @property
    def data_rank(self) -> int:
        """Which part of a batch this rank works on."""
        if self.mesh is None:
            return 0
        return self.mesh.get_local_rank("replicate") * self.layout.fsdp + self.mesh.get_local_rank("fsdp")

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


def make_mesh(layout: Layout, device: str) -> DeviceMesh:
    return init_device_mesh(device, tuple(getattr(layout, name) for name in AXES), mesh_dim_names=AXES)


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
