"""The two-phase read of Attention Residuals (arXiv 2603.15031, algorithm 1), exact and for training as well.

Queries are known in advance, so sites are read in groups. Phase 1, at a group's first site: all queries of the group
attend over the sources that are finished by then, in one pass. Phase 2, at each site: the result of phase 1 is merged
with the few newer sources (the running partial of a block; the group's own outputs) by online softmax. The backward
pass of phase 1 sums the gradients of all readers into each source at once.

The results of phase 1 for later sites, a mixture and a log-sum-exp for each reader, follow the essential tensors of the
state; each reader removes its own. If they were dropped at a cut, the next read computes them again. If a kernel reads
each site separately at lower cost (`ops.sharing_pays`), there is no phase 1 and the state has no such tensors.
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

    readers: tuple[TwoPhaseAttention, ...] = ()  # this site and the later ones of its group that this stack holds

    @classmethod
    def group_size(cls, config: Any, depth: int) -> int:
        raise NotImplementedError("a subclass must implement `group_size`")

    @classmethod
    def finished(cls, config: Any, site: Site) -> int:
        """The number of sources that are complete when the group of `site` begins."""
        raise NotImplementedError("a subclass must implement `finished`")

    @classmethod
    def in_two_phases(cls, config: Any, depth: int) -> bool:
        """Whether reads share passes: determines what runs, and the contents of `spec` and of the facts."""
        return bool(config.single_softmax and 1 < cls.group_size(config, depth) < depth)

    @classmethod
    def two_phase_flops(cls, config: Any, dim: int, rows: Sequence[int]) -> int:
        """FLOPs of all reads in two phases; `rows` is the number of sources that each site reads."""
        depth, flops = len(rows) - 1, 0
        size = cls.group_size(config, depth)
        for start in range(0, depth + 1, size):
            group, settled = rows[start : start + size], cls.finished(config, Site(start, depth, dim, "out"))
            if settled == 1 or len(group) == 1:  # nothing to share
                flops += sum(config.read_flops(dim, n) for n in group if n > 1)
            else:
                flops += config.attend_flops(dim, settled, queries=len(group))
                flops += sum(config.attend_flops(dim, n - settled, prior=1) for n in group if n > settled)
                flops += dim * len(group) * config.counts_sources
        return flops

    def __init__(self, site: Site, config: Any) -> None:
        super().__init__(site, config)
        self.settled = self.finished(config, site)
        self.is_mixture = config.single_softmax and self.attends(site)
        self.options, self.counts_sources = config.read_options, config.counts_sources

    def bind(self, following: Sequence[DepthMixer]) -> None:
        size = self.group_size(self.config, self.site.depth)
        group = self.site.index // size
        same = [m for m in following if isinstance(m, TwoPhaseAttention) and m.site.index // size == group]
        self.readers = tuple(same)

    def with_derived(self, spec: StateSpec, site: Site) -> StateSpec:
        """`spec` of the essential tensors, extended by the results of phase 1."""
        size = self.group_size(self.config, site.depth)
        position = site.index % size
        if not self.in_two_phases(self.config, site.depth) or not position or self.finished(self.config, site) <= 1:
            return spec
        waiting = min(size - position, site.depth + 1 - site.index)
        derived: tuple[tuple[int, ...], ...] = ((site.dim,), ()) * waiting
        return StateSpec(spec.shapes + derived, spec.essential, spec.sealed)

    def folded(self) -> Tensor:
        assert self.query is not None
        return ops.fold(self.query, self.key_weight)

    def read(self, state: State) -> tuple[Tensor, Any]:
        if not self.is_mixture:
            return super().read(state)
        self.check_state(state)
        sources, derived = state[: self.expects.essential], state[self.expects.essential :]
        query, options = self.folded(), self.options
        if len(derived) % 2:  # cut in the middle of a pair
            derived = ()
        to_share = derived or (self.settled > 1 and len(self.readers) > 1)
        if to_share and ops.sharing_pays(sources, query, options):
            h, waiting = self.read_ahead(sources, derived, query)
        else:
            h, waiting = ops.read_one(sources, query, options), ()
        return (h * len(sources) if self.counts_sources else h), waiting

    def read_ahead(self, sources: State, derived: State, query: Tensor) -> tuple[Tensor, State]:
        """Phase 1 if its results are missing, then phase 2. Returns h and the results for later sites of the group."""
        if not derived:
            queries = torch.cat([reader.folded() for reader in self.readers])
            mixed, lse = ops.read_many(sources[: self.settled], queries, options=self.options)
            derived = tuple(tensor for pair in zip(mixed, lse, strict=True) for tensor in pair)
        h, lse_here, *waiting = derived
        if recent := sources[self.settled :]:
            (h,), _ = ops.read_many(recent, query, (h, lse_here), options=self.options)
        return h, tuple(waiting)

    def write(self, state: State, carry: Any, y: Tensor) -> State:
        if not self.is_mixture:
            return super().write(state, carry, y)
        y = self.checked_output(state, y)
        return (*self.update(state[: self.expects.essential], None, y), *carry)
