"""The module of a pipeline stage: a part of a network, between what arrives or is taken and what is sent or kept."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from depthmix.mechanisms import State
from depthmix.models.segment import dense
from depthmix.parallel.plan import Plan


class Part(Protocol):
    """What a stage needs of a part of a network, which is also an nn.Module.

    `advance` takes the tensors of the state before the part (the first part: the model's input) and returns those after
    it (the last part: the model's output), in the order of the plan. What only passes through is returned as it is.
    `used_repeatedly` lists the parameters that take part at several depths.
    """

    is_first: bool
    is_last: bool

    def advance(self, *state: Any, **shared: Any) -> State: ...

    def used_repeatedly(self) -> list[nn.Parameter]: ...


class StageModule(nn.Module):
    """Stage `index` of a plan, which is what a `PipelineStage` runs and, with FSDP2, the root that `fully_shard` gets.

    Arguments are the tensors that arrive, then those taken from the rank's store; results are the tensors of the wire,
    then those to keep, all dense and no views. `part` holds all parameters, under the names of the whole network.

    If a mixed-precision policy of FSDP2 computes in another dtype than the plan's, it needs cast_forward_inputs=False
    here: what arrives has the dtype that it must have.
    """

    def __init__(self, part: Part, index: int, plan: Plan, cache: bool = True) -> None:
        super().__init__()
        self.part: Any = part
        self.index, self.plan, self.transport = index, plan, plan.transport(cache)
        self.is_first, self.is_last = index == 0, index == plan.count - 1
        if (part.is_first, part.is_last) != (self.is_first, self.is_last):
            raise ValueError(
                f"stage {index} of {plan.count} with a part of is_first={part.is_first}, is_last={part.is_last}; "
                "expected the part of the network that the plan has for this stage"
            )
        entering, leaving, taken = plan.states[index], plan.states[index + 1], self.transport.takes[index]
        arriving = [*dict.fromkeys(n for n in entering if n not in taken), *taken]
        self.entry = [arriving.index(n) for n in entering]  # where each tensor of the state arrives
        held = (*entering, *leaving)
        self.exit = [held.index(n) for n in (*self.transport.wire[index], *self.transport.keeps[index])]

    def forward(self, *args: Any, **shared: Any) -> Tensor | State:
        """`shared` goes to the part."""
        entering = () if self.is_first else tuple(args[i] for i in self.entry)
        state: State = self.part.advance(*(args if self.is_first else entering), **shared)
        if self.is_last:
            return state[0] if len(state) == 1 else state
        self.check_planned(state)
        held = (*entering, *state)
        return tuple(dense(held[i]) for i in self.exit)

    def advance(self, *state: Any, **shared: Any) -> State:
        """From the whole state before the part to that after it, without a plan."""
        moved: State = self.part.advance(*state, **shared)
        return moved

    def check_planned(self, state: State) -> None:
        wants = [self.plan.tensors[n] for n in self.plan.states[self.index + 1]]
        if len(state) != len(wants):
            raise ValueError(
                f"stage {self.index} ends with a state of {len(state)} tensors; the plan has {len(wants)}. Make the "
                "plan from this network, with the same options"
            )
        for i, (tensor, (shape, dtype)) in enumerate(zip(state, wants, strict=True)):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"tensor {i} of the state after stage {self.index} is {tensor.dtype} of shape "
                    f"{list(tensor.shape)}; the plan was made for {dtype} of shape {list(shape)}. Make it for this "
                    "shape of a micro-batch and this dtype of the stream"
                )
