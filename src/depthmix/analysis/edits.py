"""Change what layers read while a model runs: scale or cut what a source contributes to a read, or replace weights.

An edit changes the read of a sublayer and, through the sublayer's output, everything above. The mechanism's state
stays as it is: what other rows read of the same source is not affected.

Axes: ... token, D channel, G group of channels, H head, L sublayers, n = L + 1 rows and sources, k edited source,
N attention layers, K key-value head, d channel of a head, C source that a mechanism names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.analysis.passes import without_recomputation
from depthmix.analysis.recording import find_stack, replaced, value_mixers
from depthmix.analysis.routes import Columns, Routes
from depthmix.mechanisms import DepthMixer, DepthStack, KVMixer, SourceWeights, State

WeightEdit = Callable[[int, SourceWeights], "Tensor | None"]
PLAIN = "Nothing was edited: the model's own path ran"
CUT = "The contributions of the edited sources were scaled in the reads; nothing was renormalised"
MASKED = "The weights of the edited sources were scaled before the softmax, so that the weights of a row still sum to 1"
RESCALED = "The contributions of the edited sources were scaled, and each row was divided by what was left of its sum"
SMALL = 1e-6  # share of a row below which it is not divided by it: nothing of the row is left
NO_SUM = "The contributions of the edited sources were scaled; rows of {name} do not sum to 1, so none was renormalised"


@dataclass
class Editing:
    """What an open `editing` does.

    how: one sentence that says what runs.
    reads: the number of reads that were edited so far.
    """

    how: str
    reads: int = field(default=0)


@contextmanager
def editing(
    model: nn.Module,
    scale: Tensor | None = None,
    *,
    values: Tensor | None = None,
    weights: WeightEdit | None = None,
    renormalise: bool = False,
) -> Iterator[Editing]:
    """While open, passes of `model` run with edited reads. Without any edit, the model's own path runs.

    Args:
        model: any module that runs the protocol through one `DepthStack`, or a `DepthStack` itself.
        scale: [n, n], or [B, n, n] for edits of their own for each row of the batch. Entry (r, i) multiplies what
            source i contributes to row r: 1 leaves it, 0 cuts the route. Row r belongs to sublayer r + 1, the last one
            to the head; source 0 is the embedding, source i the output of sublayer i.
        values: [N, N] or [B, N, N], the same for values mixed over depth: entry (a, b) multiplies what the raw value of
            attention layer b contributes to the value that layer a caches.
        weights: a function of the row and its `SourceWeights`, for mechanisms that weight a list of sources; it returns
            other weights of the same shape, or None to keep them.
        renormalise: scale the weights of sources before a softmax, or divide a row that sums to 1 by its new sum.
    """
    stack = model if isinstance(model, DepthStack) else find_stack(model)
    edited = Editing(PLAIN)
    with ExitStack() as patches:
        patches.enter_context(without_recomputation(model))  # an edit follows a pass, and cannot follow it twice
        if scale is not None or weights is not None:
            reads = EditedReads(stack, scale, weights, renormalise, edited)
            edited.how = reads.how
            patches.enter_context(replaced(stack, reads.begin, reads.read, reads.write))
        if values is not None:
            patches.enter_context(editing_values(model, values))
            edited.how = CUT if scale is None and weights is None else edited.how
        yield edited


class EditedReads:
    """The methods that a stack and its mixers run while their reads are edited."""

    def __init__(
        self,
        stack: DepthStack,
        scale: Tensor | None,
        edit_weights: WeightEdit | None,
        renormalise: bool,
        edited: Editing,
    ) -> None:
        n = stack.depth + 1
        self.tokens: tuple[int, ...] = ()  # leading shape of the pass
        self.stack, self.edit_weights, self.edited = stack, edit_weights, edited
        self.scale = checked_scale("scale", torch.ones(n, n) if scale is None else scale, n)
        changed = (self.scale != 1).flatten(0, -2).any(0)
        self.routes = Routes(stack, changed.nonzero().flatten().tolist())
        columns = Columns(stack) if renormalise or edit_weights is not None else None
        self.columns: list[Any] = [] if columns is None else columns.members
        if edit_weights is not None and not any(self.columns):
            raise ValueError(
                f"weights were to be edited, but {stack.name} does not weight a list of sources, or has no "
                "`with_weights`; expected a mechanism such as attnres. Use `scale` to edit what each source contributes"
            )
        sums = stack.facts.row_sums
        rescales = sums is not None and set(sums) == {1.0} and not self.routes.operator_valued
        self.masks = renormalise and any(self.columns) and columns is not None and columns.normalised
        if self.masks and (self.scale < 0).any():
            raise ValueError(
                "scale has entries below 0 with renormalise=True; expected factors from 0: weights of a softmax cannot "
                "be negative. Use renormalise=False"
            )
        self.rescales = renormalise and not self.masks and rescales
        words = MASKED if self.masks else RESCALED if self.rescales else NO_SUM if renormalise else CUT
        self.how = words.format(name=stack.name)

    def begin(self, x: Tensor) -> State:
        if self.scale.dim() == 3 and (x.dim() < 2 or x.shape[0] != len(self.scale)):
            raise ValueError(
                f"scale has shape {list(self.scale.shape)} for an embedding of shape {list(x.shape)}; expected one "
                "matrix for each row of the batch, or one for all"
            )
        self.scale, self.tokens = self.scale.to(x.device, ops.accumulator(x.dtype)), x.shape[:-1]
        self.routes.begin(self.stack.all_mixers()[0], x)
        return type(self.stack).begin(self.stack, x)

    def read(self, mixer: DepthMixer, state: State) -> tuple[Tensor, Any]:
        mixer.check_state(state)
        essential = state[: mixer.expects.essential]
        c = self.with_edited_weights(mixer, mixer.coeff(essential))
        factors = self.factors(mixer.site.index)
        if not self.routes.sources or bool((factors == 1).all()):
            return mixer.combine(essential, c), c
        self.edited.reads += 1
        members = self.columns[mixer.site.index] if self.masks else None
        if members is not None and len(members) > 1:
            return self.masked_read(mixer, essential, c, factors), c
        h, weights = mixer.combine(essential, c), self.routes.weights(mixer, c)
        left = ops.wide(h) + self.routes.total(weights, factors - 1)
        if self.rescales:
            share = 1 + ((factors - 1) * weights).sum(0)  # of the row, whose weights sum to 1
            left = left / self.routes.spread(torch.where(share.abs() < SMALL, 1, share))
        return left.to(h.dtype), c

    def write(self, mixer: DepthMixer, state: State, c: Any, y: Tensor) -> State:
        essential = state[: mixer.expects.essential]
        y = mixer.checked_output(essential, y)
        c, v = mixer.value(essential, c, y)
        if self.routes.sources:
            self.routes.write(mixer, c, y, v)
        return mixer.update(essential, c, v)

    def with_edited_weights(self, mixer: DepthMixer, c: Any) -> Any:
        given = None if self.edit_weights is None else mixer.source_weights(c)
        if self.edit_weights is None or given is None or len(given.names) < 2:
            return c
        new = self.edit_weights(mixer.site.index, given)
        if new is None:
            return c
        if not isinstance(new, Tensor) or new.shape != given.weights.shape or not new.is_floating_point():
            got = list(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise ValueError(
                f"the edit of row {mixer.site.index} returned {got}; expected floating-point weights of shape "
                f"{list(given.weights.shape)}, or None to keep them"
            )
        self.edited.reads += 1
        return mixer.with_weights(c, new.to(given.weights.dtype))

    def factors(self, row: int) -> Tensor:
        """[k, (B,) 1 …, 1]: the factors of the edited sources in this row, to be multiplied with [k, ..., D]."""
        factors = self.scale[..., row, self.routes.sources].movedim(-1, 0)
        return factors.reshape(*factors.shape, *[1] * (1 + len(self.tokens) - factors.dim()), 1)

    def masked_read(self, mixer: DepthMixer, state: State, c: Any, factors: Tensor) -> Tensor:
        """The read with scaled and renormalised weights.

        A weight that multiplies several outputs (those of a block) is scaled where all of them have the same factor;
        otherwise the outputs behind it are. What reaches the read beside the weights (a residual) is scaled as it is.
        """
        members, given = self.columns[mixer.site.index], mixer.source_weights(c)
        assert members is not None
        assert given is not None
        row, one = dict(zip(self.routes.sources, factors, strict=True)), torch.ones_like(factors[0])
        columns = [common_factor([row.get(i, one) for i in behind] or [one]) for behind in members]
        alpha = given.weights.expand(*self.tokens, *given.weights.shape[-2:])  # [..., H, C]
        scaled = alpha * torch.cat(torch.broadcast_tensors(*columns), -1).unsqueeze(-2)
        tiny = torch.finfo(scaled.dtype).tiny
        scaled = scaled * alpha.sum(-1, keepdim=True) / scaled.sum(-1, keepdim=True).clamp(min=tiny)
        masked, unread = mixer.with_weights(c, scaled), mixer.with_weights(c, torch.zeros_like(scaled))
        beside = self.routes.weights(mixer, unread)
        through = self.routes.weights(mixer, masked) - beside
        column_of = {i: f for f, behind in zip(columns, members, strict=True) for i in behind}
        done = torch.stack([column_of.get(i, one).expand_as(one) for i in row])  # by the weights
        left = factors / torch.where(done == 0, 1, done)
        h = ops.wide(mixer.combine(state, masked))
        h = h + self.routes.total(beside, factors - 1) + self.routes.total(through, left - 1)
        return h.to(state[0].dtype)


def common_factor(factors: list[Tensor]) -> Tensor:
    """The factor of a weight: that of all outputs behind it where they agree, else 1."""
    together = torch.stack(torch.broadcast_tensors(*factors))
    return torch.where((together == together[0]).all(0), together[0], 1)


def checked_scale(name: str, scale: Tensor, n: int) -> Tensor:
    if not isinstance(scale, Tensor) or scale.dim() not in (2, 3) or scale.shape[-2:] != (n, n):
        got = list(scale.shape) if isinstance(scale, Tensor) else type(scale).__name__
        raise ValueError(f"{name} is {got}; expected a tensor [{n}, {n}] or [batch, {n}, {n}]: a row for each reader")
    if not torch.isfinite(scale).all():
        raise ValueError(f"{name} has entries that are not finite; expected numbers, 1 where nothing is edited")
    later = torch.ones(n, n, dtype=torch.bool, device=scale.device).triu(1)  # no row reads these
    return ops.wide(scale.detach()).masked_fill(later, 1)


@contextmanager
def editing_values(model: nn.Module, scale: Tensor) -> Iterator[None]:
    """While open, what raw values contribute to the values that attention layers cache is scaled."""
    mixers = value_mixers(model)
    if not mixers:
        raise ValueError(
            f"values were to be edited, but no attention of this {type(model).__name__} mixes values over depth; "
            "expected a model with depth_attention or value_residual. Leave out `values`"
        )
    edits = EditedValues(checked_scale("values", scale, len(mixers)))
    try:
        for mixer in mixers:
            mixer.mix = partial(edits.mix, mixer)  # type: ignore[method-assign]
        yield
    finally:
        for mixer in mixers:
            mixer.__dict__.pop("mix", None)


class EditedValues:
    """Follows the raw values of attention layers through one pass, as one-hot values; see `Routes`."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale
        self.sources: list[int] = (scale != 1).flatten(0, -2).any(0).nonzero().flatten().tolist()
        self.state: State = ()
        self.raw: dict[int, Tensor] = {}

    def mix(self, mixer: KVMixer, q: Tensor, k: Tensor, v: Tensor, kv: State) -> tuple[Tensor, State]:
        layer = mixer.site.index
        if layer == 0:
            self.state, self.raw = mixer.begin(), {}
        c = mixer.coeff(q, k, kv)
        mixed = mixer.combine(v, kv, c)
        after = mixer.update(k, v, mixed, kv)
        if not self.sources:
            return mixed, after
        alone = ops.wide(k).new_zeros((len(self.sources), *k.shape[:-1], 1))  # [k, B, K, T, 1]
        if layer in self.sources:
            alone[self.sources.index(layer)], self.raw[layer] = 1, v
        weights = mixer.combine(alone, self.state, c)
        self.state = mixer.update(k, alone, weights, self.state)
        factors = self.scale.to(v.device)[..., layer, self.sources].movedim(-1, 0)
        factors = factors.reshape(*factors.shape, *[1] * (alone.dim() - factors.dim()))
        known = [s for s in range(len(self.sources)) if self.sources[s] in self.raw]
        gains = [((factors - 1) * weights)[s] for s in known]
        added = ops.weighted_sum([ops.wide(self.raw[self.sources[s]]) for s in known], gains) if known else 0
        return (ops.wide(mixed) + added).to(mixed.dtype), after
