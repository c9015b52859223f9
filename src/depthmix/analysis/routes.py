"""What single sources contribute to each read of a running pass, followed through the mechanism's linear maps.

Axes: ... token, D channel, G group of channels with weights of their own (1, heads or D), k followed source, L
sublayers, C source that a mechanism names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix import ops
from depthmix.mechanisms import DepthMixer, DepthStack, SourceWeights, State

PROBE_SEED = 0


class Routes:
    """Follows some sources (indices i of v_i) through one pass: their contributions to each read.

    Where sources have weights, one-hot sources of G channels are followed, which gives columns of M; where they are
    multiplied by matrices, the writes themselves are followed, each with all others zero.
    """

    def __init__(self, stack: DepthStack, sources: Sequence[int]) -> None:
        mixer = stack.all_mixers()[0]
        self.sources = list(sources)
        self.operator_valued = mixer.operator_valued
        self.dim = stack.dim
        self.width = stack.dim if self.operator_valued else mixer.groups
        self.state: State = ()
        self.outputs: dict[int, Tensor] = {}  # v_i of the followed sources, as far as the pass has come

    def begin(self, mixer: DepthMixer, x: Tensor) -> None:
        self.outputs = {0: x} if 0 in self.sources else {}
        self.state = mixer.begin(self.isolated(0, x))

    def isolated(self, index: int, v: Tensor) -> Tensor:
        """[k, ..., width]: source `index` alone: 1 (or its write v) in its own row, 0 in all others."""
        size = (len(self.sources), *v.shape[:-1], self.width)
        alone = v.new_zeros(size, dtype=ops.accumulator(v.dtype))
        if index in self.sources:
            alone[self.sources.index(index)] = ops.wide(v) if self.operator_valued else 1
        return alone

    def weights(self, mixer: DepthMixer, c: Any) -> Tensor:
        """[k, ..., width]: M's entries in this row; contributions themselves if sources are multiplied by matrices."""
        return mixer.combine(self.state, c)

    def total(self, weights: Tensor, factors: Tensor) -> Tensor:
        """[..., D]: the sum of the followed sources' contributions to a read, each times its factor [..., 1]."""
        if self.operator_valued:
            return (factors * weights).sum(0)
        known = [k for k, i in enumerate(self.sources) if i in self.outputs]
        if not known:
            return torch.zeros((), device=weights.device)
        gains = [self.spread(factors[k] * weights[k]) for k in known]
        return ops.weighted_sum([ops.wide(self.outputs[self.sources[k]]) for k in known], gains)

    def spread(self, weights: Tensor) -> Tensor:
        """[..., G] as [..., D], or [..., 1] where there is one group."""
        return weights if weights.shape[-1] == 1 else weights.repeat_interleave(self.dim // weights.shape[-1], -1)

    def write(self, mixer: DepthMixer, c: Any, y: Tensor, v: Tensor) -> None:
        """After the sublayer returned y, of which `value` made v and c."""
        index = mixer.site.index + 1
        if index in self.sources:
            self.outputs[index] = y
        self.state = mixer.update(self.state, c, self.isolated(index, v))


def replaces_weights(mixer: DepthMixer) -> bool:
    """Whether its weights over sources, if there are any, can be replaced."""
    return type(mixer).with_weights is not DepthMixer.with_weights


class Columns:
    """Which outputs stand behind each source that a mechanism weights, found through its linear maps.

    members: for each row, for each of its weights the indices i of the v_i that it multiplies; None: no weights that
        can be replaced.
    readable: for each row, the indices i of the v_i that it can read.
    partial: for each row, whether its newest source is still growing.
    normalised: whether the weights of every row sum to 1.
    """

    @torch.no_grad()
    def __init__(self, stack: DepthStack) -> None:
        generator = torch.Generator().manual_seed(PROBE_SEED)
        home = next((p for p in stack.parameters()), torch.zeros(()))
        dtype = home.dtype if home.is_floating_point() else torch.float32
        draw = [torch.randn(1, stack.dim, generator=generator).to(home.device, dtype) for _ in range(stack.depth + 1)]
        routes = Routes(stack, range(stack.depth + 1))
        mixers = stack.all_mixers()
        state = mixers[0].begin(draw[0])
        routes.begin(mixers[0], draw[0])
        self.members: list[list[set[int]] | None] = []
        self.readable: list[set[int]] = []
        self.partial: list[bool] = []
        self.normalised = all(mixer.weights_sum_to_one for mixer in mixers)
        for mixer in mixers:
            c = mixer.coeff(state)
            given = mixer.source_weights(c) if replaces_weights(mixer) else None
            self.readable.append({i for i, w in enumerate(routes.weights(mixer, c)) if w.any()})
            self.members.append(None if given is None else self.members_of(mixer, c, given, routes))
            self.partial.append(given is not None and given.partial)
            if mixer.site.is_out:
                break
            y = draw[mixer.site.index + 1]
            c, v = mixer.value(state, c, y)
            routes.write(mixer, c, y, v)
            state = mixer.update(state, c, v)

    def members_of(self, mixer: DepthMixer, c: Any, given: SourceWeights, routes: Routes) -> list[set[int]]:
        count = len(given.names)
        if count == 1:
            return [{i for i, w in enumerate(routes.weights(mixer, c)) if w.any()}]
        lone = torch.eye(count, dtype=given.weights.dtype, device=given.weights.device)
        none = routes.weights(mixer, mixer.with_weights(c, torch.zeros_like(given.weights)))
        members = []
        for column in lone:
            through = routes.weights(mixer, mixer.with_weights(c, column.expand_as(given.weights))) - none
            members.append({i for i, w in enumerate(through) if w.any()})
        return members
