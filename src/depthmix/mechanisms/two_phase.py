"""The two-phase read of Attention Residuals (arXiv 2603.15031, algorithm 1), exact and for training as well.

Queries are known in advance, so sites are read in groups. Phase 1, at a group's first site: all its queries attend over
the sources that are finished by then, in one pass. Phase 2, at each site: what phase 1 found joins the few sources that
came since (the running partial of a block; the group's own outputs) as one more source, by online softmax. The backward
pass of phase 1 sums the gradients of all readers into each source at once.

What phase 1 found for later sites travels behind the essential tensors of the state, a mixture and a log-sum-exp for
each reader, and is used up one by one. Where it was dropped, at a cut, the next read makes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix import ops
from depthmix.mechanisms.base import DepthMixer, Site, State, StateSpec
from depthmix.mechanisms.source_attention import SourceAttention


class TwoPhaseAttention(SourceAttention):
    """A SourceAttention whose sites are read in groups of `group_size`."""

    readers: tuple[TwoPhaseAttention, ...] = ()  # the sites of this group from this one on, as far as they are here

    @classmethod
    def group_size(cls, config: Any, depth: int) -> int:
        raise NotImplementedError("a subclass says how many sites share phase 1")

    @classmethod
    def finished(cls, config: Any, site: Site) -> int:
        """How many sources are complete when the group of `site` begins."""
        raise NotImplementedError("a subclass says what phase 1 covers")

    @classmethod
    def in_two_phases(cls, config: Any) -> bool:
        return bool(config.two_phase and config.heads == 1 and not config.counts_sources)

    def __init__(self, site: Site, config: Any) -> None:
        super().__init__(site, config)
        self.settled = self.finished(config, site)
        self.shares_reads = self.in_two_phases(config) and self.attends(site)

    def bind(self, following: Sequence[DepthMixer]) -> None:
        size = self.group_size(self.config, self.site.depth)
        group = self.site.index // size
        same = [m for m in following if isinstance(m, TwoPhaseAttention) and m.site.index // size == group]
        self.readers = tuple(same)

    def with_derived(self, spec: StateSpec, site: Site) -> StateSpec:
        """`spec` of the essential tensors with what phase 1 left behind them."""
        size = self.group_size(self.config, site.depth)
        place = site.index % size
        if not self.in_two_phases(self.config) or not place or self.finished(self.config, site) <= 1:
            return spec
        waiting = min(size - place, site.depth + 1 - site.index)
        derived: tuple[tuple[int, ...], ...] = ((site.dim,), ()) * waiting
        return StateSpec(spec.shapes + derived, spec.essential, spec.sealed)

    def folded(self) -> Tensor:
        assert self.query is not None
        return ops.fold(self.query, self.key_weight, self.query.dtype)

    def read(self, state: State) -> tuple[Tensor, Any]:
        if not self.shares_reads:
            return super().read(state)
        self.check_state(state)
        sources, derived = state[: self.expects.essential], state[self.expects.essential :]
        options = {"normalize": self.config.key_norm, "eps": self.config.eps, "scale": self.config.scale}
        if len(derived) % 2:  # cut in the middle of a pair
            derived = ()
        if not derived and (self.settled <= 1 or len(self.readers) <= 1):  # nothing to share
            return ops.mixture(sources, self.folded().to(ops.accumulator(sources[0].dtype)), **options), ()
        if not derived:
            queries = torch.cat([reader.folded() for reader in self.readers])
            mixed, lse = ops.mixtures(sources[: self.settled], queries.to(ops.accumulator(sources[0].dtype)), **options)
            derived = tuple(tensor for pair in zip(mixed, lse, strict=True) for tensor in pair)
        (h, lse_here), waiting = derived[:2], derived[2:]
        if recent := sources[self.settled :]:
            query = self.folded().to(ops.accumulator(h.dtype))
            (h,), _ = ops.mixtures(recent, query, (h, lse_here), **options)
        return h, waiting

    def write(self, state: State, carry: Any, y: Tensor) -> State:
        if not self.shares_reads:
            return super().write(state, carry, y)
        y = self.checked_output(state, y)
        return (*self.update(state[: self.expects.essential], None, y), *carry)
