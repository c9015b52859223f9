"""A short causal convolution of every channel over tokens, with SiLU; and padding moved behind the valid tokens.

Operations that carry a state from token to token must not see padding. `ValidFirst` moves the valid tokens of every row
to its front, whatever side the padding is on, and puts results back where they belong.

Axes: B batch, T token, P channel, W width of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from depthmix.ops.reference import wide


def causal_conv(
    x: Tensor,
    weight: Tensor,
    history: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """SiLU of Σ_j weight[:, j] x_{t−W+1+j}, and the last W − 1 inputs for the next call.

    Computed in float32 at least, rounded once to the dtype of x.

    Args:
        x: inputs ``[B, T, P]``.
        weight: ``[P, W]``; its last column belongs to the token itself.
        history: the inputs before the first token ``[B, W − 1, P]``; None for zeros.
        documents: ``[B, T]`` indices of packed documents: a token reads inputs of its own document only. The history
            belongs to the document of the first token.
        lengths: ``[B]`` number of tokens of each row, where the others, behind them, are padding (`ValidFirst`). What
            is computed for padding has no meaning; the new history does not contain it.

    Returns:
        ``(y, history)``: ``[B, T, P]`` and ``[B, W − 1, P]``, both in the dtype of x.
    """
    check(x, weight, history, documents, lengths)
    tokens, before = x.shape[1], weight.shape[1] - 1
    if history is None:
        history = x.new_zeros(x.shape[0], before, x.shape[2])
    line = torch.cat([history.to(x.dtype), x], 1)
    runs = None if documents is None else runs_of(documents, before)
    taps, y = wide(weight), None
    for j in range(before + 1):
        part = wide(line[:, j : j + tokens])
        if runs is not None:
            part = part * (runs[:, j : j + tokens] == runs[:, before:]).unsqueeze(-1)
        y = part * taps[:, j] if y is None else torch.addcmul(y, part, taps[:, j])
    assert y is not None  # W is at least 1
    return torch.nn.functional.silu(y).to(x.dtype), last_inputs(line, before, runs, lengths)


def runs_of(documents: Tensor, before: int) -> Tensor:
    """Numbers [B, W − 1 + T] of documents, history included; one that returns after another is a new document."""
    changes = torch.zeros_like(documents, dtype=torch.bool)
    changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.cat([changes.new_zeros(len(changes), before), changes], 1).cumsum(1)


def last_inputs(line: Tensor, before: int, runs: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The last W − 1 inputs of each row, without those of a document that has ended."""
    if not before:
        return line[:, :0]
    if lengths is None:
        at = line.shape[1] - before + torch.arange(before, device=line.device).expand(len(line), -1)
    else:
        at = lengths.unsqueeze(1) + torch.arange(before, device=line.device)
    last = line.gather(1, at.unsqueeze(-1).expand(-1, -1, line.shape[-1]))
    if runs is None:
        return last
    end = runs[:, -1:] if lengths is None else runs.gather(1, lengths.unsqueeze(1) + before - 1)
    return last * (runs.gather(1, at) == end).unsqueeze(-1)


@dataclass(frozen=True)
class ValidFirst:
    """The order in which the valid tokens of each row come first, and back."""

    order: Tensor  # [B, T], the token that comes to each place
    places: Tensor  # [B, T], the place to which each token comes
    lengths: Tensor  # [B], the number of valid tokens
    valid: Tensor  # [B, T], whether a place holds a valid token

    @staticmethod
    def of(valid: Tensor) -> ValidFirst:
        """From a mask [B, T]."""
        valid = valid.bool()
        lengths = valid.sum(1)
        padding = (~valid).cumsum(1) - 1 + lengths.unsqueeze(1)
        places = torch.where(valid, valid.cumsum(1) - 1, padding)
        numbers = torch.arange(valid.shape[1], device=valid.device).expand_as(places)
        order = torch.empty_like(places).scatter_(1, places, numbers)
        return ValidFirst(order, places, lengths, numbers < lengths.unsqueeze(1))

    def sort(self, x: Tensor) -> Tensor:
        """x [B, T, …] with the valid tokens of each row first, in their order."""
        return take(x, self.order)

    def sort_documents(self, documents: Tensor) -> Tensor:
        """Documents [B, T] in that order; padding behind the valid tokens belongs to the last document."""
        documents = self.sort(documents)
        last = documents.gather(1, (self.lengths - 1).clamp(min=0).unsqueeze(1))
        return torch.where(self.valid, documents, last)

    def restore(self, x: Tensor) -> Tensor:
        """x [B, T, …] of sorted tokens in the original order."""
        return take(x, self.places)


def take(x: Tensor, at: Tensor) -> Tensor:
    return x.gather(1, at.reshape(*at.shape, *[1] * (x.dim() - 2)).expand_as(x))


def check(x: Tensor, weight: Tensor, history: Tensor | None, documents: Tensor | None, lengths: Tensor | None) -> None:
    if x.dim() != 3 or weight.dim() != 2 or x.shape[2] != weight.shape[0] or not weight.shape[1]:
        raise ValueError(
            f"x has shape {list(x.shape)}, weight {list(weight.shape)}; expected x [B, T, P] and weight [P, W], W > 0"
        )
    want = [x.shape[0], weight.shape[1] - 1, x.shape[2]]
    if history is not None and list(history.shape) != want:
        raise ValueError(f"history has shape {list(history.shape)}; expected [B, W - 1, P], here {want}")
    for name, numbers, shape in (("documents", documents, x.shape[:2]), ("lengths", lengths, x.shape[:1])):
        if numbers is not None and (numbers.shape != shape or numbers.is_floating_point()):
            raise ValueError(
                f"{name} is {numbers.dtype} of shape {list(numbers.shape)}; expected integers {list(shape)}"
            )
