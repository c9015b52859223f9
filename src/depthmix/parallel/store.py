"""The store of a rank: tensors that several of its stages read, and the gradients that these leave for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor


class Store:
    """Tensors and gradients by number and micro-batch, for all stages of one rank.

    A tensor is put once, taken by each of its `readers` and freed with the last of them: what the backward pass needs
    of it is held by autograd. Each reader's backward pass leaves a gradient; the stage that put the tensor collects
    their sum. Both directions are counted, and a wrong count is an error.
    """

    def __init__(self, readers: Mapping[int, int]) -> None:
        self.readers = readers
        self.tensors: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.taken: Counter[tuple[int, int]] = Counter()
        self.left: Counter[tuple[int, int]] = Counter()
        self.peak = 0  # most bytes of one micro-batch

    def put(self, number: int, batch: int, tensor: Tensor) -> None:
        self.tensors[number, batch] = tensor.detach()
        held = sum(t.numel() * t.element_size() for (_, b), t in self.tensors.items() if b == batch)
        self.peak = max(self.peak, held)

    def take(self, number: int, batch: int) -> Tensor:
        """A tensor without history: the graphs of stages stay apart."""
        key = (number, batch)
        if key not in self.tensors:
            raise RuntimeError(
                f"tensor {number} of micro-batch {batch} is not in the store of this rank; expected an earlier stage "
                "of this rank to have run. Is the plan the same on all ranks, and does it fit the schedule?"
            )
        self.taken[key] += 1
        tensor = self.tensors[key].detach()
        if self.taken[key] == self.readers[number]:
            del self.tensors[key], self.taken[key]
        return tensor

    def leave(self, number: int, batch: int, gradient: Tensor | None) -> None:
        """Add a reader's gradient; None counts as zero."""
        key = (number, batch)
        self.left[key] += 1
        if gradient is not None:
            self.gradients[key] = self.gradients[key] + gradient if key in self.gradients else gradient

    def collect(self, number: int, batch: int) -> Tensor | None:
        """The sum of the readers' gradients; None if none of them depends on the tensor."""
        key = (number, batch)
        if (left := self.left.pop(key, 0)) != self.readers[number]:
            raise RuntimeError(
                f"tensor {number} of micro-batch {batch} has the gradients of {left} stages of this rank; expected "
                f"{self.readers[number]}, one from each that took it. A schedule must run later stages backward first"
            )
        return self.gradients.pop(key, None)

    def __len__(self) -> int:
        """The number of entries: 0 between steps."""
        return len(self.tensors) + len(self.gradients) + len(self.left)

    def clear(self) -> None:
        for entries in (self.tensors, self.gradients, self.taken, self.left):
            entries.clear()
