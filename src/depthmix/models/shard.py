"""Which tokens of a sequence a process holds: all of them, or with tensor parallelism a share.

Axes: B batch, T token, D channel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn


class WholeSequence:
    """All tokens are on this process. `depthmix.parallel` has the other form, for a share of them."""

    rank, ranks = 0, 1

    def own(self, values: Tensor, tokens: int) -> Tensor:
        """Of values [B, T or fewer, …] of a sequence of `tokens` tokens, those of this process; padded with 0."""
        return values

    def whole(self, h: Tensor, tokens: int) -> Tensor:
        """The values [B, T, D] of all tokens, from those of this process."""
        return h

    def last(self, h: Tensor, tokens: int) -> Tensor:
        """The values [B, 1, D] of the last token."""
        return h[:, -1:]

    def agree(self, tokens: Tensor) -> Tensor:
        """Tokens that were drawn on every process, made equal on all."""
        return tokens

    def largest(self, number: int) -> int:
        """The largest of a number over all processes."""
        return number

    def parameters(self, *modules: nn.Module | None) -> AbstractContextManager[None]:
        """While open, the parameters of these modules are plain tensors."""
        return nullcontext()


WHOLE = WholeSequence()
